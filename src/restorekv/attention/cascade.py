"""Ragged attention in two parts, context and tail, merged by their log-sum-exps; for decoding and batches.

With o_c, l_c the context's softmax average and log-sum-exp and o_t, l_t the tail's,
    o = e^(l_c - l) o_c + e^(l_t - l) o_t,    l = log(e^l_c + e^l_t),
which is the softmax over both. The context is sliced, never copied, and shared by all queries of a batch.
"""

import torch
from torch import Tensor

from restorekv.attention.naive import causal
from restorekv.cache import RaggedLayer


def attend(query: Tensor, layer: RaggedLayer, tail_mask: Tensor | None, scale: float) -> Tensor:
    """query (B, H, G, Q, D), tail_mask (B, 1, Q, n+q) bool or None = causal -> (B, H, G, Q, D)."""
    exact = query.to(torch.promote_types(query.dtype, torch.float32)) * scale
    context, context_lse = attend_context(exact, layer)
    tail, tail_lse = attend_tail(exact, layer, tail_mask)
    total = torch.logaddexp(context_lse, tail_lse)
    return ((context_lse - total).exp() * context + (tail_lse - total).exp() * tail).to(query.dtype)


def workspace(query: Tensor, layer: RaggedLayer) -> int:
    """Bytes of the logits: those of one head over its context, those of all heads over the tail."""
    rows = query[..., 0].numel()  # B * H * G * Q
    return 4 * rows * max(layer.longest // layer.heads, layer.keys.shape[-2])


def attend_context(query: Tensor, layer: RaggedLayer) -> tuple[Tensor, Tensor]:
    """Scaled query (B, H, G, Q, D) -> average over kept pairs, same shape, and its lse (B, H, G, Q, 1)."""
    batch, heads, groups, queries, width = query.shape
    rows = query.transpose(0, 1).reshape(heads, -1, width)  # (H, B*G*Q, D)
    outputs, lses = [], []
    for head, (start, end) in enumerate(zip(layer.bounds, layer.bounds[1:], strict=False)):
        if start == end:  # weight e^min = 0 beside any visible key
            outputs.append(torch.zeros_like(rows[head]))
            lses.append(rows.new_full((rows.shape[1], 1), torch.finfo(rows.dtype).min))
            continue
        logits = rows[head] @ layer.context_keys[start:end].T.to(rows.dtype)
        if layer.bias is not None:
            logits = logits + layer.bias[start:end]
        lse = logits.logsumexp(-1, keepdim=True)
        outputs.append((logits - lse).exp() @ layer.context_values[start:end].to(rows.dtype))
        lses.append(lse)
    shape = (heads, batch, groups, queries, -1)
    return torch.stack(outputs).view(shape).transpose(0, 1), torch.stack(lses).view(shape).transpose(0, 1)


def attend_tail(query: Tensor, layer: RaggedLayer, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scaled query (B, H, G, Q, D) -> average over the tail, same shape, and its lse (B, H, G, Q, 1)."""
    queries, length = query.shape[-2], layer.keys.shape[-2]
    logits = query @ layer.keys[:, :, None].transpose(-1, -2).to(query.dtype)  # (B, H, G, Q, n+q)
    if mask is None and queries > 1:
        mask = causal(queries, length, query.device)[None, None]
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None], torch.finfo(logits.dtype).min)
    lse = logits.logsumexp(-1, keepdim=True)
    return (logits - lse).exp() @ layer.values[:, :, None].to(query.dtype), lse
