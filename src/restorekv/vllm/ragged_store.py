"""Cache files (.rkv) of a folder and which of them a prompt asks; knows nothing of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.storage import cache_file
from restorekv.storage.cache_file import CacheFile
from restorekv.storage.portable import MARK
from restorekv.vllm.ragged_documents import LARGEST_ID, identify, make_mark


@dataclass(frozen=True)
class EngineModel:
    """What a cache file must have been made for; a `fingerprint` of None fits any weights."""

    layers: int
    heads: int
    head_dim: int
    rope: Mapping[str, Any]
    vocabulary: int
    fingerprint: str | None = None

    def check(self, file: CacheFile) -> None:
        """Refuse a cache of another model."""
        manifest = file.manifest
        expected = {
            "rope": self.rope,
            "layers": self.layers,
            "heads": self.heads,
            "head_dim": self.head_dim,
        }
        for name, needed in expected.items():
            own = manifest.rope if name == "rope" else manifest.shape[name]
            if own != needed:
                raise CacheFileError(
                    f"{file.path} was made for {name} {own}, the engine's model has {needed}."
                )
        if self.fingerprint not in (None, manifest.fingerprint):
            raise CacheFileError(
                f"{file.path} was made with other weights "
                f"({manifest.fingerprint}, {manifest.model})."
            )


@dataclass(frozen=True)
class RaggedDocument:
    """A file of the store.

    name: of its contents; ids: its placeholders; lengths (L, H): pairs of every head; problem: why
    it is not served. A file that cannot be read has nothing but a problem.
    """

    path: Path
    name: str = ""
    ids: tuple[int, ...] = ()
    lengths: Tensor | None = None
    problem: str = ""


class RaggedStore:
    """The folder. A new file is found when a prompt first asks it; damaged ones are not served."""

    def __init__(self, folder: str | Path, model: EngineModel) -> None:
        self.folder = Path(folder)
        self.model = model
        if not self.folder.is_dir():
            raise RestoreKVError(
                f"The store {folder} is not a folder; make it and put .rkv files there."
            )
        if model.vocabulary < LARGEST_ID:
            raise RestoreKVError(
                f"Placeholders of documents need a vocabulary of {LARGEST_ID} token ids, and the "
                f"engine's model has {model.vocabulary}."
            )
        self.mark = make_mark()
        # By path, with the time of the file's last change.
        self._files: dict[Path, tuple[int, RaggedDocument]] = {}

    @property
    def documents(self) -> list[RaggedDocument]:
        """Every file that was found so far, those that are served first."""
        found = [document for _, document in self._files.values()]
        return sorted(found, key=lambda document: bool(document.problem))

    def find(self, ids: Sequence[int], wanted: str | None = None) -> RaggedDocument | None:
        """Return the document that a prompt asks, or None for a prompt that asks none.

        Args:
            ids: of the prompt.
            wanted: the document's name or file name, if the request says it, too.

        Raises:
            RestoreKVError: the placeholders are of no document here, of one that does not fit or
                of another than `wanted`, or no question follows them.
        """
        if list(ids[:MARK]) != self.mark:
            if wanted:
                raise RestoreKVError(
                    f"The prompt does not begin with placeholders of the document {wanted}."
                )
            return None
        document = self._match(ids)
        if document is None and self.scan():
            document = self._match(ids)
        if document is None:
            unreadable = [
                each.problem for each in self.documents if not each.ids and each.path.exists()
            ]
            raise RestoreKVError(
                " ".join(
                    [
                        "The prompt begins with placeholders of a document that the store "
                        "does not have.",
                        *unreadable,
                    ]
                )
            )
        if document.problem:
            raise RestoreKVError(document.problem)
        path = document.path
        if wanted and wanted not in (document.name, path.stem, path.name):
            raise RestoreKVError(
                f"The prompt begins with placeholders of {path.name}, not of {wanted}."
            )
        if len(ids) <= len(document.ids):
            raise RestoreKVError(f"The prompt has placeholders of {path.name} and no question.")
        return document

    def scan(self) -> bool:
        """Read files that are new or changed; return whether there were any."""
        any_new = False
        for path in sorted(self.folder.glob("*.rkv")):
            with suppress(OSError):  # it was moved away just now, or is a circle of links
                changed = path.stat().st_mtime_ns
                if self._files.get(path, (None,))[0] != changed:
                    any_new = True
                    self._files[path] = changed, self._read(path)
        return any_new

    def _match(self, ids: Sequence[int]) -> RaggedDocument | None:
        """Return the known document with these placeholders, if its file is still there."""
        for document in self.documents:
            own = document.ids
            if own and tuple(ids[: len(own)]) == own and document.path.exists():
                return document
        return None

    def _read(self, path: Path) -> RaggedDocument:
        """Read and check a file."""
        try:
            file = cache_file.read_cache(path)
        except RestoreKVError as error:
            return RaggedDocument(path, problem=str(error))
        identity = identify(file)
        problem = ""
        try:
            self.model.check(file)
            if any(f"layers.{layer}.bias" in file.tensors for layer in range(self.model.layers)):
                raise CacheFileError(
                    f"{path} is a cache of Attention Matching, whose bias on logits vLLM's "
                    "attention cannot add; compress with another evictor, such as kvzip."
                )
        except CacheFileError as error:
            problem = str(error)
        return RaggedDocument(path, identity.name, identity.ids, identity.lengths, problem)


def heads_of_rank(rank: int, ranks: int, heads: int, own: int) -> slice:
    """Return the `own` KV heads of a tensor parallel rank; more ranks than heads share them."""
    first = rank * heads // ranks
    return slice(first, first + own)


def pages_of_largest_rank(lengths: Tensor, ranks: int, page_size: int) -> int:
    """Return the pages of the tensor parallel rank whose heads take most.

    Args:
        lengths: (L, H) pairs of every head.
        ranks: how many there are.
        page_size: pairs of a page.
    """
    heads = lengths.shape[1]
    own = max(heads // ranks, 1)
    pages = (-(-lengths // page_size)).clamp(min=1).sum(0)
    of_ranks = [pages[heads_of_rank(rank, ranks, heads, own)].sum() for rank in range(ranks)]
    return int(torch.stack(of_ranks).max())
