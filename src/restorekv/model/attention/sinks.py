"""Learned attention sinks: one logit per query head that is in every softmax and has no value.

With logits l_j of the pairs that a query sees and the sink's logit s of its head,

    o = sum_j e^(l_j) v_j / (e^s + sum_j e^(l_j)).

A backend that has an average over pairs with its log-sum-exp l, and no room for another column,
multiplies it by e^l / (e^s + e^l) = sigmoid(l - s). It does so once, after everything that the
query sees is merged. gpt-oss, Flint and Granite with windows have such sinks. The first columns of
a text, which some evictors always keep, are called sinks too and are something else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

ALIGNED = 8  # fused kernels of GPUs take head dims that are multiples of this


def group_sinks(sinks: Tensor | None, heads: int) -> Tensor | None:
    """Return logits (H * G,) as (H, G), or None if a model has none."""
    return None if sinks is None else sinks.view(heads, -1)


def compute_weights(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of logits (..., G, Q, K) and sinks (..., G): the weights of the former."""
    if sinks is None:
        return logits.softmax(-1)
    column = sinks.to(logits.dtype)[..., None, None].expand(*logits.shape[:-1], 1)
    return torch.cat([logits, column], -1).softmax(-1)[..., :-1]


def add_sinks(average: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return an average over pairs after sinks were added to its softmax.

    Args:
        average: (..., D).
        lse: (..., 1), the log-sum-exps of the logits that were averaged over.
        sinks: Logits that expand to the shape of `lse`, or None.
    """
    if sinks is None:
        return average
    return average * (lse - sinks.to(lse.dtype)).sigmoid()


def attend_with_sinks(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor,
    dropout: float = 0.0,
) -> Tensor:
    """Compute PyTorch's SDPA with a sink in every softmax.

    The sinks become one more pair of every KV head. Its value is 0. Its key is 0 except for two
    extra numbers, both 1. In their places a query has the logit of its own head divided by the
    scale, in two parts: the logit as its dtype rounds it, and the rest. So no mask for each head is
    needed, and all kernels and gradients are PyTorch's.

    Args:
        query: (B, H * G, Q, D).
        keys: (B, H, K, D).
        values: (B, H, K, D).
        mask: (B or 1, 1 or H * G, Q, K), bool of what each query sees or numbers that are added to
            the logits, or None for everything.
        scale: The factor of the logits.
        sinks: (H * G,).
        dropout: The dropout rate of the attention weights.

    Returns:
        (B, H * G, Q, D).
    """
    width = query.shape[-1]
    more = 2 + -(width + 2) % ALIGNED
    logits = (sinks.float() / scale)[:, None, None].expand(*query.shape[:-1], 1)
    rounded = logits.to(query.dtype)
    rest = (logits - rounded.float()).to(query.dtype)
    wide_query = pad(torch.cat([query, rounded, rest], -1), (0, more - 2))
    wide_keys = pad(keys, (0, more, 0, 1))
    wide_keys[..., -1, width : width + 2] = 1
    wide_values = pad(values, (0, more, 0, 1))
    if mask is not None:
        sees_sink = 1 if mask.dtype == torch.bool else 0
        mask = pad(mask, (0, 1), value=sees_sink)
    shares_heads = not torch.is_grad_enabled()
    if not shares_heads:
        groups = query.shape[1] // keys.shape[1]
        wide_keys = wide_keys.repeat_interleave(groups, 1)
        wide_values = wide_values.repeat_interleave(groups, 1)
    result = sdpa(
        wide_query,
        wide_keys,
        wide_values,
        attn_mask=mask,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=shares_heads,
    )
    return result[..., :width]
