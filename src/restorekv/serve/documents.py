"""What the server says about documents: the name of their content, and what is wrong with a text
that is too long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError, TextTooLongError


def document_hash(kind: str) -> hashlib._Hash:
    """Returns the SHA-256 that names a document of a kind, once its content was added.

    The kind's length and the kind come first, so that no content of one kind has the name of a
    content of another.
    """
    return hashlib.sha256(len(kind).to_bytes(8, "big") + kind.encode())


@contextmanager
def told_to_clients() -> Iterator[None]:
    """Says what a client can do about a text that is too long, in place of the flags of other
    commands.
    """
    try:
        yield
    except TextTooLongError as error:
        raise RestoreKVError(
            f"The text has {error.tokens:,} tokens, and the model's {error.positions:,} positions have room for "
            f"{error.room:,} and a question; shorten it, split it into several files, or choose a server whose --model "
            "has more positions."
        ) from None


def check_size(text: str, tokenizer: Tokenizer, positions: int) -> None:
    """Refuses a text that is too long however it is tokenized; tokenizing it alone may take
    gigabytes.
    """
    most = positions * longest_token(tokenizer)
    if len(text) > most:
        raise RestoreKVError(
            f"The text has {len(text):,} characters, and the model's {positions:,} positions have room for fewer than "
            f"{most:,}; split it."
        )


@lru_cache(maxsize=4)
def longest_token(tokenizer: Tokenizer) -> int:
    """Returns the characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))
