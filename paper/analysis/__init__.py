"""Analyses: what eviction does to attention and predictions, what survives, what restore tokens
attend to.

Every analysis is a module with `DEFINITIONS`, `measure(case)`, which returns plain figures of one
document at one ratio, and `pool_figures(figures)`, which returns those of all documents. `run`
walks over the documents of a benchmark.
"""
