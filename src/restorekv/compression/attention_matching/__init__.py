"""Methods that write a compact cache of their own instead of choosing among the pairs of the full
one.
"""
