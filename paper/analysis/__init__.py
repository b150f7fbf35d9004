"""Analyses of compressed caches: what eviction does to attention and predictions, which pairs
survive, and what restore tokens attend to.

Every analysis is a module with `DEFINITIONS`, `measure(case)`, which returns the figures of one
document at one ratio as plain JSON values, and `pool_figures(figures)`, which returns those of all
documents. `run` iterates over the documents of a benchmark.
"""
