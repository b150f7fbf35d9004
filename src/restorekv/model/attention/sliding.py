"""Attention in a layer with a sliding window W: position p sees p - W + 1 ... p.

The keys are the last columns of the context, at the positions that they had in the text, and those
of the tail. Our own loops hide padding by a mask over the tail: what a query sees there, itself
included, are the tokens that follow the context in its row, so their number tells its position. Any
other pass has no padding, and its columns have the positions from `seen` on; transformers' own mask
for them is only compared with the window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from restorekv.cache.sliding import SlidingLayer
from restorekv.errors import ModelError
from restorekv.model.attention.caps import attend_with_cap
from restorekv.model.attention.reference import make_causal_mask
from restorekv.model.attention.sinks import attend_with_sinks


def attend_rows(
    query: Tensor,
    layer: SlidingLayer,
    tail_mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return (B, H*G, Q, D) for query (B, H*G, Q, D) of our own loops.

    tail_mask (B, 1, Q, columns) says what each query sees of its row, however far away; None says
    that no row has padding. sinks (H*G,) are in every softmax; cap is that of caps.py or None.
    """
    if tail_mask is None:
        return attend_sequence(query, layer, None, scale, sinks, cap)
    sees = tail_mask[:, 0]  # (B, Q, columns)
    queries = layer.seen - 1 + sees.sum(-1)  # (B, Q)
    tail = layer.seen - 1 + sees[:, -1].cumsum(-1)  # (B, columns), right for those that are seen
    after = queries[:, :, None] - layer.window  # the last position that is too far away
    context = torch.arange(layer.context_columns, device=query.device) + layer.first
    in_context = context > after
    in_tail = sees & (tail[:, None] > after)
    visible = torch.cat([in_context, in_tail], -1)
    # A padding query may see nothing, and NaN would spread through its values.
    visible = visible | ~visible.any(-1, keepdim=True)
    keys = _join(layer.context_keys, layer.keys)
    values = _join(layer.context_values, layer.values)
    return _attend(query, keys, values, visible[:, None], scale, sinks, cap)


def attend_sequence(
    query: Tensor,
    layer: SlidingLayer,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return (B, H*G, Q, D) for query (B, H*G, Q, D), the last Q columns of a tail without padding.

    `mask` (B or 1, 1, Q, columns) is transformers' own for these columns, or None; it is refused if
    it hides more than the window does. sinks (H*G,) are in every softmax; cap is that of caps.py or
    None.
    """
    count = query.shape[-2]
    columns = layer.columns
    window = make_causal_mask(count, columns, query.device)
    window = window & ~window.tril(columns - count - layer.window)
    if mask is not None and not bool((mask == window).all()):
        raise ModelError(
            "Rows with padding cannot be read over a compressed cache of a model with sliding "
            "windows; generate answers one by one, or use ask with a list of questions."
        )
    # What every query is too far away from is left out before anything is copied.
    earliest = layer.seen + columns - count - layer.window + 1
    start = min(max(earliest - layer.first, 0), layer.context_columns)
    tail_start = min(max(earliest - layer.seen, 0), columns - count)
    context = torch.arange(layer.first + start, layer.first + layer.context_columns)
    queries = torch.arange(layer.seen + columns - count, layer.seen + columns)
    in_context = context.to(query.device) > queries.to(query.device)[:, None] - layer.window
    visible = torch.cat([in_context, window[:, tail_start:]], -1)
    keys = _join(layer.context_keys[:, :, start:], layer.keys[:, :, tail_start:])
    values = _join(layer.context_values[:, :, start:], layer.values[:, :, tail_start:])
    return _attend(query, keys, values, visible[None, None], scale, sinks, cap)


def _join(context: Tensor, tail: Tensor) -> Tensor:
    """Return (B, H, N + columns, D) of a context (1, H, N, D) and a tail (B, H, columns, D)."""
    return torch.cat([context.expand(len(tail), -1, -1, -1), tail], -2)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    scale: float,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Return the softmax average (B, H*G, Q, D) of what is visible, (B or 1, 1, Q, K)."""
    if cap is not None:
        return attend_with_cap(query, keys, values, visible, scale, cap, sinks)
    if sinks is not None:
        return attend_with_sinks(query, keys, values, visible, scale, sinks)
    if torch.is_grad_enabled():
        groups = query.shape[1] // keys.shape[1]
        keys = keys.repeat_interleave(groups, 1)
        values = values.repeat_interleave(groups, 1)
        return sdpa(query, keys, values, attn_mask=visible, scale=scale)
    return sdpa(query, keys, values, attn_mask=visible, scale=scale, enable_gqa=True)
