"""What restore tokens attend to in the restore pass (Eqs. 4-6), before anything is evicted.

A restore token's weights in one query head are divided into five parts with masses that add up to
1: `kept`, `evicted`, `sinks`, `restore` and `itself`; DEFINITIONS says what each is. `evicted` is 0
if the pass reads the evicted cache.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from paper.analysis.case import (
    BINS,
    RESTORED,
    Case,
    DocumentFigures,
    to_plain,
    to_plain_list,
    watch_attention,
)
from restorekv.cache.ragged import RaggedLayer

PARTS = ("kept", "evicted", "sinks", "restore", "itself")
# The most-attended tokens are listed for the first EXAMPLES documents, TOP for each restore token.
EXAMPLES = 3
TOP = 8
DEFINITIONS = {
    "kept": "context pairs beyond the sinks that the restored cache keeps",
    "evicted": "context pairs beyond the sinks that it evicts",
    "sinks": "the chat prefix, and the first 4 columns where it is shorter",
    "restore": "earlier restore tokens",
    "itself": "the restore token's own pair",
    "kept_share": (
        "kept / (kept + evicted); blind: the share of context pairs beyond the sinks that is kept"
    ),
    "histogram": (
        "share of a token's attention to the context beyond the sinks, by twentieth of the context"
    ),
    "entropy": (
        "in nats, of the attention over the context beyond the sinks, normalized over it; mean "
        "over query heads"
    ),
    "weight": (
        "share of a token's attention to the context beyond the sinks, all layers and heads "
        "together"
    ),
}


@torch.no_grad()
def measure(case: Case) -> dict:
    """Return a document's masses (5, L, n), histogram (n, BINS), entropy (L, n) and its value for
    uniform attention, pairs [kept, all], and for the first documents the top tokens.
    """
    adapter = case.adapter
    assert adapter is not None, "`analyze` leaves this out without an adapter"
    cache = case.read_by_restore()
    prefix = case.prepared.context.prefix_length
    sinks = case.sinks
    layers = len(cache.full_attention)  # layers with a sliding window are not observed
    n = adapter.restore_tokens
    keep = case.kept[RESTORED]  # (L, H, S + T)
    masses = torch.zeros(len(PARTS), layers, n).double()
    entropy = torch.zeros(layers, n).double()
    total = torch.zeros(n, keep.shape[-1], dtype=torch.float64)

    def see(index: int, layer: RaggedLayer, weights: Iterator[Tensor]) -> None:
        columns = layer.positions.cpu().long().split(layer.offsets.diff().tolist())
        for head, (own, places) in enumerate(zip(weights, columns, strict=True)):
            # (G, n, N), (G, n, n)
            context = own[..., : len(places)]
            tail = own[..., len(places) :]
            inside = places >= sinks
            stays = keep[index, head, places]
            itself = tail.diagonal(dim1=-2, dim2=-1)
            parts = [
                context[..., mask].sum(-1) for mask in (inside & stays, inside & ~stays, ~inside)
            ]
            masses[:, index] += (
                torch.stack([*parts, tail.sum(-1) - itself, itself]).mean(1) / layer.heads
            )
            entropy[index] += _compute_entropy(context[..., inside]).mean(0) / layer.heads
            total.index_add_(1, places[inside], context[..., inside].mean(0))

    with watch_attention(case.prepared.model, see):
        adapter.run_restore_pass(cache, ratio=case.prepared.make_budget(case.ratio).ratio)
    total = (total / total.sum(-1, keepdim=True).clamp_min(torch.finfo(total.dtype).tiny))[
        :, prefix:
    ]
    histogram = torch.zeros(n, BINS, dtype=torch.float64).index_add_(1, case.bins, total)
    figures = {
        "masses": masses.tolist(),
        "histogram": histogram.tolist(),
        "entropy": entropy.tolist(),
        "uniform": float(np.log(max(keep.shape[-1] - sinks, 1))),
        "pairs": [int(keep[..., sinks:].sum()), keep[..., sinks:].numel()],
    }
    return figures | (
        {"document": case.sample.id, "tokens": _find_top_tokens(case, total)}
        if case.index < EXAMPLES
        else {}
    )


def _compute_entropy(weights: Tensor) -> Tensor:
    """Return the entropy (...) of weights (..., K) after normalizing them; 0 where all weights are
    0.
    """
    shares = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return -torch.special.xlogy(shares, shares).sum(-1)


def _find_top_tokens(case: Case, total: Tensor) -> list[list[dict]]:
    """Return the TOP context tokens that each restore token attends to most; total (n, T)."""
    weights, places = total.topk(min(TOP, total.shape[-1]))
    return [
        [
            {"text": case.pieces[place], "position": place, "weight": to_plain(weight)}
            for weight, place in zip(*row, strict=True)
        ]
        for row in zip(weights.tolist(), places.tolist(), strict=True)
    ]


def pool_figures(figures: DocumentFigures) -> dict:
    """Pool the figures of all documents with equal weights."""
    masses = figures.mean("masses")
    pairs = figures.mean("pairs")
    kept = masses[0].mean()
    evicted = masses[1].mean()
    return {
        "average": dict(zip(PARTS, to_plain_list(masses.mean((1, 2))), strict=True)),
        **dict(zip(PARTS, to_plain_list(masses), strict=True)),
        "kept_share": {
            "seen": to_plain(kept / (kept + evicted)),
            "blind": to_plain(pairs[0] / pairs[1]),
        },
        "histogram": to_plain(figures.mean("histogram")),
        "entropy": to_plain(figures.mean("entropy")),
        "entropy_uniform": to_plain(figures.mean("uniform")),
        "examples": [
            {key: each[key] for key in ("document", "tokens")}
            for each in figures.documents
            if "tokens" in each
        ],
    }
