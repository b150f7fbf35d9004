"""What survives eviction: how the budget is spread over layers, heads, positions and kinds of
token, and what restoring changes about it.

Only the context pairs that a cache holds are counted; the chat prefix, which is always kept, and
the restore pairs are not.
"""

import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paper.analysis.case import BASE, BINS, RESTORED, Case, DocumentFigures, to_plain

CLASSES = ("number", "name", "punctuation", "other")
WORD = re.compile(r"[^\W\d_]+")
DEFINITIONS = {
    "pairs": "context pairs, without the chat prefix and the restore pairs",
    "share_per_layer": "share of all held pairs that lies in each layer",
    "kept_per_head": "share of the context's tokens that each head holds",
    "kept_per_position": "share of pairs held, by twentieth of the context",
    "number": "tokens with a digit",
    "name": "tokens of capitalized words that occur nowhere in the document in lower case",
    "punctuation": "tokens without letters or digits",
    "other": "all other tokens",
    "forgotten": "share of the context's tokens that no head holds",
    "jaccard": "pairs that both the base and the restored cache hold, over those that either holds",
}


def measure(case: Case) -> dict:
    """Return a document's {cache: shares and, by class, [tokens, pairs held]}.

    With a restored cache, "overlap" has [pairs that both hold, pairs that either holds] per layer.
    """
    prefix = case.prepared.context.prefix_length
    kinds = torch.tensor([CLASSES.index(name) for name in classify_tokens(case.pieces)])
    kept = {name: keep[..., prefix:] for name, keep in case.kept.items()}
    figures: dict = {name: _compute_shares(keep, case.bins, kinds) for name, keep in kept.items()}
    if RESTORED in kept:
        base = kept[BASE]
        restored = kept[RESTORED]
        figures["overlap"] = [
            (base & restored).sum((1, 2)).tolist(),
            (base | restored).sum((1, 2)).tolist(),
        ]
    return figures


def _compute_shares(keep: Tensor, bins: Tensor, kinds: Tensor) -> dict:
    """Count what a cache keeps; keep (L, H, T) bool, bins and kinds (T,) long."""
    per_layer = keep.sum((1, 2)).double()
    per_token = keep.double().mean((0, 1))
    per_bin = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, per_token)
    tokens = torch.bincount(kinds, minlength=len(CLASSES))
    pairs = torch.zeros(len(CLASSES), dtype=torch.long).index_add_(0, kinds, keep.sum((0, 1)))
    return {
        "share_per_layer": (per_layer / per_layer.sum().clamp_min(1)).tolist(),
        "kept_per_head": keep.double().mean(-1).tolist(),
        "kept_per_position": (per_bin / torch.bincount(bins, minlength=BINS).clamp_min(1)).tolist(),
        "classes": [tokens.tolist(), pairs.tolist()],
        "forgotten": float((per_token == 0).double().mean()),
    }


def classify_tokens(pieces: Sequence[str]) -> list[str]:
    """Return one of CLASSES for every token of a text, as defined in DEFINITIONS; tokens of
    whitespace only are "other".
    """
    text = "".join(pieces)
    words = list(WORD.finditer(text))
    lower_case = {word.group() for word in words if word.group().islower()}
    in_name = [False] * len(text)
    for word in words:
        if word.group()[0].isupper() and word.group().lower() not in lower_case:
            in_name[word.start() : word.end()] = [True] * len(word.group())
    kinds = []
    start = 0
    for piece in pieces:
        end = start + len(piece)
        if any(letter.isdigit() for letter in piece):
            kinds.append("number")
        elif any(in_name[start:end]):
            kinds.append("name")
        else:
            words_or_blank = any(letter.isalpha() for letter in piece) or not piece.strip()
            kinds.append("other" if words_or_blank else "punctuation")
        start = end
    return kinds


def pool_figures(figures: DocumentFigures) -> dict:
    """Pool the figures of all documents with equal weights; classes and overlap are pooled over all
    pairs.
    """
    caches = {
        name: _pool_cache(figures, name) for name in figures.documents[0] if name != "overlap"
    }
    if "overlap" not in figures:
        return {"caches": caches}
    both, either = figures.mean("overlap")
    with np.errstate(invalid="ignore"):
        overlap = {
            "jaccard": to_plain(both.sum() / either.sum()),
            "jaccard_interval": figures.interval(
                lambda x: x[:, 0].sum(-1) / x[:, 1].sum(-1), "overlap"
            ),
            "jaccard_per_layer": to_plain(both / either),
        }
    return {"caches": caches, "overlap": overlap}


def _pool_cache(figures: DocumentFigures, name: str) -> dict:
    tokens, pairs = figures.mean(name, "classes")
    layers, heads = figures.mean(name, "kept_per_head").shape
    with np.errstate(invalid="ignore"):
        table = zip(
            tokens / tokens.sum(),
            pairs / (tokens * layers * heads),
            pairs / pairs.sum(),
            strict=True,
        )
    keys = ("share_per_layer", "kept_per_head", "kept_per_position", "forgotten")
    columns: dict[str, object] = {key: to_plain(figures.mean(name, key)) for key in keys}
    columns["classes"] = {
        kind: dict(zip(("tokens", "kept", "held"), map(to_plain, row), strict=True))
        for kind, row in zip(CLASSES, table, strict=True)
    }
    return columns
