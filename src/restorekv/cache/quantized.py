"""Contexts stored in 8 bits per number, independently of the ratio, which counts pairs.

int8    keys: one scale per channel and group of GROUP neighboring rows of a head; values: one scale per row. Keys have
        outlier channels and values have none (KIVI, arXiv:2402.02750, whose 2 bits need smaller groups and zero
        points). With the scale s = max|x| / 127 a number is off by at most s / 2.
fp8     e4m3, one scale s = max|x| / 448 per head for keys and one for values: off by at most |x| / 16 or s / 1024.

Restore cache, question and answer keep the model's dtype. Scales are float32. Rows are read a few
at a time, in the model's dtype or in a wider one for sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from restorekv.errors import check_choice

GROUP = 128  # rows of a head that share the scales of their keys
FP8 = torch.float8_e4m3fn
STORAGE_DTYPES = {"int8": torch.int8, "fp8": FP8}
STORAGES = ("model", *STORAGE_DTYPES)  # "model" is the model's own dtype
LARGEST_CODE = {torch.int8: 127.0, FP8: float(torch.finfo(FP8).max)}
Bounds = Sequence[int]


@dataclass(frozen=True)
class QuantizedRows:
    """Rows (N, D) as 8-bit codes (N, D) and scales (M, D) or (M, 1) float32, to be read in `dtype`.

    Scale m belongs to the rows from starts[m] (M,) int32 to the next start; without `starts` every
    row has its own.
    """

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

    def __len__(self) -> int:
        return len(self.codes)

    def to(self, device: torch.device) -> QuantizedRows:
        """Returns the same rows on a device."""
        starts = None if self.starts is None else self.starts.to(device)
        return QuantizedRows(self.codes.to(device), self.scales.to(device), starts, self.dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        """Returns (n, D) in `dtype`."""
        return self.dequantize(rows, self.dtype)

    def dequantize(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Returns (n, D) in `dtype`; the product is taken in float32, or in `dtype` if that is
        wider.
        """
        wide = torch.promote_types(dtype, torch.float32)
        if self.starts is None:
            scales = self.scales[rows]
        else:
            start, stop, _ = rows.indices(len(self))
            indices = torch.arange(start, stop, dtype=torch.int32, device=self.device)
            scales = self.scales[torch.searchsorted(self.starts, indices, right=True) - 1]
        return self.codes[rows].to(wide).mul_(scales).to(dtype)


def list_tensors(rows: Tensor | QuantizedRows) -> list[Tensor]:
    """Returns the tensors that hold the rows."""
    if isinstance(rows, Tensor):
        return [rows]
    return [rows.codes, rows.scales] + ([] if rows.starts is None else [rows.starts])


def check_storage(storage: str) -> None:
    """Refuses a name that is not in STORAGES."""
    check_choice("storage", storage, STORAGES)


def quantize(
    keys: Tensor, values: Tensor, bounds: Bounds, storage: str
) -> tuple[QuantizedRows, QuantizedRows]:
    """Encodes keys and values (N, D) of one layer; head h has the rows bounds[h]:bounds[h + 1]."""
    parts = zip(
        (keys, values),
        _choose_group_sizes(bounds, storage),
        (storage == "int8", False),
        strict=True,
    )
    return tuple(
        _quantize_rows(x, bounds, size, STORAGE_DTYPES[storage], channels)
        for x, size, channels in parts
    )


def from_codes(
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    bounds: Bounds,
    storage: str,
    dtype: torch.dtype,
) -> tuple[QuantizedRows, QuantizedRows]:
    """Returns keys and values from the codes and scales that a file holds."""
    starts = (
        _find_group_starts(bounds, size, codes[0].device)
        for size in _choose_group_sizes(bounds, storage)
    )
    return tuple(QuantizedRows(*each, dtype) for each in zip(codes, scales, starts, strict=True))


def _choose_group_sizes(bounds: Bounds, storage: str) -> tuple[int, int]:
    """Returns how many rows of a head share a scale at most, for keys and for values."""
    return (GROUP, 1) if storage == "int8" else (max(bounds[-1], 1),) * 2


def compute_scale_shapes(bounds: Bounds, storage: str, dim: int) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of the scales of keys and of values that a file holds for heads of D =
    `dim`.
    """
    starts = (
        _find_group_starts(bounds, size, torch.device("cpu"))
        for size in _choose_group_sizes(bounds, storage)
    )
    counts = (bounds[-1] if each is None else len(each) for each in starts)
    return tuple(zip(counts, (dim if storage == "int8" else 1, 1), strict=True))


def _find_group_starts(bounds: Bounds, size: int, device: torch.device) -> Tensor | None:
    """Returns the first row of every group of up to `size` rows of one head, or None for groups of
    one row.
    """
    if size == 1:
        return None
    firsts = [row for start, end in pairwise(bounds) for row in range(start, end, size)]
    return torch.tensor(firsts, dtype=torch.int32, device=device)


def _quantize_rows(
    rows: Tensor, bounds: Bounds, size: int, kind: torch.dtype, channels: bool
) -> QuantizedRows:
    """Encodes groups of up to `size` rows of a head; with `channels`, every column of a group has
    its own scale.
    """
    heads = [
        _quantize_head(rows[start:end], size, kind, channels)
        for start, end in pairwise(bounds)
        if end > start
    ]
    if not heads:
        heads = [
            (
                rows.to(kind),
                rows.new_zeros(0, rows.shape[1] if channels else 1, dtype=torch.float32),
            )
        ]
    codes, scales = (
        torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*heads, strict=True)
    )
    return QuantizedRows(codes, scales, _find_group_starts(bounds, size, rows.device), rows.dtype)


def _quantize_head(
    rows: Tensor, size: int, kind: torch.dtype, channels: bool
) -> tuple[Tensor, Tensor]:
    """Encodes one head's rows (N, D): codes (N, D), scales (M, D) or (M, 1). A group of zeros has
    the least scale.
    """
    exact = rows.to(torch.float32)
    largest = LARGEST_CODE[kind]
    highest = exact.abs() if channels else exact.abs().amax(-1, keepdim=True)
    lengths = torch.full((-(-len(rows) // size),), min(size, len(rows)), device=rows.device)
    lengths[-1] = len(rows) - size * (len(lengths) - 1)
    if size > 1:
        highest = torch.segment_reduce(highest, "max", lengths=lengths, axis=0)
    scales = (highest / largest).clamp_min(torch.finfo(torch.float32).tiny)
    exact = exact / scales.repeat_interleave(lengths, 0)
    codes = (exact.round() if kind == torch.int8 else exact).clamp(-largest, largest).to(kind)
    return codes, scales
