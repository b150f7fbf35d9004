"""What survives: which layers, heads, places and kinds of token hold the budget, and what restoring changes in that.

Counted are the context pairs that a cache holds; the chat prefix, which stays, and the restore pairs are left out.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from restorekv.evaluation.analysis.case import BASE, BINS, RESTORED, Case
from restorekv.evaluation.analysis.pool import Pool, plain
from restorekv.evaluation.analysis.words import CLASSES, classes, pieces

DEFINITIONS = {
    "pairs": "context pairs; the chat prefix and the restore pairs are left out",
    "share_per_layer": "share of all held pairs that lies in each layer",
    "kept_per_head": "share of the context's tokens that each head holds",
    "kept_per_position": "share of pairs held, by twentieth of the context",
    "number": "tokens with a digit",
    "name": "tokens of words with a capital that occur nowhere in the document in small letters",
    "punctuation": "tokens without letters or digits",
    "other": "all other tokens",
    "forgotten": "share of the context's tokens that no head holds",
    "jaccard": "pairs that base and restored cache both hold, over those that either holds",
}


def measure(case: Case) -> dict:
    """{cache: shares and, by class, [tokens, pairs held]}, and under "overlap" [both, either] per layer."""
    context = case.prepared.context
    named = classes(pieces(case.tokenizer, context.ids[0, context.prefix :].tolist()))
    kinds = torch.tensor([CLASSES.index(name) for name in named])
    kept = {name: keep[..., context.prefix :] for name, keep in case.kept.items()}
    found: dict = {name: shares(keep, case.bins, kinds) for name, keep in kept.items()}
    if RESTORED in kept:
        base, restored = kept[BASE], kept[RESTORED]
        found["overlap"] = [(base & restored).sum((1, 2)).tolist(), (base | restored).sum((1, 2)).tolist()]
    return found


def shares(keep: Tensor, bins: Tensor, kinds: Tensor) -> dict:
    """keep (L, H, T) bool, bins and kinds (T,) long."""
    per_layer, per_token = keep.sum((1, 2)).double(), keep.double().mean((0, 1))
    held = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, per_token)
    tokens = torch.bincount(kinds, minlength=len(CLASSES))
    pairs = torch.zeros(len(CLASSES), dtype=torch.long).index_add_(0, kinds, keep.sum((0, 1)))
    return {
        "share_per_layer": (per_layer / per_layer.sum().clamp_min(1)).tolist(),
        "kept_per_head": keep.double().mean(-1).tolist(),
        "kept_per_position": (held / torch.bincount(bins, minlength=BINS).clamp_min(1)).tolist(),
        "classes": [tokens.tolist(), pairs.tolist()],
        "forgotten": float((per_token == 0).double().mean()),
    }


def pooled(pool: Pool) -> dict:
    """Every document weighs the same; classes and overlap are pooled over all pairs."""
    caches = {name: one(pool, name) for name in pool.documents[0] if name != "overlap"}
    if "overlap" not in pool:
        return {"caches": caches}
    both, either = pool.mean("overlap")
    with np.errstate(invalid="ignore"):
        overlap = {
            "jaccard": plain(both.sum() / either.sum()),
            "jaccard_interval": pool.interval(lambda x: x[:, 0].sum(-1) / x[:, 1].sum(-1), "overlap"),
            "jaccard_per_layer": plain(both / either),
        }
    return {"caches": caches, "overlap": overlap}


def one(pool: Pool, name: str) -> dict:
    """One cache's figures."""
    tokens, pairs = pool.mean(name, "classes")
    layers, heads = pool.mean(name, "kept_per_head").shape
    with np.errstate(invalid="ignore"):
        table = zip(tokens / tokens.sum(), pairs / (tokens * layers * heads), pairs / pairs.sum(), strict=True)
    return {
        **{key: plain(pool.mean(name, key)) for key in ("share_per_layer", "kept_per_head", "kept_per_position")},
        "classes": {
            kind: dict(zip(("tokens", "kept", "held"), map(plain, row), strict=True))
            for kind, row in zip(CLASSES, table, strict=True)
        },
        "forgotten": plain(pool.mean(name, "forgotten")),
    }
