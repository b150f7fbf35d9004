"""Compress a long context's KV cache once, restore what eviction lost, ask anything."""

__version__ = "0.1.0"
