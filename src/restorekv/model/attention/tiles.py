"""The work list of the GPU kernel: which rows of a ragged context each of its programs reads, made once per cache.

A tile is up to `span` neighbouring rows of one head. A long head is split, a short one fills part of a tile, an empty
one has none; no tile crosses heads, so a tile needs no mask but its end. Every program leaves a result per query, so
few queries want many small tiles, to keep a whole device busy, and many queries want few: there is a list for every
span BASE, 2 * BASE, 4 * BASE ... up to the first that takes each head whole. Together they are shorter than twice the
shortest span's list and H tiles a span: 16 bytes a tile, 0.1 % of the keys and values of 128 bfloat16 numbers.

Lengths are known on the host, so making the lists reads nothing from a device; a layer's cross to it in one transfer.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from restorekv.cache.ragged import RaggedLayer

BASE = 64  # rows of the smallest tile
PLAN = "tiles"


@dataclass(frozen=True)
class Tiles:
    """A layer's lists, one after the other.

    entries (P, 4) int32: head, first row, end row, 0 (which makes an entry 16 bytes); first (S, H + 1) int32: head h
    owns the tiles first[s, h]:first[s, h + 1] of list s, counted from that list's start; counts: tiles of each list.
    """

    entries: Tensor
    first: Tensor
    counts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.entries.nbytes + self.first.nbytes

    def to(self, device: torch.device) -> "Tiles":
        """On a device, in one transfer; both parts start at a multiple of 16 bytes."""
        flat = torch.cat([self.entries.flatten(), self.first.flatten()]).to(device)
        entries, first = flat.split([self.entries.numel(), self.first.numel()])
        return Tiles(entries.view(-1, 4), first.view(self.first.shape), self.counts)


def cut(bounds: tuple[int, ...]) -> Tiles:
    """The lists of heads that own rows bounds[h]:bounds[h + 1], on the CPU."""
    starts, ends = (torch.tensor(edge, dtype=torch.long) for edge in (bounds[:-1], bounds[1:]))
    longest = max(end - start for start, end in pairwise(bounds))
    entries, first, span = [], [], BASE
    while True:
        tiles = (ends - starts + span - 1) // span
        edges = torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])
        head = torch.arange(len(starts)).repeat_interleave(tiles)
        low = starts[head] + (torch.arange(len(head)) - edges[head]) * span
        entries.append(torch.stack([head, low, (low + span).minimum(ends[head]), torch.zeros_like(head)], -1))
        first.append(edges)
        if span >= longest:
            counts = tuple(len(each) for each in entries)
            return Tiles(torch.cat(entries).int(), torch.stack(first).int(), counts)
        span *= 2


def plan(layers: Iterable[RaggedLayer]) -> None:
    """Makes the lists of all layers that lack them, such as a `RaggedCache`'s, and hands them to every fork."""
    for layer in layers:
        if PLAN not in layer.plans:
            layer.plans[PLAN] = cut(layer.bounds).to(layer.context_keys.device)


def of(layer: RaggedLayer) -> Tiles:
    """The layer's lists, made now if `plan` was not called."""
    plan([layer])
    return layer.plans[PLAN]


def choose(counts: tuple[int, ...], blocks: int, programs: int) -> int:
    """The list of smallest span that makes at most `programs` programs, each of its tiles read by `blocks` of them."""
    fitting = (index for index, count in enumerate(counts) if count * blocks <= programs)
    return next(fitting, len(counts) - 1)
