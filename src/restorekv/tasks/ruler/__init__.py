"""RULER (arXiv 2404.06654): thirteen tasks, from kvpress's data set or generated for any length and
tokenizer.
"""
