"""Where documents' pairs lie in a worker, and which documents stay; knows nothing of vLLM.

A document keeps a different number of pairs in every KV head of every layer, so they do not fit
vLLM's own pool, whose blocks have one length for all heads. They lie in pages here: a page holds
`page_size` pairs of one head of one layer, and a document has one table of pages per layer and
head. The scheduler decides with a `PoolLedger` which documents are resident; workers follow.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from restorekv.errors import RestoreKVError

# Writes keys and values (N, 1, D) into the slots (N,) of the pages: (pages, keys, values, slots).
PageWriter = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True)
class DocumentPairs:
    """The pairs of one document for the KV heads of one rank.

    keys, values: one tensor (N, D) per layer, head after head; lengths (L, H) int64: pairs of
    every head, so that those of a layer add up to its N.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    lengths: Tensor


def count_pages(lengths: Tensor, page_size: int) -> int:
    """Return how many pages heads with `lengths` pairs take together."""
    return int(count_pages_of_heads(lengths, page_size).sum())


def count_pages_of_heads(lengths: Tensor, page_size: int) -> Tensor:
    """Return how many pages each head takes; an empty head takes one, too."""
    return (-(-lengths // page_size)).clamp(min=1)


@dataclass(frozen=True)
class PageTable:
    """Where a resident document lies.

    tables: one (H, W) int32 per layer, W the pages of the layer's longest head, padded with the
    head's first page; lengths: one (H,) int32 per layer, at least 1; longest: the largest of them
    per layer; empty: one (H,) bool per layer, the heads without a pair, or None for a layer that
    has no such head; mean_length: mean number of pairs of a head; pages: all pages of the document.
    """

    tables: Sequence[Tensor]
    lengths: Sequence[Tensor]
    longest: Sequence[int]
    empty: Sequence[Tensor | None]
    mean_length: float
    pages: Tensor


class PagePool:
    """Pages of all layers and heads of one rank in one tensor (pages, 1, page_size, 2 * D)."""

    def __init__(
        self,
        pages: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        writer: PageWriter,
    ) -> None:
        """Reserve room for `pages` pages.

        Args:
            pages: How many pages there are.
            page_size: Pairs of a page.
            head_dim: D.
            dtype: The dtype of keys and values.
            device: Where the pages lie.
            writer: What puts pairs into pages, in the layout that the attention kernel reads.
        """
        self.page_size = page_size
        self.head_dim = head_dim
        # On a CPU the system gives memory page by page, when it is written for the first time.
        self.pages = torch.empty(pages, 1, page_size, 2 * head_dim, dtype=dtype, device=device)
        self.writer = writer
        # The lowest free page is taken first, so that the same documents get the same pages.
        self.free = list(range(pages - 1, -1, -1))
        self.tables: dict[str, PageTable] = {}

    def put(self, name: str, document: DocumentPairs) -> PageTable:
        """Write a document's pairs into free pages.

        Raises:
            RestoreKVError: There are too few free pages; nothing was taken.
        """
        # A document that is loaded again replaces its earlier pages.
        self.drop(name)
        wanted = count_pages(document.lengths, self.page_size)
        if wanted > len(self.free):
            raise RestoreKVError(
                f"The document {name} needs {wanted} pages and {len(self.free)} are free."
            )
        taken = [self.free.pop() for _ in range(wanted)]
        try:
            table = self._write(document, taken)
        except BaseException:
            self._free_pages(taken)
            raise
        self.tables[name] = table
        return table

    def drop(self, name: str) -> None:
        """Free the pages of a document; one that is not here is not an error."""
        table = self.tables.pop(name, None)
        if table is not None:
            self._free_pages(table.pages.tolist())

    def _free_pages(self, pages: Sequence[int]) -> None:
        self.free.extend(pages)
        self.free.sort(reverse=True)

    def _write(self, document: DocumentPairs, taken: Sequence[int]) -> PageTable:
        """Write all layers and return where they lie; each head gets the next pages of `taken`."""
        device = self.pages.device
        tables = []
        lengths = []
        empty = []
        first = 0
        for keys, values, counts in zip(
            document.keys, document.values, document.lengths, strict=True
        ):
            page_counts = count_pages_of_heads(counts, self.page_size).tolist()
            table = torch.empty(len(page_counts), max(page_counts), dtype=torch.int32)
            slots = []
            for head, (pairs, page_count) in enumerate(
                zip(counts.tolist(), page_counts, strict=True)
            ):
                own = torch.tensor(taken[first : first + page_count])
                first += page_count
                table[head] = own[0]
                table[head, :page_count] = own
                inside = torch.arange(self.page_size)
                slots.append((own[:, None] * self.page_size + inside).flatten()[:pairs])
            layer_pages = table.unique().long().to(device)
            # A kernel multiplies what comes after the last pair by 0, and 0 * nan is nan.
            self.pages[layer_pages] = 0
            self.writer(
                self.pages,
                keys.to(device, self.pages.dtype)[:, None],
                values.to(device, self.pages.dtype)[:, None],
                torch.cat(slots).to(device),
            )
            without = counts == 0
            tables.append(table.to(device))
            lengths.append(counts.clamp(min=1).int().to(device))
            empty.append(without.to(device) if bool(without.any()) else None)
        longest = [max(int(counts.max()), 1) for counts in document.lengths]
        return PageTable(
            tables=tables,
            lengths=lengths,
            longest=longest,
            empty=empty,
            mean_length=float(document.lengths.float().mean()),
            pages=torch.tensor(taken),
        )


class Residency(Enum):
    """What the ledger answers when a request asks for a document."""

    RESIDENT = "resident"  # and pinned for the request
    LOADING = "loading"  # ask again at the next step
    NO_ROOM = "no room"  # ask again at the next step
    TOO_LARGE = "too large"  # the whole pool cannot hold it


@dataclass
class _PooledDocument:
    """A document that is in the pool or on its way there."""

    pages: int
    loaded: bool = False
    pinned_by: set[str] = field(default_factory=set)


class PoolLedger:
    """The scheduler's record of which documents are in the workers' pools.

    A document is pinned while a request asks it. Others stay until their room is needed, and the
    least recently used go first. Workers do what `take_orders` returns, in that order. The ledger
    counts pages of the rank that holds most, so that what fits here fits everywhere.
    """

    # How many requests for other documents are admitted before one that finds no room goes first.
    MAX_OVERTAKES = 64

    def __init__(self, pages: int) -> None:
        self.pages = pages
        # The least recently used one comes first.
        self.entries: OrderedDict[str, _PooledDocument] = OrderedDict()
        self.drops: list[str] = []
        self.loads: list[str] = []
        # Documents that found no room, the longest waiting first, and admissions since then.
        self.waiting: OrderedDict[str, int] = OrderedDict()
        self.waiting_for: dict[str, str] = {}  # document by request id

    @property
    def free(self) -> int:
        """How many pages no document has."""
        return self.pages - sum(entry.pages for entry in self.entries.values())

    def pin_or_load(self, request_id: str, name: str, pages: int) -> Residency:
        """Pin a document for a request, and begin to load it if it is absent; return its state.

        Args:
            request_id: The request; `release` takes its pin back.
            name: The document.
            pages: How many pages the document takes.
        """
        if pages > self.pages:
            return Residency.TOO_LARGE
        entry = self.entries.get(name)
        if entry is None:
            if self._must_yield(name) or not self._make_room(pages):
                self.waiting.setdefault(name, 0)
                self.waiting_for[request_id] = name
                return Residency.NO_ROOM
            entry = self.entries[name] = _PooledDocument(pages)
            self.loads.append(name)
        elif request_id not in entry.pinned_by and self._must_yield(name):
            return Residency.NO_ROOM
        self._stop_waiting(request_id)
        self.waiting.pop(name, None)
        if request_id not in entry.pinned_by:
            for other in self.waiting:
                self.waiting[other] += 1
        entry.pinned_by.add(request_id)
        self.entries.move_to_end(name)
        return Residency.RESIDENT if entry.loaded else Residency.LOADING

    def release(self, request_id: str) -> None:
        """Take back what a request holds or waits for."""
        self._stop_waiting(request_id)
        for entry in self.entries.values():
            entry.pinned_by.discard(request_id)

    def finish_load(self, name: str) -> None:
        """Note that every worker has read a document."""
        if name in self.entries:
            self.entries[name].loaded = True

    def forget(self, name: str) -> None:
        """Take out a document that could not be read."""
        if self.entries.pop(name, None) is not None:
            self.drops.append(name)

    def take_orders(self) -> tuple[list[str], list[str]]:
        """Return the documents that workers drop, then those that they load; each is given once."""
        orders = self.drops, self.loads
        self.drops = []
        self.loads = []
        return orders

    def _stop_waiting(self, request_id: str) -> None:
        name = self.waiting_for.pop(request_id, None)
        if name is not None and name not in self.waiting_for.values():
            self.waiting.pop(name, None)

    def _must_yield(self, name: str) -> bool:
        """Return whether a different document has waited for room so long that new requests for
        `name` wait, too.

        Otherwise documents with a steady flow of requests would keep a large one out forever.
        """
        if not self.waiting:
            return False
        # Of equals, `max` returns the first, which has waited longest.
        longest_waiting = max(self.waiting, key=self.waiting.__getitem__)
        return longest_waiting != name and self.waiting[longest_waiting] >= self.MAX_OVERTAKES

    def _make_room(self, pages: int) -> bool:
        """Drop documents that no request asks, the least recently used first; return whether there
        is room.

        If that cannot make enough room, nothing is dropped.
        """
        idle = [
            (other, entry)
            for other, entry in self.entries.items()
            if entry.loaded and not entry.pinned_by
        ]
        if self.free + sum(entry.pages for _, entry in idle) < pages:
            return False
        for other, _ in idle:
            if self.free >= pages:
                break
            del self.entries[other]
            self.drops.append(other)
        return True
