"""The documents of a store and which of them a prompt asks; knows nothing of vLLM."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.storage.portable import MARK, Portable, load_portable, mark

MEMORY = 1 << 30  # bytes of keys and values that a process keeps unless its options say otherwise


@dataclass(frozen=True)
class Expected:
    """What a document must be made for to fit the engine's model; a `fingerprint` of None fits any
    weights.

    `dtype` is the engine's, to which keys and values are cast.
    """

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
        own = {"rope": m.rope, **{name: m.shape[name] for name in ("layers", "heads", "head_dim")}}
        for name, value in own.items():
            needed = getattr(self, name)
            if value != needed:
                raise CacheFileError(
                    f"{path} was made for {name} {value}, the engine's model has {needed}."
                )
        if portable.vocabulary != self.vocabulary:  # the placeholders are drawn from it
            raise CacheFileError(
                f"{path} was made for {portable.vocabulary} token ids, not {self.vocabulary}."
            )
        if self.fingerprint not in (None, m.fingerprint):
            raise CacheFileError(
                f"{path} was made with other weights ({m.fingerprint}, {m.model})."
            )


@dataclass(frozen=True)
class Document:
    """A file of the store: a hash of its contents, and the placeholders that stand for it.

    `problem` says why the file is not served; without ids it cannot even be read.
    """

    path: Path
    name: str = ""
    ids: tuple[int, ...] = ()
    problem: str = ""


class Store:
    """Portable files of a folder. A new file is found when a prompt first asks it; damaged ones are
    never served.
    """

    def __init__(self, folder: str | Path, expected: Expected, limit: int = MEMORY) -> None:
        self.folder = Path(folder)
        self.expected = expected
        self.limit = limit
        if not self.folder.is_dir():
            raise RestoreKVError(
                f"The store {folder} is no folder; make it and put files of restorekv export there."
            )
        # By path, with the time of the file's change.
        self.documents: dict[Path, tuple[int, Document]] = {}
        # And those of files that were made for another vocabulary.
        self.marks = [mark(expected.vocabulary)]
        self.loaded: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self.guard = threading.Lock()

    def find(self, ids: Sequence[int], wanted: str | None = None) -> Document | None:
        """Returns the document that a prompt asks, or None for a prompt that asks none.

        `wanted`: the name or the file's name that the request gives as well. Raises RestoreKVError
        for placeholders that stand for no document of the store or for one that does not fit, and
        for a prompt without a question.
        """
        if list(ids[:MARK]) not in self.marks:
            if wanted:
                raise RestoreKVError(
                    f"The prompt does not begin with placeholders of the document {wanted}."
                )
            return None
        document = self.matching(ids) or (self.scan() and self.matching(ids))
        if not document:
            unknown = (
                "The prompt begins with placeholders of a document that the store does not have."
            )
            unreadable = [
                each.problem
                for _, each in self.documents.values()
                if not each.ids and each.path.exists()
            ]
            raise RestoreKVError(" ".join([unknown, *unreadable]))
        if document.problem:
            raise RestoreKVError(document.problem)
        if wanted and wanted not in (document.name, document.path.stem, document.path.name):
            raise RestoreKVError(
                f"The prompt begins with placeholders of {document.path.name}, not of {wanted}."
            )
        if len(ids) <= len(document.ids):
            raise RestoreKVError(
                f"The prompt has placeholders of {document.path.name} and no question."
            )
        return document

    def matching(self, ids: Sequence[int]) -> Document | None:
        """Returns the known document whose placeholders these ids begin with; its file must still
        be there.
        """
        for document in sorted(
            (each for _, each in self.documents.values()), key=lambda each: bool(each.problem)
        ):
            if (
                document.ids
                and tuple(ids[: len(document.ids)]) == document.ids
                and document.path.exists()
            ):
                return document
        return None

    def scan(self) -> bool:
        """Reads files that are new or changed; returns whether there were any."""
        news = False
        for path in sorted(self.folder.glob("*.safetensors")):
            with suppress(OSError):  # it was moved away just now, or is a circle of links
                changed = path.stat().st_mtime_ns
                if self.documents.get(path, (None,))[0] != changed:
                    news = True
                    self.documents[path] = changed, self.described(path)
        return news

    def described(self, path: Path) -> Document:
        """Reads and checks a file."""
        try:
            portable = load_portable(path)
        except RestoreKVError as error:
            return Document(path, problem=str(error))
        if mark(portable.vocabulary) not in self.marks:
            self.marks.append(mark(portable.vocabulary))
        try:
            self.expected.check(portable, path)
            problem = ""
        except CacheFileError as error:
            problem = str(error)
        return Document(path, portable.name, tuple(portable.ids.tolist()), problem)

    def pairs(self, document: Document) -> tuple[Tensor, Tensor]:
        """Returns a document's keys and values (L, H, m, D) in the engine's dtype.

        Raises CacheFileError for a file that is another document by now, or whose numbers the dtype
        cannot hold.
        """
        with self.guard:
            if document.name not in self.loaded:
                portable = load_portable(document.path)
                self.expected.check(portable, document.path)
                if portable.name != document.name:
                    raise CacheFileError(
                        f"{document.path} was replaced by another document; ask that one."
                    )
                self.loaded[document.name] = cast(portable, self.expected.dtype, document.path)
            self.loaded.move_to_end(document.name)
            while (
                len(self.loaded) > 1
                and sum(x.nbytes for pair in self.loaded.values() for x in pair) > self.limit
            ):
                self.loaded.popitem(last=False)
            return self.loaded[document.name]


def cast(portable: Portable, dtype: str, path: Path) -> tuple[Tensor, Tensor]:
    """Returns keys and values in a dtype; refuses numbers that become infinite."""
    pair = tuple(x.to(getattr(torch, dtype)) for x in (portable.keys, portable.values))
    if portable.manifest.dtype != dtype and not all(bool(x.isfinite().all()) for x in pair):
        raise CacheFileError(
            f"{path} holds numbers that are too large for {dtype}; serve the model in another dtype."
        )
    return pair


def heads_of(rank: int, ranks: int, heads: int, own: int) -> slice:
    """Returns the `own` KV heads that a tensor parallel rank holds; of more ranks than heads,
    neighbors share one.
    """
    first = rank * heads // ranks
    return slice(first, first + own)
