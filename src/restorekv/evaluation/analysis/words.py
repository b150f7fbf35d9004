"""The tokens of a context as text, and a class for each by a simple rule."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase as Tokenizer

CLASSES = ("number", "name", "punctuation", "other")
WORD = re.compile(r"[^\W\d_]+")


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of every token alone, with the blank that begins a word."""
    named = tokenizer.convert_ids_to_tokens(list(ids))
    texts = [tokenizer.decode([token]) for token in ids]
    # SentencePiece writes the blank as U+2581 and leaves it out when a token is decoded alone.
    return [
        f" {text.lstrip(' ')}" if name.startswith("\u2581") else text for name, text in zip(named, texts, strict=True)
    ]


def classes(texts: Sequence[str]) -> list[str]:
    """One of CLASSES for every piece.

    number: it has a digit. name: it lies in a word that begins with a capital and occurs nowhere in the text in small
    letters. punctuation: it has neither letters nor digits, but something visible. other: the rest.
    """
    text = "".join(texts)
    words = list(WORD.finditer(text))
    small = {word.group() for word in words if word.group().islower()}
    named = [False] * len(text)
    for word in words:
        if word.group()[0].isupper() and word.group().lower() not in small:
            named[word.start() : word.end()] = [True] * len(word.group())
    found, start = [], 0
    for piece in texts:
        end = start + len(piece)
        found.append(class_of(piece, any(named[start:end])))
        start = end
    return found


def class_of(piece: str, named: bool) -> str:
    if any(letter.isdigit() for letter in piece):
        return "number"
    if named:
        return "name"
    return "other" if any(letter.isalpha() for letter in piece) or not piece.strip() else "punctuation"
