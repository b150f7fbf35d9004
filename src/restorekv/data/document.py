"""What a source yields: a context with its licence, or the reason why a row gives none."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """`name` identifies it within its source; `text` is the whole context."""

    name: str
    text: str
    licence: str


@dataclass(frozen=True)
class Dropped:
    """A row that gives no context; reasons are counted in the manifest."""

    reason: str
