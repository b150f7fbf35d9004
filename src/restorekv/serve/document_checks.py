"""What every engine needs for documents: the hash that names one, and checks that one is not too
long and that several were compressed in the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.context import CompressedContext
from restorekv.errors import ModelError, TextTooLongError, UnlikeContextsError
from restorekv.many_contexts import compose


def start_document_hash(kind: str) -> hashlib._Hash:
    """Return a SHA-256 hash that names a document of a kind, once its content is added.

    It begins with the length of the kind and the kind, so documents of different kinds never have
    the same name: the same bytes as .html and as .txt are different documents.
    """
    return hashlib.sha256(len(kind).to_bytes(8, "big") + kind.encode())


@contextmanager
def explain_length() -> Iterator[None]:
    """Explain to clients what they can do about a text that is too long.

    The library's own message names flags of other commands.
    """
    try:
        yield
    except TextTooLongError as error:
        raise TextTooLongError(
            f"The text has {error.tokens:,} tokens, and the model's {error.positions:,} positions "
            f"have room for {error.room:,} and a question; shorten it, split it and ask "
            "about the parts one by one, or choose a server whose --model has more positions."
        ) from None


def make_unlike_error() -> UnlikeContextsError:
    """Return the error of a question to documents that cannot be asked together."""
    return UnlikeContextsError(
        "These documents cannot be asked together, since they were compressed differently; ask "
        "about one at a time, or upload the text of a .rkv file instead of the file."
    )


def compose_documents(contexts: Sequence[CompressedContext]) -> CompressedContext:
    """Return the context of a question's documents, composed if there are several.

    Raises:
        UnlikeContextsError: They were not compressed in the same way, or the model's caches cannot
            be joined. The library's own messages name what clients cannot do.
    """
    if len(contexts) == 1:
        return contexts[0]
    try:
        return compose(contexts)
    except UnlikeContextsError:
        raise make_unlike_error() from None
    except ModelError:
        raise UnlikeContextsError(
            "Several documents cannot be asked together with this server's model, whose caches "
            "cannot be joined; ask about one at a time, or upload the texts as one file."
        ) from None


def check_size(text: str, tokenizer: Tokenizer, positions: int) -> None:
    """Refuse a text that is too long however it is tokenized.

    Tokenizing such a text to count its tokens could take gigabytes.
    """
    max_chars = positions * _find_longest_token(tokenizer)
    if len(text) > max_chars:
        raise TextTooLongError(
            f"The text has {len(text):,} characters, and the model's {positions:,} positions have "
            f"room for fewer than {max_chars:,}; split it."
        )


@lru_cache(maxsize=4)
def _find_longest_token(tokenizer: Tokenizer) -> int:
    """Return how many characters the longest token has."""
    return max(map(len, tokenizer.get_vocab()))
