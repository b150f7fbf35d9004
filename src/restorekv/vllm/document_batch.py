"""The documents of a step as sequences for an attention kernel: every KV head is one.

What does not depend on the queries is made once for a set of documents, and serves all steps until
a different set is asked: while answers are written, that is nearly every step.
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

    starts (N + 1,) int32: the first query of every sequence, then their number; lengths (N,) int32:
    pairs that the last query of a sequence sees; table (N, W) int32: pages; max_queries, longest:
    the largest difference of `starts` and the largest of `lengths`, known to the host.
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    max_queries: int
    longest: int
    # What a kernel prepares for these sequences.
    schedule: dict[str, Any]


class DocumentBatch:
    """Documents, and how many tokens of a step ask each.

    Those that are attended as pages come first, then those that are attended head by head.

    order (R * H,): how pairs of token and KV head are sorted by document, head, token;
    inverse_order (R * H,): the inverse; paged: how many of the sorted pairs are of documents in
    pages; looped: every other document with its part of the sorted pairs.
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
            documents: Where they lie.
            counts: Tokens that ask each.
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
        """Whether the batch is of these very documents, in this order, with these counts."""
        return (
            self.counts == list(counts)
            and len(self.documents) == len(documents)
            and all(one is other for one, other in zip(self.documents, documents, strict=True))
        )

    def of_layer(self, number: int) -> tuple[Sequences, Tensor | None]:
        """Return a layer's sequences, and which of their queries ask a head without a pair.

        Only documents in pages are among them. The latter is None where every head has pairs.
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
