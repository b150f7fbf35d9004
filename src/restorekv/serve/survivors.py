"""Which tokens of a document survive its compression, for the page."""

from __future__ import annotations

from typing import Any

from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.model.tokenize import split_into_pieces


def describe_survivors(
    context: CompressedContext, layer: int | None, head: int | None
) -> dict[str, Any]:
    """Return a text in pieces, each with the share of its pairs that are kept, and what is held.

    A token has one pair in every layer and KV head, so its share is a mean over them. `kept_share`
    is the mean over the tokens.

    `layer` and `head` restrict the shares to a layer or KV head; None takes all of them.
    """
    keep_mask = context.kept
    manifest = context.manifest
    start = context.context.prefix_length
    layers, heads, columns = keep_mask.shape
    chosen_layers = _choose("layer", layer, layers)
    chosen_heads = _choose("head", head, heads)
    shares = keep_mask[chosen_layers, chosen_heads, start:].float().mean((0, 1))
    ids = tuple(context.context.ids[0, start:].tolist())
    pieces = []
    first = 0
    for text, tokens in split_into_pieces(context.tokenizer, ids):
        share = float(shares[first : first + tokens].mean())
        pieces.append([text, round(share, 4)])
        first += tokens
    return {
        "layers": layers,
        "heads": heads,
        "tokens": manifest.tokens,
        "prefix": start,
        "surviving": int((shares > 0).sum()),
        "kept_share": round(float(shares.mean()), 4),
        "restore_tokens": manifest.restore_tokens,
        "evictor": manifest.evictor,
        "seconds": manifest.seconds,
        "pairs": {"before": layers * heads * columns, "after": manifest.pairs_held},
        "bytes": {"before": manifest.bytes_full, "after": manifest.bytes_held},
        "pieces": pieces,
    }


def _choose(name: str, index: int | None, size: int) -> slice:
    """Return the slice of one layer or head, or of all."""
    if index is None:
        return slice(None)
    if not 0 <= index < size:
        raise RestoreKVError(
            f"{name} must be a number from 0 to {size - 1}; leave it out for all of them."
        )
    return slice(index, index + 1)
