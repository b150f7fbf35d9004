"""The commands of `python -m benchmarks`, a module with the flags of each benchmark."""
