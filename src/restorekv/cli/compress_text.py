"""Compress one text into a cache file, and say what a new cache file holds."""

import time
from fractions import Fraction
from pathlib import Path

from restorekv.cli.document_compressor import CompressionRecipe
from restorekv.cli.loading import describe_method, open_model
from restorekv.cli.terminal import print_figures, show_progress_share, write_figures
from restorekv.context import CompressedContext, describe_bytes, format_bytes
from restorekv.pipeline import compress

# Why "auto" takes no adapter.
NO_ADAPTER = "no adapter ships that helps this model and evictor at this ratio"


def compress_text(text: str, out: Path, recipe: CompressionRecipe, json: Path | None) -> None:
    """Compress one text into a cache file, and print and write figures about it.

    Args:
        text: The text.
        out: The cache file.
        recipe: The model, and how it compresses.
        json: A file for the figures, or None.
    """
    model, tokenizer = open_model(recipe.model, recipe.dtype, recipe.device, recipe.yarn)
    start = time.perf_counter()
    with show_progress_share("compressing", lines=False) as show:
        compressed = compress(
            model, tokenizer, text, config=recipe.config, progress=show, **recipe.get_options()
        )
        seconds = time.perf_counter() - start
        show("saving", 1.0)
        compressed.save(out)
    if json:
        sizes = {"file": str(out), "file_bytes": out.stat().st_size}
        write_figures(json, {**sizes, **compressed.manifest.to_json()})
    figures = summarize_cache(compressed, out, seconds)
    if recipe.adapter == "auto" and _should_explain_no_adapter(compressed):
        figures["method"] += f" ({NO_ADAPTER})"
    print_figures(f"Wrote {out}", figures)


def _should_explain_no_adapter(compressed: CompressedContext) -> bool:
    """Return whether the method can restore, and the cache lost pairs but nothing was restored."""
    m = compressed.manifest
    can_restore = compressed.compressor is not None and compressed.compressor.restores
    return can_restore and m.adapter is None and not m.offset and Fraction(m.ratio) < 1


def summarize_cache(
    compressed: CompressedContext, out: Path, seconds: float | None = None
) -> dict[str, str]:
    """Return figures about a new cache file, as text for `print_figures`.

    Args:
        compressed: The cache.
        out: Its file.
        seconds: How long it took to make; None takes the sum of its phases.
    """
    m = compressed.manifest
    if seconds is None:
        seconds = sum(m.seconds.values())
    full = (m.prefix + m.tokens) * m.shape["layers"] * m.shape["heads"]
    context = f"T = {m.tokens:,} tokens, chat prefix S = {m.prefix:,} ({m.prefix_policy})"
    if m.cut:
        context += f", {m.cut:,} tokens were cut"
    phases = ", ".join(f"{name} {value:.2f}" for name, value in m.seconds.items())
    return {
        "context": context,
        "method": describe_method(m),
        "budget": f"r = {float(Fraction(m.ratio)):g}: {m.pairs:,} KV pairs",
        "held": f"{m.pairs_held:,} of {full:,} pairs with the prefix ({m.pairs_held / full:.1%})",
        "bytes": f"{describe_bytes(m.bytes_held, m.bytes_full)}; "
        f"file {format_bytes(out.stat().st_size)}",
        "seconds": f"{seconds:.2f} ({phases})",
    }
