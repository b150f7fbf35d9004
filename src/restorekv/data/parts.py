"""The unfinished work of one source: a line of JSON per context, appended when its answers are complete.

A line that a killed process left half-written is cut off when the work goes on, so no context is asked about twice and
none is lost but the one at hand.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from restorekv.data.document import Document
from restorekv.errors import RestoreKVError


class Parts:
    """The attempts at the contexts of one source, in their order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        try:
            self.done = [json.loads(line) for line in whole.splitlines()]
        except ValueError as error:
            raise RestoreKVError(f"{path} is damaged; remove it to ask its contexts again.") from error
        if len(whole) < len(content):
            os.truncate(path, len(whole))

    def get(self, index: int, document: Document) -> list[dict] | None:
        """The attempts at the context number `index`, if it has been asked; refuses another document in its place."""
        if index >= len(self.done):
            return None
        if self.done[index]["context"] != mark(document):
            raise RestoreKVError(f"{self.path} is about other documents than now; build into another folder.")
        return self.done[index]["attempts"]

    def add(self, document: Document, attempts: list[dict]) -> None:
        """On disk when this returns."""
        line = json.dumps({"context": mark(document), "attempts": attempts}, ensure_ascii=False) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.done.append(json.loads(line))


def mark(document: Document) -> list[str]:
    """Name and 16 hex digits of the text."""
    return [document.name, hashlib.sha256(document.text.encode()).hexdigest()[:16]]
