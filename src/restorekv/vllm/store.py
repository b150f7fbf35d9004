"""The documents of a store and which of them a prompt asks; knows nothing of vLLM."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from restorekv.compression.portable import MARK, Portable, load_portable, mark
from restorekv.errors import CacheFileError, RestoreKVError

MEMORY = 1 << 30  # bytes of keys and values that a process keeps unless its options say otherwise


@dataclass(frozen=True)
class Expected:
    """What a document must be made for to fit the engine's model; a `fingerprint` of None fits any weights."""

    layers: int
    heads: int
    head_dim: int
    rope: Mapping[str, Any]
    dtype: str
    vocabulary: int
    fingerprint: str | None = None

    def check(self, portable: Portable, path: Path) -> None:
        """Refuses a document of another model."""
        m = portable.manifest
        own = {"dtype": m.dtype, "rope": m.rope, **{name: m.shape[name] for name in ("layers", "heads", "head_dim")}}
        for name, value in own.items():
            needed = getattr(self, name)
            if value != needed:
                raise CacheFileError(f"{path} was made for {name} {value}, the engine's model has {needed}.")
        if portable.vocabulary != self.vocabulary:  # the placeholders are drawn from it
            raise CacheFileError(f"{path} was made for {portable.vocabulary} token ids, not {self.vocabulary}.")
        if self.fingerprint not in (None, m.fingerprint):
            raise CacheFileError(f"{path} was made with other weights ({m.fingerprint}, {m.model}).")


@dataclass(frozen=True)
class Document:
    """A file of the store: the placeholders that stand for it, and a hash of its contents."""

    path: Path
    name: str
    ids: tuple[int, ...]


class Store:
    """Portable files of a folder. A new file is found when a prompt first asks it; damaged ones are never served."""

    def __init__(self, folder: str | Path, expected: Expected, limit: int = MEMORY) -> None:
        self.folder, self.expected, self.limit = Path(folder), expected, limit
        if not self.folder.is_dir():
            raise RestoreKVError(f"The store {folder} is no folder; make it and put files of restorekv export there.")
        self.documents: dict[Path, tuple[int, Document | None]] = {}  # by path, with the time of the file's change
        self.loaded: OrderedDict[str, Portable] = OrderedDict()
        self.guard = threading.Lock()

    def find(self, ids: Sequence[int], wanted: str | None = None) -> Document | None:
        """Returns the document that a prompt asks, or None for a prompt that asks none.

        `wanted`: the name or the file's name that the request gives as well. Raises RestoreKVError for placeholders
        that stand for no document of the store, and for a prompt without a question.
        """
        if list(ids[:MARK]) != mark(self.expected.vocabulary):
            if wanted:
                raise RestoreKVError(f"The prompt does not begin with placeholders of the document {wanted}.")
            return None
        document = self.matching(ids) or (self.scan() and self.matching(ids))
        if not document:
            raise RestoreKVError("The prompt begins with placeholders of a document that the store does not have.")
        if wanted and wanted not in (document.name, document.path.stem, document.path.name):
            raise RestoreKVError(f"The prompt begins with placeholders of {document.path.name}, not of {wanted}.")
        if len(ids) <= len(document.ids):
            raise RestoreKVError(f"The prompt has placeholders of {document.path.name} and no question.")
        return document

    def matching(self, ids: Sequence[int]) -> Document | None:
        """Returns the known document whose placeholders these ids begin with; its file must still be there."""
        for _, document in self.documents.values():
            if document and tuple(ids[: len(document.ids)]) == document.ids and document.path.exists():
                return document
        return None

    def scan(self) -> bool:
        """Reads files that are new or changed; returns whether there were any."""
        news = False
        for path in sorted(self.folder.glob("*.safetensors")):
            changed = path.stat().st_mtime_ns
            if self.documents.get(path, (None,))[0] != changed:
                news = True
                try:
                    portable = self.checked(path)
                    self.documents[path] = changed, Document(path, portable.name, tuple(portable.ids.tolist()))
                except RestoreKVError:
                    self.documents[path] = changed, None  # a request that asks it is told that there is none
        return news

    def checked(self, path: Path) -> Portable:
        portable = load_portable(path)
        self.expected.check(portable, path)
        return portable

    def pairs(self, document: Document) -> tuple[Tensor, Tensor]:
        """Returns keys and values (L, H, m, D) of a document; refuses a file that is another one by now."""
        with self.guard:
            if document.name not in self.loaded:
                portable = self.checked(document.path)
                if portable.name != document.name:
                    raise CacheFileError(f"{document.path} was replaced by another document; ask that one.")
                self.loaded[document.name] = portable
            self.loaded.move_to_end(document.name)
            portable = self.loaded[document.name]
            while len(self.loaded) > 1 and sum(map(size, self.loaded.values())) > self.limit:
                self.loaded.popitem(last=False)
            return portable.keys, portable.values


def heads_of(rank: int, ranks: int, heads: int, own: int) -> slice:
    """Returns the `own` KV heads that a tensor parallel rank holds; of more ranks than heads, neighbors share one."""
    first = rank * heads // ranks
    return slice(first, first + own)


def size(portable: Portable) -> int:
    return portable.keys.nbytes + portable.values.nbytes
