"""The second axis: a retained cache of 8 bits a number, told apart from the ratio, which counts pairs.

int8    keys: one scale per channel and group of GROUP neighbouring rows of a head; values: one per row. That keys have
        outlying channels and values none is KIVI's finding (arXiv:2402.02750), whose 2 bits need smaller groups and
        zero points. With scale s = max|x| / 127 a number is off by s / 2 at most.
fp8     e4m3, one scale s = max|x| / 448 per head, of keys and of values: off by |x| / 16 or s / 1024 at most.

Restore cache, question and answer stay as they are. Scales are float32. Numbers leave some rows at a time, in the
model's dtype, or wider for sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from restorekv.errors import RestoreKVError

STORAGES = ("model", "int8", "fp8")  # the first: the model's own dtype
GROUP = 128  # rows of a head that share their keys' scales
FP8 = torch.float8_e4m3fn
LARGEST = {torch.int8: 127.0, FP8: float(torch.finfo(FP8).max)}
Bounds = Sequence[int]


@dataclass(frozen=True)
class Packed:
    """Rows (N, D): codes (N, D) of 8 bits; scales (M, D) or (M, 1) float32, of which the m-th serves the rows from
    starts[m] (M,) int32 to the next; starts None: one scale a row. `dtype` is that of the rows it gives."""

    codes: Tensor
    scales: Tensor
    starts: Tensor | None
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in tensors_of(self))

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> Tensor:
        """(n, D) in `dtype`."""
        return self.rows(rows, self.dtype)

    def rows(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """(n, D); the product is taken in float32 or the wider `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        if self.starts is None:
            scales = self.scales[rows]
        else:
            start, stop, _ = rows.indices(len(self))
            places = torch.arange(start, stop, dtype=torch.int32, device=self.device)
            scales = self.scales[torch.searchsorted(self.starts, places, right=True) - 1]
        return self.codes[rows].to(wide).mul_(scales).to(dtype)


def tensors_of(rows: Tensor | Packed) -> list[Tensor]:
    """What holds the rows."""
    if isinstance(rows, Tensor):
        return [rows]
    return [rows.codes, rows.scales] + ([] if rows.starts is None else [rows.starts])


def check(storage: str) -> None:
    if storage not in STORAGES:
        raise RestoreKVError(f"storage is one of {', '.join(STORAGES)}, not {storage!r}.")


def pack(keys: Tensor, values: Tensor, bounds: Bounds, storage: str) -> tuple[Packed, Packed]:
    """keys and values (N, D) of one layer, head h in the rows bounds[h]:bounds[h + 1]."""
    if storage == "int8":
        return coded(keys, bounds, GROUP, torch.int8, True), coded(values, bounds, 1, torch.int8, False)
    return tuple(coded(x, bounds, max(bounds[-1], 1), FP8, False) for x in (keys, values))


def unpack(
    codes: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], bounds: Bounds, storage: str, dtype: torch.dtype
) -> tuple[Packed, Packed]:
    """Keys and values from what a file holds of them."""
    sizes = (GROUP, 1) if storage == "int8" else (max(bounds[-1], 1),) * 2
    starts = (starts_of(bounds, size, codes[0].device) for size in sizes)
    return tuple(Packed(*each, dtype) for each in zip(codes, scales, starts, strict=True))


def starts_of(bounds: Bounds, size: int, device: torch.device) -> Tensor | None:
    """The first row of every group of up to `size` rows of one head; None for groups of one row."""
    if size == 1:
        return None
    firsts = [row for start, end in pairwise(bounds) for row in range(start, end, size)]
    return torch.tensor(firsts, dtype=torch.int32, device=device)


def coded(rows: Tensor, bounds: Bounds, size: int, kind: torch.dtype, channels: bool) -> Packed:
    """Codes and scales in groups of up to `size` rows of a head; `channels`: a scale for every column of a group."""
    parts = [coded_head(rows[start:end], size, kind, channels) for start, end in pairwise(bounds) if end > start]
    if not parts:
        parts = [(rows.to(kind), rows.new_zeros(0, rows.shape[1] if channels else 1, dtype=torch.float32))]
    codes, scales = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    return Packed(codes, scales, starts_of(bounds, size, rows.device), rows.dtype)


def coded_head(rows: Tensor, size: int, kind: torch.dtype, channels: bool) -> tuple[Tensor, Tensor]:
    """Of one head's rows (N, D): codes (N, D), scales (M, D) or (M, 1). A group of zeros gets the smallest scale."""
    exact, largest = rows.to(torch.float32), LARGEST[kind]
    highest = exact.abs() if channels else exact.abs().amax(-1, keepdim=True)
    lengths = torch.full((-(-len(rows) // size),), min(size, len(rows)), device=rows.device)
    lengths[-1] = len(rows) - size * (len(lengths) - 1)
    if size > 1:
        highest = torch.segment_reduce(highest, "max", lengths=lengths, axis=0)
    scales = (highest / largest).clamp_min(torch.finfo(torch.float32).tiny)
    exact = exact / scales.repeat_interleave(lengths, 0)
    codes = (exact.round() if kind == torch.int8 else exact).clamp(-largest, largest).to(kind)
    return codes, scales
