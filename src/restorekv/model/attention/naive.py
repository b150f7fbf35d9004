"""The definition of ragged attention: one loop over heads and one softmax over context and tail."""

import torch
from torch import Tensor

from restorekv.cache.ragged import RaggedLayer


def causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Returns (Q, K) bool: the last query sees every key, the one before it all but the last, and so on."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def attend(query: Tensor, layer: RaggedLayer, tail_mask: Tensor | None, scale: float) -> Tensor:
    """query (B, H, G, Q, D), tail_mask (B, 1, Q, n+q) bool or None = causal -> (B, H, G, Q, D)."""
    batch, heads, _, queries, _ = query.shape
    tail = layer.keys.shape[-2]
    exact = torch.promote_types(query.dtype, torch.float32)
    if tail_mask is None:
        tail_mask = causal(queries, tail, query.device)[None, None].expand(batch, 1, -1, -1)
    outputs = []
    for head in range(heads):
        rows = slice(layer.bounds[head], layer.bounds[head + 1])
        kept = layer.bounds[head + 1] - layer.bounds[head]
        keys = torch.cat([layer.context_keys[rows].expand(batch, -1, -1), layer.keys[:, head]], 1)
        values = torch.cat([layer.context_values[rows].expand(batch, -1, -1), layer.values[:, head]], 1)
        logits = query[:, head].to(exact) @ keys[:, None].transpose(-1, -2).to(exact) * scale  # (B, G, Q, K)
        if layer.bias is not None:
            logits = logits + torch.cat([layer.bias[rows].to(exact), logits.new_zeros(tail)])
        hidden = torch.cat([tail_mask.new_zeros(batch, 1, queries, kept), ~tail_mask], -1)
        # The lowest finite number: a padding query may see nothing, and NaN would spread through its values.
        weights = logits.masked_fill(hidden, torch.finfo(exact).min).softmax(-1)
        outputs.append(weights @ values[:, None].to(exact))
    return torch.stack(outputs, 1).to(query.dtype)
