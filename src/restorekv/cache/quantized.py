"""Contexts stored in 8 bits per number, independently of the ratio, which counts pairs.

int8    keys: one scale per channel and group of GROUP neighboring rows of a head; values: one scale
        per row. Keys have outlier channels and values have none (KIVI, arXiv:2402.02750, whose 2
        bits need smaller groups and zero points). With the scale s = max|x| / 127 a number is off
        by at most s / 2.
fp8     e4m3, one scale s = max|x| / 448 per head for keys and one for values: off by at most
        |x| / 16 or s / 1024.

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
QUANTIZED_DTYPES = {"int8": torch.int8, "fp8": FP8}
KV_DTYPES = ("model", *QUANTIZED_DTYPES)  # "model" is the model's own dtype
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
        """Return the same rows on a device."""
        starts = None if self.starts is None else self.starts.to(device)
        return QuantizedRows(self.codes.to(device), self.scales.to(device), starts, self.dtype)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return (n, D) in `dtype`."""
        return self.dequantize(rows, self.dtype)

    def dequantize(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """Return (n, D) in `dtype`; the product is taken in float32, or in `dtype` if that is
        wider.
        """
        wide = torch.promote_types(dtype, torch.float32)
        if self.starts is None:
            scales = self.scales[rows]
        else:
            # Groups have different sizes where a head ends, so a search finds each row's group: the
            # last start that is not after the row.
            start, stop, _ = rows.indices(len(self))
            indices = torch.arange(start, stop, dtype=torch.int32, device=self.device)
            scales = self.scales[torch.searchsorted(self.starts, indices, right=True) - 1]
        return self.codes[rows].to(wide).mul_(scales).to(dtype)


def list_tensors(rows: Tensor | QuantizedRows) -> list[Tensor]:
    """Return the tensors that hold the rows."""
    if isinstance(rows, Tensor):
        return [rows]
    if rows.starts is None:
        return [rows.codes, rows.scales]
    return [rows.codes, rows.scales, rows.starts]


def check_kv_dtype(kv_dtype: str) -> None:
    """Refuse a name that is not in KV_DTYPES."""
    check_choice("kv_dtype", kv_dtype, KV_DTYPES)


def quantize(
    keys: Tensor, values: Tensor, bounds: Bounds, kv_dtype: str
) -> tuple[QuantizedRows, QuantizedRows]:
    """Encode keys and values (N, D) of one layer.

    Args:
        keys: (N, D).
        values: (N, D).
        bounds: Head h has the rows bounds[h]:bounds[h + 1].
        kv_dtype: "int8" or "fp8".
    """
    # A key channel with large numbers keeps them in every row, so its scale is shared along the
    # rows. Values have no such channels, and a scale per row costs D times less.
    key_size, value_size = _choose_group_sizes(bounds, kv_dtype)
    dtype = QUANTIZED_DTYPES[kv_dtype]
    per_channel = kv_dtype == "int8"
    return (
        _quantize_rows(keys, bounds, key_size, dtype, per_channel=per_channel),
        _quantize_rows(values, bounds, value_size, dtype, per_channel=False),
    )


def from_codes(
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    bounds: Bounds,
    kv_dtype: str,
    dtype: torch.dtype,
) -> tuple[QuantizedRows, QuantizedRows]:
    """Return keys and values from the codes and scales that a file holds.

    Args:
        codes: The codes of keys and of values, each (N, D).
        scales: The scales of keys and of values, in the shapes of `compute_scale_shapes`.
        bounds: Head h has the rows bounds[h]:bounds[h + 1].
        kv_dtype: "int8" or "fp8".
        dtype: The model's dtype, in which the rows are read.
    """
    key_size, value_size = _choose_group_sizes(bounds, kv_dtype)
    # A file does not hold the starts of the groups: they follow from the bounds.
    key_starts = _find_group_starts(bounds, key_size, codes[0].device)
    value_starts = _find_group_starts(bounds, value_size, codes[0].device)
    return (
        QuantizedRows(codes[0], scales[0], key_starts, dtype),
        QuantizedRows(codes[1], scales[1], value_starts, dtype),
    )


def compute_scale_shapes(bounds: Bounds, kv_dtype: str, dim: int) -> tuple[tuple[int, int], ...]:
    """Return the shapes of the scales of keys and of values that a file holds for heads of D =
    `dim`.
    """
    counts = []
    for size in _choose_group_sizes(bounds, kv_dtype):
        starts = _find_group_starts(bounds, size, torch.device("cpu"))
        counts.append(bounds[-1] if starts is None else len(starts))
    key_width = dim if kv_dtype == "int8" else 1
    return (counts[0], key_width), (counts[1], 1)


def _choose_group_sizes(bounds: Bounds, kv_dtype: str) -> tuple[int, int]:
    """Return how many rows of a head can share a scale, for keys and for values."""
    if kv_dtype == "int8":
        return GROUP, 1
    whole_head = max(bounds[-1], 1)
    return whole_head, whole_head


def _find_group_starts(bounds: Bounds, size: int, device: torch.device) -> Tensor | None:
    """Return the first row of every group of up to `size` rows of one head, or None for groups of
    one row.
    """
    if size == 1:
        return None
    # A group never spans two heads, whose numbers may differ in size.
    starts: list[int] = []
    for start, end in pairwise(bounds):
        starts += range(start, end, size)
    return torch.tensor(starts, dtype=torch.int32, device=device)


def _quantize_rows(
    rows: Tensor, bounds: Bounds, size: int, dtype: torch.dtype, per_channel: bool
) -> QuantizedRows:
    """Encode groups of up to `size` rows of a head; with `per_channel`, every column of a group has
    its own scale.
    """
    codes = []
    scales = []
    for start, end in pairwise(bounds):
        if end > start:
            head_codes, head_scales = _quantize_head(rows[start:end], size, dtype, per_channel)
            codes.append(head_codes)
            scales.append(head_scales)
    if not codes:  # every head is empty
        width = rows.shape[1] if per_channel else 1
        # Empty tensors of the right dtypes and widths, which a file and a kernel can take.
        codes.append(rows.to(dtype))
        scales.append(rows.new_zeros(0, width, dtype=torch.float32))
    if len(codes) > 1:
        all_codes = torch.cat(codes)
        all_scales = torch.cat(scales)
    else:
        # `torch.cat` would copy a single head.
        all_codes = codes[0]
        all_scales = scales[0]
    return QuantizedRows(
        codes=all_codes,
        scales=all_scales,
        starts=_find_group_starts(bounds, size, rows.device),
        dtype=rows.dtype,
    )


def _quantize_head(
    rows: Tensor, size: int, dtype: torch.dtype, per_channel: bool
) -> tuple[Tensor, Tensor]:
    """Encode one head's rows (N, D): codes (N, D), scales (M, D) or (M, 1). A group of zeros has
    the least scale.
    """
    exact = rows.to(torch.float32)
    largest = LARGEST_CODE[dtype]
    magnitudes = exact.abs()
    # Without scales per channel, one number per row is enough to find the largest of the group.
    if not per_channel:
        magnitudes = magnitudes.amax(-1, keepdim=True)
    # Each group has `size` rows; the last one has the rest.
    groups = -(-len(rows) // size)
    lengths = torch.full((groups,), min(size, len(rows)), device=rows.device)
    lengths[-1] = len(rows) - size * (groups - 1)
    # With one row per group the magnitudes are the groups' own already.
    if size > 1:
        magnitudes = torch.segment_reduce(magnitudes, "max", lengths=lengths, axis=0)
    # The least normal number instead of zero: a group of zeros is then divided by something.
    scales = (magnitudes / largest).clamp_min(torch.finfo(torch.float32).tiny)
    codes = exact / scales.repeat_interleave(lengths, 0)
    # A cast to fp8 rounds to its numbers; a cast to int8 would cut off the fraction.
    if dtype == torch.int8:
        codes = codes.round()
    return codes.clamp(-largest, largest).to(dtype), scales
