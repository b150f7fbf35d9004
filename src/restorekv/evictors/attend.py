"""Causal attention weights in blocks of rows, for scorers that reduce them: a whole Q x K matrix never exists."""

from collections.abc import Iterator

import torch
from torch import Tensor

try:
    from restorekv.evictors import triton_maxima
except ImportError:  # an extra: pip install 'restorekv[triton]'
    triton_maxima = None

BLOCK = 1 << 22  # weights in a block
REDUCTIONS = ("max", "mean")


def attention_blocks(query: Tensor, key: Tensor, block: int = BLOCK) -> Iterator[tuple[int, int, Tensor]]:
    """query (H, G, Q, D), key (H, K, D), of which the last Q are the queries' own -> (low, high, weights).

    weights (H, G, high - low, K - Q + high) float32 are the softmax of the rows [low, high), with logits scaled by
    1 / sqrt(D), over every key that any of them sees. Rows are independent, so one pass over the blocks is exact.
    """
    heads, groups, rows, dim = query.shape
    before = key.shape[1] - rows
    key = key.float()
    step = max(block // (heads * groups * key.shape[1]), 1)
    for low in range(0, rows, step):
        high = min(low + step, rows)
        part = query[:, :, low:high].float().flatten(1, 2)  # (H, G * rows, D)
        logits = part @ key[:, : before + high].transpose(1, 2) / dim**0.5
        logits = logits.unflatten(1, (groups, -1))
        later = torch.ones(high - low, high - low, dtype=torch.bool, device=logits.device).triu(1)
        logits[..., before + low :].masked_fill_(later, float("-inf"))
        yield low, high, logits.softmax(-1)


def on_gpu(query: Tensor) -> bool:
    """Returns whether triton_maxima.py is installed and can take this query; otherwise attention/blocked.py is used."""
    return triton_maxima is not None and triton_maxima.usable(query)


def over_groups(values: Tensor, reduction: str) -> Tensor:
    """Reduces (H, G, ...) to (H, ...) by the "max" or "mean" over the query heads that share a KV head."""
    return values.amax(1) if reduction == "max" else values.mean(1)
