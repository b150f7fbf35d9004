"""A pass's attention on a CPU over the pairs of a cache and its own, with weights for an observer.

Every row sees all cached pairs and the pass's own pairs up to itself. Rows are processed in blocks,
the G query heads of one KV head together, so that a block's logits stay in the processor's cache
and serve both the output and the weights. Logits are float32 in units of log 2 (2^x is three times
as fast as e^x); weights are multiplied with values in the values' dtype, as in flash attention.

The weights that an observer gets are a softmax over chosen cached pairs and the pass's own. The
other cached pairs are processed in tiles, and their averages o and log-sum-exps l are merged one
after the other:

    l = log(e^l1 + e^l2),    o = e^(l1 - l) o1 + e^(l2 - l) o2.

A model's sinks (sinks.py) are merged into the output at the end, and into the weights separately.

In addition to the output this needs memory for one head's keys and values in the weights' softmax
and a few copies of one block.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from restorekv.cache.tail import KeysValues
from restorekv.model.attention.caps import cap_logits
from restorekv.model.attention.sinks import add_sinks

BLOCK = 1 << 20  # logits of a block
TILE = 2048  # cached pairs of a tile
LOG2E = math.log2(math.e)
Part = tuple[Tensor, Tensor]  # averages (..., R, D) and log-sum-exps (..., R, 1)
OnWeights = Callable[[int, int, int, Tensor], None]


def attend_pass(
    query: Tensor,
    own: KeysValues,
    cached: Callable[[int], KeysValues],
    scale: float,
    inside: Sequence[slice] = (),
    on_weights: OnWeights = lambda *_: None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Compute what `reference.attend_pass` defines.

    Args:
        query: (H, G, Q, D).
        own: The pass's own keys and values, (H, Q, D) each.
        cached: Returns the cached keys and values of a head, (K, D) each.
        scale: The factor of the logits.
        inside: The cached columns whose weights are wanted, as ordered, disjoint slices; W in all.
        on_weights: Called with head, low, high and the weights (G, high - low, W + high) float32 of
            the rows [low, high), a softmax over the columns `inside` and the own pairs up to
            `high`. It may change them.
        sinks: (H, G), logits that are in every softmax, or None.
        cap: The model's cap on the logits (caps.py), or None.

    Returns:
        (Q, H * G, D).
    """
    heads, groups, rows, _ = query.shape
    exact = torch.promote_types(query.dtype, torch.float32)
    output = query.new_empty(rows, heads, groups, own[1].shape[-1])
    for head in range(heads):
        pairs = cached(head)
        keys, values = (
            torch.cat([*(x[part] for part in inside), mine[head]])
            for x, mine in zip(pairs, own, strict=True)
        )
        keys = keys.to(exact)
        others = [tuple(x[part] for x in pairs) for part in split_outside(inside, len(pairs[0]))]
        scaled = query[head].to(exact) * (scale * LOG2E)
        cap_of_powers = None if cap is None else cap * LOG2E
        step = max(BLOCK // (groups * max(len(keys), TILE if others else 1)), 1)
        for low in range(0, rows, step):
            high = min(low + step, rows)
            part = scaled[:, low:high].flatten(0, 1)
            last = len(keys) - rows + high
            weights, near = _average_values(
                part, keys[:last], values[:last], cap_of_powers, high - low
            )
            far = (
                _average_values(part, key.to(exact), value, cap_of_powers)[1]
                for key, value in others
            )
            mean, lse = reduce(merge_parts, far, near)
            if sinks is not None:
                of_rows = sinks[head].repeat_interleave(high - low)[:, None]
                mean = add_sinks(mean, lse, of_rows)
                # The softmax of the weights is over fewer pairs, and has the sink too.
                weights = add_sinks(weights, near[1], of_rows)
            output[low:high, head] = mean.unflatten(0, (groups, -1)).transpose(0, 1)
            on_weights(head, low, high, weights.unflatten(0, (groups, -1)))
    return output.flatten(1, 2)


def _average_values(
    rows: Tensor, keys: Tensor, values: Tensor, cap: float | None, own: int = 0
) -> tuple[Tensor, Part]:
    """Return the weights (G * r, K) of rows (G * r, D) over K pairs, their average and log-sum-exp.

    The last `own` = r pairs are the rows' own and are seen causally. Rows, and `cap` if there is
    one, are in units of log 2.
    """
    weights = cap_logits(rows @ keys.mT, cap)
    if own:
        later = torch.ones(own, own, dtype=torch.bool, device=rows.device).triu(1)
        weights.unflatten(0, (-1, own))[..., -own:].masked_fill_(later, -torch.inf)
    top = weights.amax(-1, keepdim=True)
    total = weights.sub_(top).exp2_().sum(-1, keepdim=True)
    weights.mul_(1 / total)
    return weights, (weights.to(values.dtype) @ values, (top + total.log2()) * math.log(2))


def merge_parts(one: Part, two: Part) -> Part:
    """Return the average over two disjoint sets of pairs, and its log-sum-exp."""
    lse = torch.logaddexp(one[1], two[1])
    return (one[1] - lse).exp() * one[0] + (two[1] - lse).exp() * two[0], lse


def split_outside(inside: Sequence[slice], count: int) -> list[slice]:
    """Return the columns of [0, count) that are not in `inside`, in tiles."""
    edges = [0, *(edge for part in inside for edge in (part.start, part.stop)), count]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return [
        slice(low, min(low + TILE, stop))
        for start, stop in gaps
        for low in range(start, stop, TILE)
    ]
