"""`restorekv compress FILE -o doc.rkv`: text in, cache file out; a folder gives a folder."""

from pathlib import Path
from typing import Annotated, cast

import typer

from restorekv.cli import options
from restorekv.cli.choices import DTYPES, check_evictor
from restorekv.cli.inputs import (
    check_json_output,
    check_output_kind,
    check_outputs_apart,
    read_text,
)
from restorekv.compression.budget import OnSmallBudget, PrefixPolicy, parse_ratio
from restorekv.compression.presets import choose_evictor
from restorekv.errors import BudgetError, RestoreKVError, check_choice
from restorekv.files import check_target
from restorekv.restore.choices import RestoreFrom


def run(
    file: Annotated[
        str,
        options.make_text_argument(
            "Text, HTML, PDF, DOCX or EPUB file, a folder of them, or - for stdin."
        ),
    ],
    out: Annotated[
        Path,
        options.make_folder_option(
            "Cache file to write; for a folder of texts, a folder.", "--output", "-o"
        ),
    ],
    ratio: Annotated[
        str | None,
        typer.Option(help="Share of the KV pairs to keep, above 0 and at most 1; 0.1 by default."),
    ] = None,
    tokens_per_head: Annotated[
        int | None, typer.Option(help="Instead of --ratio: pairs to keep per head, on average.")
    ] = None,
    preset: options.Preset = None,
    evictor: options.Evictor = None,
    adapter: options.Adapter = "auto",
    restore_tokens: options.RestoreTokens = None,
    system: options.System = "",
    model: options.Model = options.DEFAULT_MODEL,
    prefix_policy: options.PrefixPolicy = "free",
    on_small_budget: options.OnSmallBudget = "whole",
    allocation: options.Allocation = "global",
    restore_from: options.RestoreFrom = "full",
    offset: options.Offset = 0,
    kv_dtype: options.KvDtype = "model",
    streaming_chunk: options.StreamingChunk = None,
    offload: options.Offload = False,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    on_long_text: options.OnLongText = "refuse",
    yarn: options.Yarn = None,
    json: Annotated[Path | None, options.make_json_option("JSON file for the figures.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Compress a folder on a Ray cluster: local, auto or its address."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Documents that --ray compresses at the same time; "
            f"{options.DEFAULT_WORKERS} by default.",
        ),
    ] = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace", help="In a folder, replace cache files that other settings made."
        ),
    ] = False,
) -> None:
    # Check the options before PyTorch is imported and a model is loaded, which takes long.
    if ratio is not None and tokens_per_head is not None:
        raise BudgetError("Give either --ratio or --tokens-per-head, not both.")
    if ratio is not None:
        parse_ratio(ratio)
    evictor = choose_evictor(evictor, preset)
    check_evictor(evictor)
    check_choice("The dtype", dtype, DTYPES)
    options.refuse_workers_without_ray(workers, ray)
    text = ""
    is_folder = file != "-" and Path(file).is_dir()
    if not is_folder:
        if ray:
            raise RestoreKVError(
                "--ray needs a folder of documents; leave it out for a single text."
            )
        if replace:
            raise RestoreKVError(
                "--replace is for a folder of documents; the cache file of a single text is "
                "replaced in any case."
            )
        check_target(out)
        check_outputs_apart((out, json), (file, model))
        check_output_kind(out, "restorekv-cache")
        check_json_output(json)
        text = read_text(file)

    # These imports load PyTorch; the checks above must not need it.
    from restorekv.cli.compress_text import compress_text
    from restorekv.cli.document_compressor import CompressionRecipe
    from restorekv.cli.folder import compress_folder
    from restorekv.compression.config import CompressionConfig
    from restorekv.compression.eviction import make_compressor

    config = CompressionConfig(
        # `CompressionConfig` checks these words itself.
        prefix_policy=cast("PrefixPolicy", prefix_policy),
        on_small_budget=cast("OnSmallBudget", on_small_budget),
        allocation=allocation,
        restore_from=cast("RestoreFrom", restore_from),
        offset=offset,
        streaming_chunk=streaming_chunk,
        offload=offload,
        restore_tokens=restore_tokens,
        kv_dtype=kv_dtype,
        system=system,
        on_long_text=on_long_text,
    )
    # Refuses a bad combination before the model is loaded; the workers make compressors themselves.
    make_compressor(evictor, config)

    recipe = CompressionRecipe(
        model=model,
        dtype=dtype,
        device=device,
        yarn=yarn,
        evictor=evictor,
        ratio=ratio,
        tokens_per_head=tokens_per_head,
        adapter=None if adapter == "none" else adapter,
        config=config,
    )
    if is_folder:
        workers = workers or options.DEFAULT_WORKERS
        compress_folder(Path(file), out, recipe, ray, workers, json, replace)
    else:
        compress_text(text, out, recipe, json)
