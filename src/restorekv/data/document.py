"""What a source yields: a context with its licence, or the reason why a row gives none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """`name` identifies it within its source; `text` is the whole context.

    Of a chunk of a book, `book` tells which one, and `more` that another chunk of it follows. `asked` are questions
    that come with it, each with its kind; `studied` says whether the teacher asks questions of its own.
    """

    name: str
    text: str
    licence: str
    book: str | None = None
    more: bool = False
    asked: tuple[tuple[str, str], ...] = ()
    studied: bool = True


@dataclass(frozen=True)
class Dropped:
    """A row that gives no context; reasons are counted in the manifest."""

    reason: str


def no_text(name: str) -> Dropped:
    return Dropped(f"field {name} is no text")


def text_of(row: dict, name: str, change: Callable[[str], str] = str) -> str | Dropped:
    """The field as `change` leaves it, "" where there is none; a list of parts {type, text} is joined."""
    value = row.get(name)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        value = "\n".join(part["text"] for part in value if isinstance(part.get("text"), str))
    if value is None:
        return ""
    return change(value) if isinstance(value, str) and encodes(value) else no_text(name)


def encodes(text: str) -> bool:
    """Half a surrogate pair, which JSON may hold, is no Unicode text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def document(name: str, text: str | Dropped, licence: str, missing: str = "no document") -> Document | Dropped:
    """A whole text, unless it is blank or none."""
    if isinstance(text, Dropped):
        return text
    return Document(name, text, licence) if text.strip() else Dropped(missing)
