"""From a text to a small cache that answers questions: budget, eviction, restore pass, generation,
files.
"""
