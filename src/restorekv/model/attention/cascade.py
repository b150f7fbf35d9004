"""Ragged attention on a CPU for decoding and questions, with PyTorch's fused kernel for each head.

All queries of a batch, B questions times G group heads, read the rows of one head's context at once
and in place: nothing is padded, widened or copied. A long head is cut into pieces, since the kernel
divides heads and blocks of queries among its threads, not rows. Pieces and tail are joined by their
log-sum-exps l_i into one softmax:

    o = sum_i e^(l_i - l) o_i,    l = log sum_i e^l_i.

A model's sinks (sinks.py) are one more piece, whose average is 0. Logits and sums are float32
(float64 for float64).
"""

from itertools import pairwise

import torch
from torch import Tensor

from restorekv.cache.ragged import RaggedLayer
from restorekv.errors import RestoreKVError
from restorekv.model.attention.reference import make_causal_mask

_LEAST_ROWS = 512  # rows of a piece, as many as the kernel reads at a time
_QUERY_BLOCK = 32  # queries for one thread


def can_answer(query: Tensor, layer: RaggedLayer, cap: float | None = None) -> bool:
    """Return whether this backend can answer: on a CPU, with one dtype, without gradients or a
    cap.
    """
    tensors = query, layer.keys, layer.values
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return (
        query.device.type == "cpu"
        and cap is None
        and query.dtype == layer.keys.dtype == layer.context_keys.dtype
        and not learning
    )


def attend_ragged(
    query: Tensor,
    layer: RaggedLayer,
    tail_mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the attention (B, H, G, Q, D) of query (B, H, G, Q, D) to a layer's context and tail.

    tail_mask is (B, 1, Q, n + q) bool, or None for a causal mask; sinks are (H, G) or None. No
    gradients are recorded, and `cap` has to be None.
    """
    if not can_answer(query, layer, cap):
        raise RestoreKVError(
            "The backend 'cascade' runs on a CPU without gradients and without a cap on logits; "
            "leave out attention.force_backend(...)."
        )
    batch, heads, groups, queries, width = query.shape
    # With one row the kernel multiplies differently, at half the speed.
    if batch * groups * queries == 1:
        twice = None if sinks is None else sinks.expand(-1, 2)
        double = query.expand(-1, -1, 2, -1, -1)
        return attend_ragged(double, layer, tail_mask, scale, twice)[:, :, :1]
    rows = query.transpose(0, 1).reshape(heads, -1, width)  # (H, R, D), R = B*G*Q
    most = max(
        min(
            layer.longest_head // _LEAST_ROWS, _count_threads() // -(-rows.shape[1] // _QUERY_BLOCK)
        ),
        1,
    )
    # One for each piece, one for the remaining rows, one for the sinks, one for the tail. What a
    # head does not use keeps the lowest log-sum-exp, and so has no weight.
    outputs = query.new_zeros(most + 3, *rows.shape)
    lses = rows.new_full(
        outputs.shape[:-1], torch.finfo(_get_exact_dtype(query)).min, dtype=_get_exact_dtype(query)
    )
    for head, (start, end) in enumerate(pairwise(layer.bounds)):
        # Pieces of equal length, then the rows that are left over, as one more piece.
        pieces = max(min((end - start) // _LEAST_ROWS, most), 1)
        middle = end - (end - start) % pieces
        if start < middle:
            output, lse = _attend_rows(rows[head], layer, start, middle, pieces, scale)
            outputs[:pieces, head] = output
            lses[:pieces, head] = lse
        if middle < end:
            output, lse = _attend_rows(rows[head], layer, middle, end, 1, scale)
            outputs[most, head] = output[0]
            lses[most, head] = lse[0]
    if sinks is not None:
        of_rows = sinks[:, None, :, None].expand(-1, batch, -1, queries)
        lses[most + 1] = of_rows.reshape(heads, -1)
    tail, lse = _attend_tail(query.flatten(2, 3), layer, tail_mask, groups, scale)
    outputs[-1] = tail.transpose(0, 1).reshape(rows.shape)
    lses[-1] = lse.transpose(0, 1).reshape(rows.shape[:-1])
    output = (lses.softmax(0)[..., None] * outputs).sum(0).to(query.dtype)
    return output.view(heads, batch, groups, queries, width).transpose(0, 1)


def _attend_rows(
    rows: Tensor, layer: RaggedLayer, start: int, end: int, pieces: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return averages (pieces, R, D) and log-sum-exps (pieces, R) of rows (R, D) over the pairs
    start:end of a head, in pieces of equal length.
    """
    shape = (1, pieces, -1, rows.shape[-1])
    keys = layer.context_keys[start:end].view(shape)
    values = layer.context_values[start:end].view(shape)
    bias = None
    if layer.bias is not None:
        bias = layer.bias[start:end].to(_get_exact_dtype(rows)).view(1, shape[1], 1, -1)
    output, lse = attend_fused(
        rows.expand(*shape[:2], -1, -1), keys, values, attn_mask=bias, scale=scale
    )
    return output[0], lse[0]


def _attend_tail(
    rows: Tensor, layer: RaggedLayer, mask: Tensor | None, groups: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return averages (B, H, G*Q, D) and log-sum-exps (B, H, G*Q) of rows (B, H, G*Q, D) over the
    tail.
    """
    queries = rows.shape[2] // groups
    if mask is None and queries > 1:
        mask = make_causal_mask(queries, layer.columns, rows.device)[None, None]
    # The lowest finite number: a padding query may see nothing, and NaN would spread.
    if mask is not None:
        exact = _get_exact_dtype(rows)
        bias = torch.zeros_like(mask, dtype=exact).masked_fill(~mask, torch.finfo(exact).min)
        mask = bias.repeat(1, 1, groups, 1)
    return attend_fused(rows, layer.keys, layer.values, attn_mask=mask, scale=scale)


def attend_fused(
    query: Tensor, keys: Tensor, values: Tensor, **more: object
) -> tuple[Tensor, Tensor]:
    """Return averages (B, H, R, D) and log-sum-exps (B, H, R) of query over (B, H, N, D) pairs.

    SDPA uses the same kernel, but returns only the averages.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, **more)


@torch.compiler.assume_constant_result
def _count_threads() -> int:
    """Return the number of threads as a constant, since torch.compile cannot trace the call."""
    return torch.get_num_threads()


def _get_exact_dtype(rows: Tensor) -> torch.dtype:
    """Return the dtype of masks and sums."""
    return torch.promote_types(rows.dtype, torch.float32)
