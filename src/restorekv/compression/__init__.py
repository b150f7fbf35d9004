"""From a text to a small cache: config, budget, allocation, eviction with a restore pass, streaming
and growing contexts.
"""
