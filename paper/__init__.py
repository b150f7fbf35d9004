"""Every table and figure of the RestoreKV paper (arXiv 2608.01247), measured here and compared with
the paper's figures.

An experiment (`experiments/`) says what is measured and what the paper claims about it; `setting`
says on which model and benchmarks. `plan` turns both into cells of a grid, `carry_out` measures
them, `scores` judges the claims, `comparison_tables` lays out the figures, and `write` makes the
page.
"""
