"""Layers and calls for tests of attention."""

import torch

from restorekv.cache.ragged import RaggedLayer
from restorekv.cache.sliding import SlidingLayer
from restorekv.model.attention.dispatch import BACKENDS, triton_attend
from restorekv.model.attention.reference import make_causal_mask

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


def draw(*shape, seed=0):
    """Return random numbers in float64, the same for every run."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make_window_case():
    """Return query (2, 6, 4, D), a layer with a window of 6, a mask over its tail, keys and values
    (2, 3, 12, D) of context and tail, and what each query sees of them, (4, 12) bool.
    """
    window, context, tail, queries = 6, 5, 7, 4
    keys, values = draw(2, 3, context + tail, WIDTH), draw(2, 3, context + tail, WIDTH, seed=1)
    keys[1, :, :context], values[1, :, :context] = keys[0, :, :context], values[0, :, :context]
    first = keys[:1, :, :context], values[:1, :, :context]
    nothing = keys[:1, :, :0]
    layer = SlidingLayer(*first, 15, window, 20, nothing, nothing)
    layer.keys, layer.values = keys[:, :, context:], values[:, :, context:]
    query = draw(2, 6, queries, WIDTH, seed=2)
    mask = make_causal_mask(queries, tail, query.device)[None, None].expand(2, -1, -1, -1)
    visible = make_causal_mask(queries, context + tail, query.device)
    visible = visible & ~visible.tril(context + tail - queries - window)
    return query, layer, mask, keys, values, visible


def run_scoring_pass(attend_pass, scale, sinks, cap=None):
    """Run a pass of 9 rows over 30 cached columns, 8 of which are in the softmax of its weights.

    Returns its output and weights, then products (H, G, Q, K) of queries and keys times the scale,
    what is later (Q, K), values (H, K, D), and the columns that the weights are over.
    """
    rows, held = 9, 30
    query = draw(HEADS, GROUPS, rows, WIDTH)
    keys, values = (draw(HEADS, held + rows, WIDTH, seed=seed) for seed in (1, 2))
    own = keys[:, held:], values[:, held:]
    inside = [slice(0, 2), slice(5, 11)]
    columns = [0, 1, *range(5, 11), *range(held, held + rows)]
    weights = torch.zeros(HEADS, GROUPS, rows, len(columns), dtype=torch.float64)

    def note(head, low, high, found):
        weights[head, :, low:high, : found.shape[-1]] = found.double()

    def get_pairs(head):
        return keys[head, :held], values[head, :held]

    output = attend_pass(query, own, get_pairs, scale, inside, note, sinks, cap)
    later = ~make_causal_mask(rows, held + rows, query.device)
    return output, weights, query @ keys[:, None].mT * scale, later, values, columns
