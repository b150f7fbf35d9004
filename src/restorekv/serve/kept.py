"""Which tokens of a document survive its compression, for the page."""

from __future__ import annotations

from functools import lru_cache

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError

LONGEST = 8  # tokens that one character may take


def shares(context: CompressedContext, layer: int | None, head: int | None) -> dict:
    """Returns the text in pieces, each with the share of heads that hold it, and what the cache
    holds.

    `layer` and `head` count those heads alone; None is all of them.
    """
    kept = context.kept
    manifest = context.manifest
    start = context.context.prefix
    layers, heads, columns = kept.shape
    chosen = kept[within("layer", layer, layers), within("head", head, heads), start:]
    shares = chosen.float().mean((0, 1))
    pieces = pieces_of(context.tokenizer, tuple(context.context.ids[0, start:].tolist()))
    edges = [0]
    for _, tokens in pieces:
        edges.append(edges[-1] + tokens)
    spans = zip(pieces, edges[:-1], edges[1:], strict=True)
    return {
        "layers": layers,
        "heads": heads,
        "tokens": manifest.tokens,
        "surviving": int((shares > 0).sum()),
        "restore_tokens": manifest.restore_tokens,
        "evictor": manifest.evictor,
        "seconds": manifest.seconds,
        "pairs": {"before": layers * heads * columns, "after": manifest.pairs_held},
        "bytes": {"before": manifest.bytes_full, "after": manifest.bytes_held},
        "pieces": [
            [text, round(float(shares[first:last].mean()), 4)] for (text, _), first, last in spans
        ],
    }


def within(name: str, index: int | None, size: int) -> slice:
    """Returns the slice of one layer or head, or of all."""
    if index is not None and not 0 <= index < size:
        raise RestoreKVError(
            f"{name} is a number from 0 to {size - 1}; leave it out for all of them."
        )
    return slice(None) if index is None else slice(index, index + 1)


@lru_cache(maxsize=8)
def pieces_of(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[tuple[str, int]]:
    """Returns the text of each token, and of several where only together they make whole
    characters.
    """
    pieces: list[tuple[str, int]] = []
    # decoding from an earlier token keeps the space between words
    before = 0
    start = 0
    for end in range(1, len(ids) + 1):
        known = tokenizer.decode(ids[before:start])
        text = tokenizer.decode(ids[before:end])
        if text.endswith("\ufffd") and end - start < LONGEST and end < len(ids):
            continue
        whole = text.startswith(known)  # a tokenizer that cleans spaces may change it
        pieces.append(
            (text[len(known) :] if whole else tokenizer.decode(ids[start:end]), end - start)
        )
        before = start
        start = end
    return pieces
