"""Methods that write a new compact cache instead of choosing among the pairs of the full
one.
"""
