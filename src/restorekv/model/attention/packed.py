"""Packing a context into 8 bits, and ragged attention over it, which unpacks one tile at a time.

For every head, the softmax average and log-sum-exp over the tail are merged with those of tile
after tile, as in `blocked.py`. On a GPU a layer that fits into a small workspace is unpacked whole
for the kernel there.
"""

import copy
from itertools import pairwise

import torch
from torch import Tensor

from restorekv.cache.quantized import QuantizedRows
from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.model.attention import self_tests
from restorekv.model.attention.blocked import Part, merge_parts
from restorekv.model.attention.caps import cap_logits
from restorekv.model.attention.reference import make_causal_mask
from restorekv.model.attention.sinks import add_sinks

BLOCK = 1 << 20  # numbers in a tile's keys, or in its logits


def quantize_context(cache: RaggedCache, kv_dtype: str, groups: int) -> None:
    """Quantize the context of a cache to "int8" or "fp8"; "model" leaves it in the model's dtype.

    Layers with a window keep the model's dtype. If the device fails the self-test of packing, the
    CPU packs the rows.
    """
    first = cache.full_attention[0]
    head_dim = first.restore_keys.shape[-1]
    can_pack = (
        kv_dtype == "model"
        or not self_tests.needs_self_test(first.device)
        or self_tests.passed_self_test(
            kv_dtype, first.device, first.heads, groups, head_dim, first.dtype
        )
    )
    cache.quantize(kv_dtype, on_cpu=not can_pack)


def is_packed(layer: RaggedLayer) -> bool:
    """Return whether the context is stored in 8 bits."""
    return isinstance(layer.context_keys, QuantizedRows)


def get_packed_rows(layer: RaggedLayer) -> tuple[QuantizedRows, QuantizedRows]:
    """Return keys and values of a context that is stored in 8 bits."""
    keys = layer.context_keys
    values = layer.context_values
    assert isinstance(keys, QuantizedRows) and isinstance(values, QuantizedRows), "not packed"
    return keys, values


def unpack_layer(layer: RaggedLayer, on: torch.device | None = None) -> RaggedLayer:
    """Return the layer with its context in the model's dtype, for one call.

    `on` is the device that unpacks it, the layer's own by default.
    """
    on = layer.device if on is None else on
    plain = copy.copy(layer)
    plain.context_keys = layer.context_keys.to(on)[:].to(layer.device)
    plain.context_values = layer.context_values.to(on)[:].to(layer.device)
    return plain


def attend_ragged(
    query: Tensor,
    layer: RaggedLayer,
    tail_mask: Tensor | None,
    scale: float,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return the attention (B, H, G, Q, D) of query (B, H, G, Q, D) to a layer's context and tail.

    tail_mask is (B, 1, Q, n + q) bool, or None for a causal mask; sinks are (H, G) or None; cap is
    that of caps.py or None.
    """
    batch, heads, groups, queries, dim = query.shape
    exact = query.to(torch.promote_types(query.dtype, torch.float32)) * scale
    rows = exact.transpose(0, 1).reshape(heads, -1, dim)  # (H, B*G*Q, D)
    output, lse = _attend_tail(exact, layer, tail_mask, cap)
    output, lse = (x.transpose(0, 1).reshape(heads, len(rows[0]), -1) for x in (output, lse))
    step = max(BLOCK // max(len(rows[0]), dim), 1)
    for head, (start, end) in enumerate(pairwise(layer.bounds)):
        for low in range(start, end, step):
            part = _attend_tile(rows[head], layer, slice(low, min(low + step, end)), cap)
            output[head], lse[head] = merge_parts((output[head], lse[head]), part)
    output, lse = (x.view(heads, batch, groups, queries, -1).transpose(0, 1) for x in (output, lse))
    of_rows = None if sinks is None else sinks[None, :, :, None, None]
    return add_sinks(output, lse, of_rows).to(query.dtype)


def _attend_tile(rows: Tensor, layer: RaggedLayer, tile: slice, cap: float | None) -> Part:
    """Return averages (R, D) and log-sum-exps (R, 1) of scaled rows (R, D) over some pairs of one
    head.
    """
    keys, values = get_packed_rows(layer)
    logits = cap_logits(rows @ keys.dequantize(tile, rows.dtype).T, cap)
    if layer.bias is not None:
        logits += layer.bias[tile]
    lse = logits.logsumexp(-1, keepdim=True)
    return logits.sub_(lse).exp_() @ values.dequantize(tile, rows.dtype), lse


def _attend_tail(query: Tensor, layer: RaggedLayer, mask: Tensor | None, cap: float | None) -> Part:
    """Return averages (B, H, G, Q, D) and log-sum-exps (..., 1) of a scaled query (B, H, G, Q, D)
    over the tail.
    """
    keys, values = (x[:, :, None].to(query.dtype) for x in layer.keys_and_values)
    if mask is None:
        mask = make_causal_mask(query.shape[-2], keys.shape[-2], query.device)[None, None]
    logits = cap_logits(query @ keys.mT, cap)
    logits = logits.masked_fill_(~mask[:, :, None], torch.finfo(query.dtype).min)
    lse = logits.logsumexp(-1, keepdim=True)
    return logits.sub_(lse).exp_() @ values, lse
