"""`restorekv compress FILE -o doc.rkv`: text in, cache file out; a folder gives a folder."""

import time
from fractions import Fraction
from pathlib import Path
from typing import Annotated, cast

import typer

from restorekv.cli import options
from restorekv.cli.folder import CompressionRecipe, compress_folder
from restorekv.cli.session import (
    check_outputs_apart,
    describe_method,
    notes,
    open_model,
    print_figures,
    read_text,
)
from restorekv.compression.budget import OnSmallBudget, PrefixPolicy, parse_ratio
from restorekv.compression.config import CompressionConfig, RestoreFrom
from restorekv.compression.eviction import make_compressor
from restorekv.context import CompressedContext, format_bytes
from restorekv.errors import BudgetError, RestoreKVError
from restorekv.files import check_target, write_json
from restorekv.pipeline import choose_evictor, compress


def run(
    file: Annotated[
        str,
        typer.Argument(help="A text, HTML, PDF or DOCX file, - for stdin, or a folder of such."),
    ],
    out: Annotated[
        Path,
        typer.Option("--output", "-o", help="The cache file to write, or for a folder, a folder."),
    ],
    ratio: Annotated[
        str | None, typer.Option(help="Share of the KV pairs to hold, in (0, 1]; 0.1 unless given.")
    ] = None,
    tokens_per_head: Annotated[
        int | None, typer.Option(help="Instead of a ratio: pairs per head, on average.")
    ] = None,
    preset: options.Preset = None,
    evictor: options.Evictor = None,
    adapter: options.Adapter = "auto",
    restore_tokens: options.RestoreTokens = None,
    system: options.System = "",
    model: options.Model = "tiny",
    prefix_policy: options.PrefixPolicy = "free",
    on_small_budget: options.OnSmallBudget = "error",
    allocation: options.Allocation = "global",
    restore_from: options.RestoreFrom = "full",
    offset: options.Offset = 0,
    storage: options.Storage = "model",
    streaming: options.Streaming = None,
    offload: options.Offload = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    max_context: options.MaxContext = "refuse",
    yarn: options.Yarn = None,
    json: Annotated[
        Path | None, options.make_output_option("Write the figures here, for programs.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Spread a folder over Ray: local, auto or an address.")
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="With --ray, how many documents at once.")
    ] = 2,
) -> None:
    # What the options alone rule out is refused here, before a model is loaded.
    if ratio is not None and tokens_per_head is not None:
        raise BudgetError("Give either --ratio or --tokens-per-head, not both.")
    if ratio is not None:
        parse_ratio(ratio)
    evictor = choose_evictor(evictor, preset)
    config = CompressionConfig(
        # `CompressionConfig` refuses other words than its own with a sentence.
        prefix_policy=cast("PrefixPolicy", prefix_policy),
        on_small_budget=cast("OnSmallBudget", on_small_budget),
        allocation=allocation,
        restore_from=cast("RestoreFrom", restore_from),
        offset=offset,
        streaming=streaming,
        offload=offload,
        restore_tokens=restore_tokens,
        storage=storage,
        system=system,
        max_context=max_context,
    )
    make_compressor(evictor, config)

    recipe = CompressionRecipe(
        model=model,
        dtype=dtype,
        device=device,
        yarn=yarn,
        options={
            "evictor": evictor,
            "ratio": ratio,
            "tokens_per_head": tokens_per_head,
            "adapter": None if adapter == "none" else adapter,
        },
        config=config,
    )
    if file != "-" and Path(file).is_dir():
        compress_folder(Path(file), out, recipe, ray, workers, json)
        return
    if ray:
        raise RestoreKVError("--ray spreads the documents of a folder; leave it out for one text.")
    check_target(out)
    check_outputs_apart((out, json), (file, model))
    _compress_file(file, out, recipe, json)


def _compress_file(file: str, out: Path, recipe: CompressionRecipe, json: Path | None) -> None:
    """Compress one text."""
    text = read_text(file)
    model, tokenizer = open_model(recipe.model, recipe.dtype, recipe.device, recipe.yarn)
    start = time.perf_counter()
    with notes.status("compressing") as status:
        compressed = compress(
            model,
            tokenizer,
            text,
            config=recipe.config,
            progress=status.update,
            **recipe.options,
        )
        seconds = time.perf_counter() - start
        status.update("saving")
        compressed.save(out)
    if json:
        sizes = {"file": str(out), "file_bytes": out.stat().st_size}
        write_json(json, {**sizes, **compressed.manifest.to_json()})
    print_figures(f"Wrote {out}", summarize_cache(compressed, out, seconds))


def summarize_cache(
    compressed: CompressedContext, out: Path, seconds: float | None = None
) -> dict[str, str]:
    """Return what a person wants to know about a new cache file.

    Args:
        compressed: the cache.
        out: its file.
        seconds: how long it took; unless given, the sum of its phases.
    """
    m = compressed.manifest
    if seconds is None:
        seconds = sum(m.seconds.values())
    full = (m.prefix + m.tokens) * m.shape["layers"] * m.shape["heads"]
    context = f"T = {m.tokens:,} tokens, chat prefix S = {m.prefix:,} ({m.prefix_policy})"
    if m.cut:
        context += f", {m.cut:,} tokens were cut"
    share = f"{m.bytes_held / m.bytes_full:.1%}"
    phases = ", ".join(f"{name} {value:.2f}" for name, value in m.seconds.items())
    return {
        "context": context,
        "method": describe_method(m),
        "budget": f"r = {float(Fraction(m.ratio)):g}: {m.pairs:,} KV pairs",
        "held": f"{m.pairs_held:,} of {full:,} pairs with the prefix ({m.pairs_held / full:.1%})",
        "bytes": f"{format_bytes(m.bytes_held)} of {format_bytes(m.bytes_full)} ({share}); "
        f"file {format_bytes(out.stat().st_size)}",
        "seconds": f"{seconds:.2f} ({phases})",
    }
