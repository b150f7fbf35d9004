"""The documents of a step as sequences for an attention kernel: each KV head is a sequence.

What does not depend on the queries is made once for a set of documents and reused until a step asks
a different set. While answers are written, nearly every step can reuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from restorekv.vllm.page_pool import PageTable
from restorekv.vllm.step_rows import index_heads_as_sequences


@dataclass(frozen=True)
class Sequences:
    """Queries and pages of one call of a kernel over N sequences.

    starts (N + 1,) int32: the first query of every sequence, then the number of queries; lengths
    (N,) int32: pairs that the last query of a sequence sees; table (N, W) int32: pages;
    max_queries, longest: the largest difference of `starts` and the largest of `lengths`, as
    numbers on the host.
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    max_queries: int
    longest: int
    # What a kernel has prepared for these sequences.
    schedule: dict[str, Any]


class DocumentBatch:
    """The documents that a step asks, each with the number of tokens that ask it.

    Documents attended as pages come first, then those attended head by head.

    order (R * H,): how (token, KV head) pairs are sorted by document, head, token; inverse_order
    (R * H,): the inverse; paged: how many of the sorted pairs belong to documents attended as
    pages; looped: every other document with its slice of the sorted pairs.
    """

    def __init__(
        self,
        documents: Sequence[PageTable],
        counts: Sequence[int],
        heads: int,
        device: torch.device,
        by_head: Sequence[bool] | None = None,
    ) -> None:
        """Sort the tokens.

        Args:
            documents: The page tables of the documents.
            counts: How many tokens ask each document.
            heads: H, KV heads of a rank.
            device: Where attention is computed.
            by_head: Which documents are attended head by head; None for none.
        """
        self.documents = list(documents)
        self.counts = list(counts)
        parts = index_heads_as_sequences(counts, heads)
        is_looped = list(by_head or [False] * len(counts))
        in_pages = [number for number, looped in enumerate(is_looped) if not looped]
        others = [number for number, looped in enumerate(is_looped) if looped]
        self.order = torch.cat([parts[number] for number in (*in_pages, *others)]).to(device)
        self.inverse_order = self.order.argsort()
        self.in_pages = [self.documents[number] for number in in_pages]
        paged_counts = [self.counts[number] for number in in_pages]
        self.paged = sum(paged_counts) * heads
        self.looped: list[tuple[PageTable, slice]] = []
        first = self.paged
        for number in others:
            end = first + len(parts[number])
            self.looped.append((self.documents[number], slice(first, end)))
            first = end
        self.max_queries = max(paged_counts, default=0)
        per_head = [count for count in paged_counts for _ in range(heads)]
        self.starts = make_starts(per_head, device)
        self.repeats = torch.tensor(per_head, device=device)
        self._layers: dict[int, tuple[Sequences, Tensor | None]] = {}

    def is_of(self, documents: Sequence[PageTable], counts: Sequence[int]) -> bool:
        """Return whether the batch has exactly these documents and counts, in this order."""
        return (
            self.counts == list(counts)
            and len(self.documents) == len(documents)
            and all(one is other for one, other in zip(self.documents, documents, strict=True))
        )

    def of_layer(self, number: int) -> tuple[Sequences, Tensor | None]:
        """Return a layer's sequences, and a mask of the queries that ask a head without a pair.

        The sequences are those of the documents attended as pages. The mask is None if every head
        has pairs.
        """
        if number not in self._layers:
            self._layers[number] = self._make_layer(number)
        return self._layers[number]

    def _make_layer(self, number: int) -> tuple[Sequences, Tensor | None]:
        tables = [document.tables[number] for document in self.in_pages]
        width = max(table.shape[1] for table in tables)
        padded = [torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables]
        sequences = Sequences(
            starts=self.starts,
            lengths=torch.cat([document.lengths[number] for document in self.in_pages]),
            table=torch.cat(padded),
            max_queries=self.max_queries,
            longest=max(document.longest[number] for document in self.in_pages),
            schedule={},
        )
        empty = []
        for document, table in zip(self.in_pages, tables, strict=True):
            empty_heads = document.empty[number]
            if empty_heads is None:
                empty_heads = torch.zeros(len(table), dtype=torch.bool, device=table.device)
            empty.append(empty_heads)
        empty_queries = torch.cat(empty).repeat_interleave(self.repeats)
        return sequences, empty_queries if bool(empty_queries.any()) else None


def make_starts(counts: Sequence[int], device: torch.device) -> Tensor:
    """Return where sequences of these lengths begin, and where the last one ends, int32."""
    return torch.tensor([0, *counts], device=device).cumsum(0).int()
