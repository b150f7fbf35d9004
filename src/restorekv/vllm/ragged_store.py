"""Cache files (.rkv) of a folder, and the pages that they take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.storage import cache_file
from restorekv.vllm import composition, worker_state
from restorekv.vllm.document_store import DocumentStore, EngineModel, StoredDocument, find_heads
from restorekv.vllm.page_pool import count_pages_of_heads
from restorekv.vllm.ragged_documents import (
    ID_LIMIT,
    PLACEHOLDERS,
    identify,
    make_end,
    make_ragged_mark,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class RaggedStore(DocumentStore):
    """The cache files of a folder; their placeholders are drawn from ids that every model has."""

    pattern = "*.rkv"
    contents = ".rkv files"

    def __init__(self, folder: str | Path, model: EngineModel) -> None:
        super().__init__(folder, model, make_ragged_mark())
        # The ends are the same for all files, so those of unread files and compositions count, too.
        self._ends = {make_end(1), *composition.COUNTS}
        self._longest = PLACEHOLDERS
        if model.vocabulary < ID_LIMIT:
            raise RestoreKVError(
                f"Placeholders of documents need a vocabulary of {ID_LIMIT} token ids, and the "
                f"engine's model has {model.vocabulary}."
            )
        self.parts: dict[str, composition.PartFacts] = {}  # by document

    def find_document(self, ids: Sequence[int], wanted: str | None = None) -> StoredDocument | None:
        """Return the document or the composition that a prompt asks; None if it asks neither.

        Args:
            ids: The prompt's ids.
            wanted: The name of the document or composition, or of the document's file.

        Raises:
            RestoreKVError: The placeholders name a document that the store does not have, one that
                does not fit, or one other than `wanted`; they are not complete at the beginning; no
                question follows them; or the question ends beyond the model's positions.
        """
        short_names = composition.read_short_names(ids)
        if short_names is None:
            return super().find_document(ids, wanted)
        document = self._compose(self._find_names(ids, short_names), wanted)
        if len(ids) <= PLACEHOLDERS:
            raise RestoreKVError("The prompt has placeholders of documents and no question.")
        self.refuse_misplaced(ids[PLACEHOLDERS:])
        self.refuse_long_prompt(document, ids)
        return document

    @property
    def signs(self) -> list[list[int]]:
        return [*self.marks, composition.make_composition_mark()]

    def _find_names(
        self, ids: Sequence[int], short_names: Sequence[composition.ShortName]
    ) -> list[str]:
        """Return the names of the documents that a prompt asks together."""
        names = composition.find_names(ids, short_names, self._list_names())
        # Folders are read again only for documents that are not known, not for every prompt.
        if names is None and self.scan():
            names = composition.find_names(ids, short_names, self._list_names())
        if names is not None:
            return names
        known = {composition.shorten_name(name) for name in self._list_names()}
        for number, short_name in enumerate(short_names, 1):
            if short_name not in known:
                raise RestoreKVError(
                    f"The prompt names {len(short_names)} documents, and the store does not have "
                    f"number {number}."
                )
        raise RestoreKVError(
            f"The prompt's placeholders match no {len(short_names)} documents of the store; make "
            "the prompt with restorekv.vllm.prompt, of files that are there."
        )

    def _list_names(self) -> set[str]:
        """Return the names of all documents that are known, except damaged files."""
        return {document.name for document in self.documents if document.name}

    def _compose(self, names: Sequence[str], wanted: str | None) -> StoredDocument:
        """Return the composition of documents by their names."""
        documents = [self._find_by_name(name) for name in names]
        name = composition.name_composition(names)
        if wanted not in (None, name):
            raise RestoreKVError(
                f"The prompt begins with placeholders of several documents, but the request names "
                f"{wanted}."
            )
        parts = [self.parts[document.name] for document in documents]
        composition.refuse_unlike_parts(parts)
        lengths = []
        for document in documents:
            assert document.lengths is not None
            lengths.append(document.lengths)
        return StoredDocument(
            path=self.folder / " + ".join(document.path.name for document in documents),
            name=name,
            ids=composition.make_ids(names),
            positions=composition.count_taken_positions(parts),
            lengths=composition.count_pairs(lengths, parts),
            parts=tuple(documents),
        )

    def _find_by_name(self, name: str) -> StoredDocument:
        """Return the document with a name; refuse one that is not here or does not fit."""
        document = self._find(lambda each: each.name == name)
        if document is None:
            raise RestoreKVError(
                f"The prompt names several documents, and the store does not have {name}."
            )
        return document

    def _read_document(self, path: Path) -> StoredDocument:
        try:
            file = cache_file.open_cache_file(path)
        except RestoreKVError as error:
            return StoredDocument(path, problem=str(error))
        identity = identify(file)
        problem = ""
        try:
            self.model.check(file.manifest, path)
            if any(f"layers.{layer}.bias" in file.tensors for layer in range(self.model.layers)):
                raise CacheFileError(
                    f"{path} is a cache of Attention Matching, whose bias on logits vLLM's "
                    "attention cannot add; compress with another evictor, such as kvzip."
                )
        except CacheFileError as error:
            problem = str(error)
        if not problem:
            self.parts[identity.name] = composition.describe_part(file)
        return StoredDocument(
            path=path,
            name=identity.name,
            ids=identity.ids,
            positions=file.manifest.positions,
            problem=problem,
            lengths=identity.lengths,
        )


def count_pages_of_largest_rank(lengths: Tensor, ranks: int, page_size: int) -> int:
    """Return the pages of the tensor parallel rank whose heads take most.

    Args:
        lengths: (L, H) pairs of every head.
        ranks: How many there are.
        page_size: Pairs of a page.
    """
    heads = lengths.shape[1]
    pages = count_pages_of_heads(lengths, page_size).sum(0)
    rank_pages = [pages[find_heads(rank, ranks, heads)].sum() for rank in range(ranks)]
    return int(torch.stack(rank_pages).max())


def describe_excess(path: Path, pages: int, available: int) -> str:
    """Return the error about a document that the whole pool cannot hold."""
    return (
        f"{path.name} needs {pages:,} pages of documents' memory, which has {available:,}; "
        "increase documents_memory."
    )


def refuse_too_large(document: StoredDocument, config: VllmConfig) -> None:
    """Raise RestoreKVError for a document that the pool of an engine cannot hold."""
    assert document.lengths is not None
    pages = count_pages_of_largest_rank(
        document.lengths,
        config.parallel_config.tensor_parallel_size,
        worker_state.get_page_size(config),
    )
    available = worker_state.count_pool_pages(config, config.model_config.get_head_size())
    if pages > available:
        raise RestoreKVError(describe_excess(document.path, pages, available))
