"""What a source yields for a row: contexts with their license, or the reason why the row is
dropped.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig

SURROGATE = re.compile("[\ud800-\udfff]")  # half a character, which JSON may hold


@dataclass(frozen=True)
class SourceDocument:
    """A context; `name` identifies it within its source.

    `book` names the book that a chunk is from, and `more` says whether another chunk of it follows.
    `asked` holds (kind, question) pairs that come with the text; `studied` says whether the teacher
    asks its own questions. `made` says that the text was made up here and is from no row.
    """

    name: str
    text: str
    license: str
    book: str | None = None
    more: bool = False
    asked: tuple[tuple[str, str], ...] = ()
    studied: bool = True
    made: bool = False


class DropRow(Exception):  # noqa: N818
    """Raised for a row that gives no context. The message is the reason, under which the manifest
    counts the row.
    """


RowReader = Callable[[int, dict, BuildConfig, Tokenizer], Iterable[SourceDocument]]
Reader = Callable[[Iterator[dict], BuildConfig, Tokenizer], Iterator[SourceDocument | DropRow]]


def read_each_row(read_row: RowReader) -> Reader:
    """Turn a reader of one row into a reader of all rows, which yields a DropRow instead of raising
    it.
    """

    @wraps(read_row)
    def read_rows(
        rows: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer
    ) -> Iterator[SourceDocument | DropRow]:
        for index, row in enumerate(rows):
            try:
                yield from read_row(index, row, config, tokenizer)
            except DropRow as reason:
                yield reason

    return read_rows


def read_text_field(row: dict, name: str) -> str:
    """Return a field's text, or "" if the row has no such field; join a list of {type, text}. Raise
    DropRow for a field that is not text.
    """
    value = row.get(name)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        # Some sets store a message as a list of {type, text}.
        texts = [part["text"] for part in value if isinstance(part.get("text"), str)]
        value = "\n".join(texts)
    if value is None:
        return ""
    if not isinstance(value, str) or SURROGATE.search(value):
        raise DropRow(f"field {name} is not text")
    return value


def make_single_document(
    name: str, text: str, license: str, missing: str = "no document"
) -> list[SourceDocument]:
    """Return the text as one document; raise DropRow with the reason `missing` for a blank text."""
    if not text.strip():
        raise DropRow(missing)
    return [SourceDocument(name, text, license)]
