"""Layers and calls for tests of attention."""

import torch

from restorekv.cache.ragged import RaggedLayer
from restorekv.model.attention.dispatch import BACKENDS, triton_attend

HEADS, GROUPS, WIDTH, SEEN = 3, 2, 8, 23
EXACT = sorted(set(BACKENDS) - {"triton"})  # those with float64; test_tiles.py has the other
ON_CPU = sorted(BACKENDS if triton_attend is None or triton_attend.INTERPRETED else EXACT)


def make_layer(keep, keys, values, tail_keys, tail_values, bias):
    """Return a ragged layer of the pairs in keep (H, SEEN) bool.

    They are taken from dense keys and values (H, SEEN, D); the tails are (B, H, t, D).
    """
    heads, columns = keep.nonzero(as_tuple=True)
    counts = keep.sum(-1).cumsum(0)
    offsets = torch.cat([counts.new_zeros(1), counts]).int()
    empty = keys.new_zeros(1, HEADS, 0, WIDTH)
    layer = RaggedLayer(
        keys[heads, columns],
        values[heads, columns],
        offsets,
        columns.int(),
        SEEN,
        empty,
        empty,
        None if bias is None else bias[heads, columns],
    )
    layer.keys, layer.values = tail_keys, tail_values
    return layer


def build(case):
    generator = torch.Generator().manual_seed(case["seed"])
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    batch, queries, tail = case["batch"], case["queries"], case["tail"]
    keep = torch.zeros(HEADS, SEEN, dtype=torch.bool)
    for head, length in enumerate(case["lengths"]):
        keep[head, torch.randperm(SEEN, generator=generator)[:length]] = True
    leaves = {
        "query": draw(batch, HEADS, GROUPS, queries, WIDTH) * 3,
        "tail_keys": draw(batch, HEADS, tail, WIDTH),
        "tail_values": draw(batch, HEADS, tail, WIDTH),
    }
    fixed = {"keys": draw(HEADS, SEEN, WIDTH), "values": draw(HEADS, SEEN, WIDTH)}
    bias = draw(HEADS, SEEN) if case["bias"] else None
    mask = (
        torch.ones(queries, tail, dtype=torch.bool)
        .tril(tail - queries)
        .expand(batch, 1, -1, -1)
        .clone()
    )
    if case["padding"] and tail > queries:  # hides a tail column that no query needs
        mask[0, :, :, 0] = False
    return keep, leaves, fixed, bias, mask
