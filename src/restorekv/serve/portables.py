"""Portable files of compressed documents, in the folder from which vLLM's connector reads them.

They are copies: the store's caches are what survives. A file is written when its document is first
asked; those asked least recently go first, but never one that a question waits for.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

from restorekv.context import CompressedContext

# Names of files that an earlier server has left here.
OWN = re.compile(r"[0-9a-f]{32}\.safetensors")


class Portables:
    """Files of up to `limit` bytes. A document's name is the keys of its caches, several where it
    is composed.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.limit = limit
        # Placeholders and bytes.
        self.known: OrderedDict[tuple[str, ...], tuple[list[int], int]] = OrderedDict()
        self.asked: Counter[tuple[str, ...]] = Counter()  # questions that need the file now
        self.forgotten: set[tuple[str, ...]] = set()  # which go with their last question
        self.lock = threading.Lock()
        self.writing = threading.Lock()
        for path in folder.iterdir():
            if OWN.fullmatch(path.name):
                path.unlink()

    def path(self, name: Sequence[str]) -> Path:
        return (
            self.folder / f"{hashlib.sha256(' '.join(name).encode()).hexdigest()[:32]}.safetensors"
        )

    def take(self, name: tuple[str, ...], context: CompressedContext) -> list[int]:
        """Returns the placeholders of a document, whose file stays until as many calls of
        `give_back`.
        """
        with self.lock:
            self.asked[name] += 1
        try:
            with self.writing:
                if name not in self.known or not self.path(name).exists():
                    portable = context.portable()
                    portable.save(self.path(name))
                    size = portable.keys.nbytes + portable.values.nbytes
                    with self.lock:
                        self.known[name] = portable.ids.tolist(), size
            with self.lock:
                self.known.move_to_end(name)
                return self.known[name][0]
        except BaseException:
            self.give_back(name)
            raise

    def give_back(self, name: tuple[str, ...]) -> None:
        """Says that a question is answered."""
        with self.lock:
            self.asked[name] -= 1
            total = sum(size for _, size in self.known.values())
            for each in list(self.known):
                newest = each == next(reversed(self.known))
                if not self.asked[each] and (
                    each in self.forgotten or (total > self.limit and not newest)
                ):
                    total -= self.drop(each)
            self.asked += Counter()  # leaves out those that nobody asks

    def forget(self, key: str) -> None:
        """Removes all that was made of a cache, which the store has dropped."""
        with self.lock:
            for each in [name for name in self.known if key in name]:
                if self.asked[each]:
                    self.forgotten.add(each)
                else:
                    self.drop(each)

    def drop(self, name: tuple[str, ...]) -> int:
        """Removes a file and returns its bytes."""
        self.path(name).unlink(missing_ok=True)
        self.forgotten.discard(name)
        return self.known.pop(name)[1]
