"""What a source yields for a row: a context with its license, or the reason why the row is dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A context; `name` identifies it within its source.

    `book` names the book that a chunk is from, `more` says that another chunk of it follows. `asked` holds (kind,
    question) pairs that come with the text; `studied` says whether the teacher asks questions of its own.
    """

    name: str
    text: str
    license: str
    book: str | None = None
    more: bool = False
    asked: tuple[tuple[str, str], ...] = ()
    studied: bool = True


@dataclass(frozen=True)
class Dropped:
    """A row without a context; the manifest counts the reasons."""

    reason: str


def not_text(name: str) -> Dropped:
    return Dropped(f"field {name} is not text")


def text_of(row: dict, name: str, change: Callable[[str], str] = str) -> str | Dropped:
    """Returns change(field), or "" where the row has no such field; joins a list of parts {type, text}."""
    value = row.get(name)
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        value = "\n".join(part["text"] for part in value if isinstance(part.get("text"), str))
    if value is None:
        return ""
    return change(value) if isinstance(value, str) and is_unicode(value) else not_text(name)


def is_unicode(text: str) -> bool:
    """Returns whether the text has no lone surrogate, which JSON may hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole(name: str, text: str | Dropped, license: str, missing: str = "no document") -> Document | Dropped:
    """Returns the text as one document; a blank text is dropped because of `missing`."""
    if isinstance(text, Dropped):
        return text
    return Document(name, text, license) if text.strip() else Dropped(missing)
