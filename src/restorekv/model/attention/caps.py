"""A cap on the logits of attention, for models that were trained with one (Gemma 2, VaultGemma).

With the cap c, a logit l, which is the scaled product of a query and a key, enters the softmax as

    c * tanh(l / c),

which hardly changes small logits and keeps large ones between -c and c (arXiv:2408.00118, 2.1). A
bias of a pair and a model's sinks are added after it. PyTorch's fused kernels have no cap, so the
logits are computed in blocks of rows here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop_out

from restorekv.model.attention.sinks import compute_weights

BLOCK = 1 << 22  # logits of a block


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return logits after a model's cap; `cap` is None in models without one."""
    if cap is None:
        return logits
    return (logits / cap).tanh() * cap


def attend_with_cap(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    cap: float,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute PyTorch's SDPA with a cap on the logits.

    Logits and weights are float32, or the query's dtype if that is wider. Without gradients no more
    than a block of them exists at once.

    Args:
        query: (B, H * G, Q, D).
        keys: (B, H, K, D).
        values: (B, H, K, D).
        mask: (B or 1, 1 or H * G, Q, K), bool of what each query sees or numbers that are added to
            the logits.
        scale: The factor of the logits before the cap.
        cap: The cap.
        sinks: (H * G,), logits that are in every softmax, or None.
        dropout: The dropout rate of the attention weights.

    Returns:
        (B, H * G, Q, D).
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    batch, heads, columns, _ = keys.shape
    grouped = query.unflatten(1, (heads, -1))  # (B, H, G, Q, D)
    wide_keys = keys[:, :, None].to(exact)
    wide_values = values[:, :, None].to(exact)
    # (B or 1, 1 or H, 1 or G, Q, K)
    grouped_mask = mask[:, :, None] if mask.shape[1] == 1 else mask.unflatten(1, (heads, -1))
    of_heads = None if sinks is None else sinks.view(heads, -1)
    step = max(BLOCK // (batch * query.shape[1] * columns), 1)
    blocks = []
    for low in range(0, query.shape[2], step):
        rows = slice(low, low + step)
        logits = cap_logits(grouped[..., rows, :].to(exact) @ wide_keys.mT * scale, cap)
        of_rows = grouped_mask[..., rows, :]
        if mask.dtype == torch.bool:
            # The lowest finite number: a padding query may see nothing, and NaN would spread
            # through its values.
            logits = logits.masked_fill(~of_rows, torch.finfo(exact).min)
        else:
            logits = logits + of_rows
        weights = compute_weights(logits, of_heads)
        if dropout:
            weights = drop_out(weights, dropout)
        blocks.append((weights @ wide_values).to(query.dtype))
    return torch.cat(blocks, 3).flatten(1, 2)
