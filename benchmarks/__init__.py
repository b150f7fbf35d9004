"""Benchmarks of time and memory on this machine: `python -m benchmarks NAME`."""
