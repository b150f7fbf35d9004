"""Portable documents of a folder, and which of them a prompt asks; knows nothing of vLLM."""

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
from restorekv.storage.portable import MARK, Portable, load_portable, make_mark

MEMORY = 1 << 30  # bytes of keys and values that a process keeps unless its options say otherwise


@dataclass(frozen=True)
class Expected:
    """What a document must be made for to fit the engine's model.

    Args:
        layers: of the model.
        heads: KV heads of a layer.
        head_dim: of a head.
        rope: the model's RoPE.
        dtype: the engine's, to which keys and values are cast.
        vocabulary: token ids, from which placeholders are drawn.
        fingerprint: of the weights; None fits any.
    """

    layers: int
    heads: int
    head_dim: int
    rope: Mapping[str, Any]
    dtype: str
    vocabulary: int
    fingerprint: str | None = None

    def check(self, portable: Portable, path: Path) -> None:
        """Refuse a document of another model."""
        manifest = portable.manifest
        found = {
            "rope": manifest.rope,
            "layers": manifest.shape["layers"],
            "heads": manifest.shape["heads"],
            "head_dim": manifest.shape["head_dim"],
        }
        for name, value in found.items():
            needed = getattr(self, name)
            if value != needed:
                raise CacheFileError(
                    f"{path} was made for {name} {value}, the engine's model has {needed}."
                )
        if portable.vocabulary != self.vocabulary:
            raise CacheFileError(
                f"{path} was made for {portable.vocabulary} token ids, not {self.vocabulary}."
            )
        if self.fingerprint not in (None, manifest.fingerprint):
            raise CacheFileError(
                f"{path} was made with other weights ({manifest.fingerprint}, {manifest.model})."
            )


@dataclass(frozen=True)
class PortableDocument:
    """A file of the store.

    Args:
        path: where it is.
        name: a hash of its contents.
        ids: the placeholders that stand for it; without, it cannot even be read.
        problem: why the file is not served.
    """

    path: Path
    name: str = ""
    ids: tuple[int, ...] = ()
    problem: str = ""


class PortableStore:
    """Portable files of a folder.

    A new file is found when a prompt first asks it; damaged ones are never served.

    Args:
        folder: where the files are.
        expected: what they must be made for.
        limit: bytes of keys and values that are kept in memory.
    """

    def __init__(self, folder: str | Path, expected: Expected, limit: int = MEMORY) -> None:
        self.folder = Path(folder)
        self.expected = expected
        self.limit = limit
        if not self.folder.is_dir():
            raise RestoreKVError(
                f"The store {folder} is no folder; make it and put files of restorekv export there."
            )
        # By path, with the time of the file's last change.
        self.documents: dict[Path, tuple[int, PortableDocument]] = {}
        # How placeholders begin: the model's mark, and those of files for another vocabulary.
        self.marks = [make_mark(expected.vocabulary)]
        self.loaded: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self.loading = threading.Lock()

    def find_document(
        self, ids: Sequence[int], wanted: str | None = None
    ) -> PortableDocument | None:
        """Return the document that a prompt asks, or None for a prompt that asks none.

        Args:
            ids: of the prompt.
            wanted: the document's name or its file's name, where the request gives one as well.

        Raises:
            RestoreKVError: the placeholders stand for no document of the store, or for one that
                does not fit, or the prompt has no question.
        """
        if list(ids[:MARK]) not in self.marks:
            if wanted:
                raise RestoreKVError(
                    f"The prompt does not begin with placeholders of the document {wanted}."
                )
            return None
        document = self._match(ids)
        if document is None and self.scan():
            document = self._match(ids)
        if document is None:
            sentences = [
                "The prompt begins with placeholders of a document that the store does not have."
            ]
            for _, each in self.documents.values():
                if not each.ids and each.path.exists():
                    sentences.append(each.problem)
            raise RestoreKVError(" ".join(sentences))
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

    def _match(self, ids: Sequence[int]) -> PortableDocument | None:
        """Return the known document whose placeholders these ids begin with.

        Its file must still be there. Of several, one that can be served comes first.
        """
        documents = [document for _, document in self.documents.values()]
        documents.sort(key=lambda document: bool(document.problem))
        for document in documents:
            own = document.ids
            if own and tuple(ids[: len(own)]) == own and document.path.exists():
                return document
        return None

    def scan(self) -> bool:
        """Read files that are new or changed; return whether there were any."""
        has_news = False
        for path in sorted(self.folder.glob("*.safetensors")):
            with suppress(OSError):  # it was moved away just now, or is a circle of links
                changed = path.stat().st_mtime_ns
                known, _ = self.documents.get(path, (None, None))
                if known != changed:
                    has_news = True
                    self.documents[path] = (changed, self._read_document(path))
        return has_news

    def _read_document(self, path: Path) -> PortableDocument:
        """Read and check a file."""
        try:
            portable = load_portable(path)
        except RestoreKVError as error:
            return PortableDocument(path, problem=str(error))
        if make_mark(portable.vocabulary) not in self.marks:
            self.marks.append(make_mark(portable.vocabulary))
        problem = ""
        try:
            self.expected.check(portable, path)
        except CacheFileError as error:
            problem = str(error)
        return PortableDocument(path, portable.name, tuple(portable.ids.tolist()), problem)

    def load_pairs(self, document: PortableDocument) -> tuple[Tensor, Tensor]:
        """Return a document's keys and values (L, H, m, D) in the engine's dtype.

        Raises:
            CacheFileError: the file is another document by now, or the dtype cannot hold its
                numbers.
        """
        with self.loading:
            if document.name not in self.loaded:
                portable = load_portable(document.path)
                self.expected.check(portable, document.path)
                if portable.name != document.name:
                    raise CacheFileError(
                        f"{document.path} was replaced by another document; ask that one."
                    )
                pair = cast_pairs(portable, self.expected.dtype, document.path)
                self.loaded[document.name] = pair
            self.loaded.move_to_end(document.name)
            while len(self.loaded) > 1 and self._count_bytes() > self.limit:
                self.loaded.popitem(last=False)
            return self.loaded[document.name]

    def _count_bytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.loaded.values())


def cast_pairs(portable: Portable, dtype: str, path: Path) -> tuple[Tensor, Tensor]:
    """Return keys and values in a dtype; refuse numbers that become infinite."""
    target = getattr(torch, dtype)
    keys = portable.keys.to(target)
    values = portable.values.to(target)
    is_finite = portable.manifest.dtype == dtype or (
        bool(keys.isfinite().all()) and bool(values.isfinite().all())
    )
    if not is_finite:
        raise CacheFileError(
            f"{path} holds numbers that are too large for {dtype}; serve the model in another "
            "dtype."
        )
    return keys, values


def find_heads(rank: int, ranks: int, heads: int, own: int) -> slice:
    """Return the `own` KV heads that a tensor parallel rank holds.

    Of more ranks than heads, neighbors share one.
    """
    first = rank * heads // ranks
    return slice(first, first + own)
