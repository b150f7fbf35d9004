"""Portable documents of a folder, and a memory of the keys and values of those asked last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

import torch
from torch import Tensor

from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.storage.portable import Portable, load_portable, make_portable_mark
from restorekv.vllm.document_store import DocumentStore, EngineModel, StoredDocument

MEMORY = 1 << 30  # bytes of keys and values that a process keeps unless its options say otherwise


class PortableStore(DocumentStore):
    """The portable files of a folder, and a memory of up to `limit` bytes of keys and values.

    The document that was asked last stays in memory, even if it alone is larger.
    """

    pattern = "*.safetensors"
    contents = "files of restorekv export"

    def __init__(self, folder: str | Path, model: EngineModel, limit: int = MEMORY) -> None:
        super().__init__(folder, model, make_portable_mark(model.vocabulary))
        self.limit = limit
        self.loaded: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()
        self.loading = threading.Lock()

    def _read_document(self, path: Path) -> StoredDocument:
        try:
            portable = load_portable(path)
        except RestoreKVError as error:
            return StoredDocument(path, problem=str(error))
        # A prompt about a file for a different vocabulary is then recognized, and gets that error.
        mark = make_portable_mark(portable.vocabulary)
        if mark not in self.marks:
            self.marks.append(mark)
        problem = ""
        try:
            self.model.check(portable.manifest, path, portable.vocabulary)
        except CacheFileError as error:
            problem = str(error)
        return StoredDocument(
            path=path,
            name=portable.name,
            ids=tuple(portable.ids.tolist()),
            positions=portable.manifest.positions,
            problem=problem,
        )

    def load_pairs(self, document: StoredDocument) -> tuple[Tensor, Tensor]:
        """Return a document's keys and values (L, H, m, D) in the engine's dtype.

        Raises:
            CacheFileError: The file is a different document by now, or the dtype cannot hold its
                numbers.
        """
        with self.loading:
            if document.name not in self.loaded:
                portable = load_portable(document.path)
                self.model.check(portable.manifest, document.path, portable.vocabulary)
                if portable.name != document.name:
                    raise CacheFileError(
                        f"{document.path} was replaced by a different document; query that one."
                    )
                pair = cast_pairs(portable, self.model.dtype, document.path)
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
            f"{path} holds numbers that are too large for {dtype}; serve the model in a different "
            "dtype."
        )
    return keys, values
