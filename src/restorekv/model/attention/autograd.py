"""Ragged attention with gradients, in blocks of rows; the backward pass needs only the inputs.

With logits s, weights p = softmax(s) over context and tail, output o = p v and its gradient do,
    dp = do v^T,    ds = p * (dp - rowsum(p * dp)),    dq = ds k,    dk = ds^T q,    dv = p^T do,
and the frozen context needs neither dk nor dv. A model's sinks (sinks.py) take a share of p and
have no value, so the same equations hold; they belong to the frozen model and get no gradients. A
cap c (caps.py) makes the logit c tanh(s / c) of s, so ds is multiplied by 1 - tanh(s / c)^2. The
backward pass recomputes p, as FlashAttention does (arXiv:2205.14135). A row has its whole softmax
in one block, so nothing has to be merged.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from restorekv.cache.ragged import RaggedLayer
from restorekv.model.attention.reference import make_causal_mask
from restorekv.model.attention.sinks import compute_weights

# Logits of a block. Three such tensors exist at once, four under a cap, and one more in the
# backward pass: 16 MiB each in float32.
BLOCK = 1 << 22
# One head's keys, or its values: context (N, D) and tail (B, t, D).
ContextAndTail = tuple[Tensor, Tensor]


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
    if tail_mask is None:
        causal = make_causal_mask(query.shape[-2], layer.keys.shape[-2], query.device)
        tail_mask = causal[None, None]
    return AutogradAttention.apply(
        query,
        layer.keys,
        layer.values,
        tail_mask,
        layer.context_keys,
        layer.context_values,
        layer.bias,
        sinks,
        layer.bounds,
        scale,
        cap,
    )


class AutogradAttention(torch.autograd.Function):
    """Ragged attention with gradients for the query and the tail; the context is never copied."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, ctx.bounds, ctx.scale, ctx.cap = inputs
        ctx.save_for_backward(*tensors)
        query = tensors[0]
        output = torch.empty_like(query)
        for head, rows, _, _, values, weights, _ in iterate_blocks(*inputs):
            output[:, head, :, rows] = _mix_pairs(weights, values)
        return output

    # PyTorch's once_differentiable returns a function whose `ctx` has no name for the type checker.
    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        inputs: tuple[Any, ...] = (*ctx.saved_tensors, ctx.bounds, ctx.scale, ctx.cap)
        query, tail_keys, tail_values, mask = inputs[:4]
        exact = torch.promote_types(query.dtype, torch.float32)
        for_query = torch.empty_like(query)
        for_keys = torch.zeros_like(tail_keys, dtype=exact)
        for_values = torch.zeros_like(tail_values, dtype=exact)
        for head, rows, scaled, keys, values, weights, bent in iterate_blocks(*inputs):
            arriving = gradient[:, head, :, rows].to(exact)
            count = len(keys[0])  # pairs of the context; those of the tail follow
            slopes = _multiply_pairs(arriving, values)
            slopes.sub_((weights * slopes).sum(-1, keepdim=True)).mul_(weights)
            slopes[..., count:].masked_fill_(~mask[:, :, rows], 0)
            if bent is not None:
                slopes.mul_(1 - bent.square())
            for_query[:, head, :, rows] = _mix_pairs(slopes, keys) * ctx.scale
            for_keys[:, head] += slopes[..., count:].flatten(1, 2).mT @ scaled.flatten(1, 2)
            for_values[:, head] += weights[..., count:].flatten(1, 2).mT @ arriving.flatten(1, 2)
        return (
            for_query,
            for_keys.to(tail_keys.dtype),
            for_values.to(tail_values.dtype),
            *(None,) * 8,  # for what is not trained
        )


def iterate_blocks(
    query: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    mask: Tensor,
    context_keys: Tensor,
    context_values: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    bounds: Sequence[int],
    scale: float,
    cap: float | None,
) -> Iterator[tuple]:
    """Yield (head, rows, scaled query, keys, values, weights, bent logits) for every head, in
    blocks of queries.

    Scaled query (B, G, q, D), weights and bent logits (B, G, q, N + t) are float32, or the query's
    dtype if that is wider. Bent logits are tanh(s / c) under a cap c, else None. With sinks (H, G)
    the weights of a row sum to less than 1.
    """
    batch, _, groups, queries, _ = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    for head, (start, end) in enumerate(pairwise(bounds)):
        of_head = None if sinks is None else sinks[head]
        keys = context_keys[start:end].to(exact), tail_keys[:, head].to(exact)
        values = context_values[start:end].to(exact), tail_values[:, head].to(exact)
        step = max(BLOCK // (batch * groups * (end - start + tail_keys.shape[-2])), 1)
        for low in range(0, queries, step):
            rows = slice(low, low + step)
            scaled = query[:, head, :, rows].to(exact) * scale
            logits = _multiply_pairs(scaled, keys)
            bent = None
            if cap is not None:
                bent = (logits / cap).tanh()
                logits = bent * cap
            if bias is not None:
                logits[..., : end - start] += bias[start:end]
            logits[..., end - start :].masked_fill_(~mask[:, :, rows], torch.finfo(exact).min)
            yield head, rows, scaled, keys, values, compute_weights(logits, of_head), bent


def _multiply_pairs(rows: Tensor, pairs: ContextAndTail) -> Tensor:
    """Multiply (B, G, q, D) by the keys or values of every pair: (B, G, q, N + t)."""
    context, tail = pairs
    return torch.cat([rows @ context.mT, rows @ tail[:, None].mT], -1)


def _mix_pairs(weights: Tensor, pairs: ContextAndTail) -> Tensor:
    """Sum all pairs with weights (B, G, q, N + t): (B, G, q, D)."""
    context, tail = pairs
    return weights[..., : len(context)] @ context + weights[..., len(context) :] @ tail[:, None]
