"""What eviction does to attention and predictions, what survives, where the restore tokens look, and what it all costs.

Every analysis is a module with `DEFINITIONS`, `measure(case)` -> plain figures of one document at one ratio, and
`pooled(pool)` -> those of all documents. `run` goes over a benchmark, `efficiency` measures time and memory.
"""
