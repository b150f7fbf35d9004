"""Analyses: what eviction does to attention and predictions, what survives, what restore tokens
attend to.

Every analysis is a module with `DEFINITIONS`, `measure(case)`, which returns plain figures of one
document at one ratio, and `pooled(figures)`, which returns those of all documents. `run` goes over
the documents of a benchmark.
"""
