"""Every table and figure of the RestoreKV paper (arXiv 2608.01247), measured and shown beside the
paper's figures.

An experiment (`experiments/`) says what is measured and what the paper says it shows; `setting`
says on what; `plan` makes cells of a grid of that, `carry_out` measures them, `scores` judges,
`comparison_tables` lays out the figures and `write` makes the page.
"""
