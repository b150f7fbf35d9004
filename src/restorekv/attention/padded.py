"""Ragged attention with every head padded to the longest: one SDPA call with a float mask; for training."""

import torch
import torch.nn.functional as F
from torch import Tensor

from restorekv.attention.naive import causal
from restorekv.cache import RaggedLayer


def attend(query: Tensor, layer: RaggedLayer, tail_mask: Tensor | None, scale: float) -> Tensor:
    """query (B, H, G, Q, D), tail_mask (B, 1, Q, n+q) bool or None = causal -> (B, H, G, Q, D)."""
    batch, heads, groups, queries, _ = query.shape
    tail = layer.keys.shape[-2]
    index, valid = padding(layer)  # (H, W)
    lowest = torch.finfo(query.dtype).min
    bias = query.new_zeros(()) if layer.bias is None else layer.bias[index].to(query.dtype)
    context_bias = torch.where(valid, bias, lowest)[None, :, None].expand(batch, -1, queries, -1)
    if tail_mask is None:
        tail_mask = causal(queries, tail, query.device)[None, None]
    tail_bias = torch.where(tail_mask, query.new_zeros(()), lowest).expand(batch, heads, -1, -1)
    mask = torch.cat([context_bias, tail_bias], -1)[:, :, None].expand(-1, -1, groups, -1, -1)
    keys = torch.cat([layer.context_keys[index].expand(batch, -1, -1, -1), layer.keys], 2)
    values = torch.cat([layer.context_values[index].expand(batch, -1, -1, -1), layer.values], 2)
    result = F.scaled_dot_product_attention(
        query.flatten(2, 3), keys, values, attn_mask=mask.flatten(2, 3), scale=scale
    )
    return result.unflatten(2, (groups, queries))


def workspace(query: Tensor, layer: RaggedLayer) -> int:
    """Bytes of the padded keys and values and of the mask, all of which the backward pass needs."""
    batch, heads, groups, queries, dim = query.shape
    width = layer.longest + layer.keys.shape[-2]
    return batch * heads * width * (2 * dim + groups * queries) * query.element_size()


def padding(layer: RaggedLayer) -> tuple[Tensor, Tensor]:
    """Row of the flat context for each (head, slot), (H, W) long, and whether the slot is taken, bool."""
    starts, ends = layer.offsets[:-1, None].long(), layer.offsets[1:, None].long()
    index = starts + torch.arange(layer.longest, device=starts.device)
    valid = index < ends
    return index.masked_fill(~valid, 0), valid
