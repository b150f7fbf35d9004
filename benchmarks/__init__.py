"""Speed and memory on this machine, measured side by side: `python -m benchmarks NAME`."""
