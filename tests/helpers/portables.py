"""Portable caches for the connector's store."""

from tests.helpers.compressing import compress_with

TEXTS = [
    f"The code of the {color} house is seven; nobody lives there. " * 3 for color in ("red", "blue")
]
QUESTION = "Which code?"


def portable_of(model, tokenizer, text):
    options = {"evictor": "knorm", "adapter": None, "tokens_per_head": 16, "allocation": "per-head"}
    return compress_with(model, tokenizer, text, **options).portable()
