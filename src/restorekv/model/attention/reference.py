"""The definition of ragged attention: one loop over heads and one softmax over context and tail.

`attend_pass` defines what `blocked.py` computes: a pass over the pairs of a cache and its own, with
its weights.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from restorekv.cache.ragged import RaggedLayer
from restorekv.model.attention.caps import cap_logits
from restorekv.model.attention.sinks import compute_weights

ROWS = 64  # rows of a pass whose weights exist at once


def make_causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return (Q, K) bool: the last query sees every key, the one before it all but the last, ..."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


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
    batch, heads, _, queries, _ = query.shape
    tail = layer.keys.shape[-2]
    exact = torch.promote_types(query.dtype, torch.float32)
    if tail_mask is None:
        tail_mask = make_causal_mask(queries, tail, query.device)[None, None].expand(
            batch, 1, -1, -1
        )
    outputs = []
    for head in range(heads):
        rows = slice(layer.bounds[head], layer.bounds[head + 1])
        count = rows.stop - rows.start
        keys = torch.cat([layer.context_keys[rows].expand(batch, -1, -1), layer.keys[:, head]], 1)
        values = torch.cat(
            [layer.context_values[rows].expand(batch, -1, -1), layer.values[:, head]], 1
        )
        # (B, G, Q, K)
        logits = query[:, head].to(exact) @ keys[:, None].transpose(-1, -2).to(exact) * scale
        logits = cap_logits(logits, cap)
        if layer.bias is not None:
            logits = logits + torch.cat([layer.bias[rows].to(exact), logits.new_zeros(tail)])
        hidden = torch.cat([tail_mask.new_zeros(batch, 1, queries, count), ~tail_mask], -1)
        # The lowest finite number: a padding query may see nothing, and NaN would spread through
        # its values.
        logits = logits.masked_fill(hidden, torch.finfo(exact).min)
        weights = compute_weights(logits, None if sinks is None else sinks[head])
        outputs.append(weights @ values[:, None].to(exact))
    return torch.stack(outputs, 1).to(query.dtype)


def attend_pass(
    query: Tensor,
    own: tuple[Tensor, Tensor],
    cached: Callable[[int], tuple[Tensor, Tensor]],
    scale: float,
    inside: Sequence[slice] = (),
    on_weights: Callable[[int, int, int, Tensor], None] = lambda *_: None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Return a pass's attention (Q, H * G, D) over the pairs of a cache and its own.

    Args:
        query: (H, G, Q, D).
        own: The pass's own keys and values, (H, Q, D) each.
        cached: Returns the cached keys and values of a head, (K, D) each.
        scale: The factor of the logits.
        inside: The cached columns whose weights are wanted; W in all.
        on_weights: Called with head, low, high and the weights (G, high - low, W + high) float32 of
            the rows [low, high), a softmax over the columns `inside` and the own pairs up to
            `high`. It may change them.
        sinks: (H, G), logits that are in every softmax, or None.
        cap: The model's cap on the logits (caps.py), or None.
    """
    heads, _, rows, _ = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    outputs = []
    for head in range(heads):
        of_head = None if sinks is None else sinks[head]
        cached_keys, cached_values = cached(head)
        keys = torch.cat([cached_keys, own[0][head]]).to(exact)
        values = torch.cat([cached_values, own[1][head]]).to(exact)
        held = len(cached_keys)
        columns = torch.arange(len(keys), device=query.device)
        chosen = torch.cat([*(columns[part] for part in inside), columns[held:]])
        parts = []
        for low in range(0, rows, ROWS):
            high = min(low + ROWS, rows)
            logits = query[head, :, low:high].to(exact) @ keys.T * scale  # (G, high - low, K + Q)
            logits = cap_logits(logits, cap)
            later = columns[None] > columns[held + low : held + high, None]
            logits = logits.masked_fill(later, -torch.inf)
            parts.append(compute_weights(logits, of_head) @ values)
            seen = chosen[: len(chosen) - rows + high]
            on_weights(head, low, high, compute_weights(logits[..., seen], of_head))
        outputs.append(torch.cat(parts, 1))  # (G, Q, D)
    return torch.stack(outputs).permute(2, 0, 1, 3).flatten(1, 2).to(query.dtype)
