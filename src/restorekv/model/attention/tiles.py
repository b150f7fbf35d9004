"""The work lists of the GPU kernel: which rows of a ragged context each program reads, made once
per cache.

A tile is up to `span` neighboring rows of one head, so it needs no mask but its end; an empty head
has no tile. Every program writes one result per query: with few queries, many small tiles keep the
device busy; with many queries, few large tiles have fewer results to write. So there is a list for
every span TILE_ROWS, 2 * TILE_ROWS, 4 * TILE_ROWS ... up to the first that covers each head whole.
A tile has 16 bytes, and all lists take 0.1 % of the memory of keys and values with 128 bfloat16
numbers.

Lengths are known on the host: making the lists reads nothing from a device, and a layer's lists go
there in one transfer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from restorekv.cache.ragged import RaggedLayer

TILE_ROWS = 64  # rows of the smallest tile
PLAN = "tiles"  # the key of the lists in RaggedLayer.plans


@dataclass(frozen=True)
class Tiles:
    """The lists of a layer, one after the other.

    entries (P, 4) int32: head, first row, end row, 0 (to fill 16 bytes); first (S, H + 1) int32:
    head h has the tiles first[s, h]:first[s, h + 1] of list s, counted from that list's start;
    counts: the number of tiles of each list.
    """

    entries: Tensor
    first: Tensor
    counts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.first.nbytes

    def to(self, device: torch.device) -> "Tiles":
        """Copy both parts to a device in one transfer; each starts at a multiple of 16 bytes."""
        flat = torch.cat([self.entries.flatten(), self.first.flatten()]).to(device)
        entries, first = flat.split([self.entries.numel(), self.first.numel()])
        return Tiles(entries.view(-1, 4), first.view(self.first.shape), self.counts)


def cut_tiles(bounds: tuple[int, ...]) -> Tiles:
    """Return the lists, on the CPU, of heads that have the rows bounds[h]:bounds[h + 1]."""
    starts, ends = (torch.tensor(edge, dtype=torch.long) for edge in (bounds[:-1], bounds[1:]))
    longest = max(end - start for start, end in pairwise(bounds))
    entries = []
    first = []
    span = TILE_ROWS
    while True:
        tiles = (ends - starts + span - 1) // span
        edges = torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])
        head = torch.arange(len(starts)).repeat_interleave(tiles)
        low = starts[head] + (torch.arange(len(head)) - edges[head]) * span
        entries.append(
            torch.stack([head, low, (low + span).minimum(ends[head]), torch.zeros_like(head)], -1)
        )
        first.append(edges)
        if span >= longest:
            counts = tuple(len(each) for each in entries)
            return Tiles(torch.cat(entries).int(), torch.stack(first).int(), counts)
        span *= 2


def plan_tiles(layers: Iterable[RaggedLayer]) -> None:
    """Make the lists of all layers that lack them; forks share them."""
    for layer in layers:
        if PLAN not in layer.plans:
            layer.plans[PLAN] = cut_tiles(layer.bounds).to(layer.context_keys.device)


def get_tiles(layer: RaggedLayer) -> Tiles:
    """Return the layer's lists, which are made now if `plan_tiles` was not called."""
    plan_tiles([layer])
    return cast(Tiles, layer.plans[PLAN])


def choose_list(counts: Sequence[int], blocks: int, programs: int) -> int:
    """Return the index of the list with the smallest span that needs at most `programs` programs,
    `blocks` for each tile; that of the last list if none does.
    """
    fitting = (index for index, count in enumerate(counts) if count * blocks <= programs)
    return next(fitting, len(counts) - 1)
