"""The compressed KV cache: a context with its own length in every head, a tail that grows, and
8-bit numbers.
"""
