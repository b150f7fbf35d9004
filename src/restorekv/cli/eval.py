"""`restorekv eval`: evaluates evictors, with and without restoring, over a grid of models,
benchmarks and ratios.

`restorekv report` makes one page of tables and charts from the results.
"""

from pathlib import Path
from typing import Annotated

import typer

from restorekv.cli import options
from restorekv.cli.choices import (
    DTYPES,
    PROTOCOLS,
    check_benchmark,
    check_evictor,
    list_benchmarks,
)
from restorekv.cli.errors import explain_interrupt
from restorekv.cli.inputs import check_json_output, check_outputs_apart, find_files_in_specs
from restorekv.cli.terminal import notes, output, print_written, show_progress_share, write_figures
from restorekv.compression.budget import parse_ratio
from restorekv.compression.presets import resolve_preset
from restorekv.errors import RestoreKVError, check_choice, import_extra

BENCHMARK_HELP = (
    f"One of {', '.join(list_benchmarks())}; settings follow a colon: "
    "ruler:length=8192,tasks=vt+cwe. Repeatable."
)
DEFAULT_EVICTORS = ["kvzip", "kvzip+"]
DEFAULT_RATIOS = ["0.4", "0.2", "0.1", "0.05"]
DEFAULT_PROTOCOLS = ["kvpress"]
DEFAULT_KV_DTYPES = ["model"]
DEFAULT_MODELS = [options.DEFAULT_MODEL]


def run(
    benchmark: Annotated[list[str], typer.Option(help=BENCHMARK_HELP)],
    evictor: Annotated[
        list[str],
        typer.Option(
            help="EVICTOR or EVICTOR@ADAPTER (a folder, a hub id, published, auto or none). "
            f"{options.EVICTOR_HELP} Repeatable."
        ),
    ] = DEFAULT_EVICTORS,
    ratio: Annotated[
        list[str],
        typer.Option(help="Share of the KV pairs to keep, above 0 and at most 1; repeatable."),
    ] = DEFAULT_RATIOS,
    protocol: Annotated[
        list[str],
        typer.Option(help=f"Rules of the evaluation: {' or '.join(PROTOCOLS)}; repeatable."),
    ] = DEFAULT_PROTOCOLS,
    model: Annotated[
        list[str], typer.Option(help=f"Model: {options.MODEL_HELP} Repeatable.")
    ] = DEFAULT_MODELS,
    out: Annotated[
        Path,
        options.make_folder_option("Folder of the results; what is there is not computed again."),
    ] = Path("runs/eval"),
    set_aside: Annotated[
        bool,
        typer.Option(
            "--set-aside",
            help="Compute results again that were made with something else, such as an older "
            "evictor or a different adapter; the old ones move to set-aside/ in the folder.",
        ),
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Number of texts; by default as many as each benchmark has."),
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option(help="Seed that draws each benchmark's texts; repeatable.")
    ] = None,
    restore_tokens: options.RestoreTokens = None,
    prefix_policy: options.ScoredPrefixPolicy = "free",
    on_small_budget: options.ScoredOnSmallBudget = "fewer",
    allocation: options.Allocation = "global",
    restore_from: options.RestoreFrom = "full",
    offset: options.Offset = 0,
    kv_dtype: options.KvDtypes = DEFAULT_KV_DTYPES,
    streaming_chunk: options.StreamingChunk = None,
    max_context: Annotated[
        int,
        typer.Option(min=0, help="Tokens after which texts are cut; 0 is the tokenizer's limit."),
    ] = 0,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    ray: Annotated[
        str | None, typer.Option(help="Evaluate on a Ray cluster: local, auto or its address.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of Ray workers; {options.DEFAULT_WORKERS} by default."),
    ] = None,
    json: Annotated[
        Path | None,
        options.make_json_option("JSON file for scores, settings and every answer."),
    ] = None,
) -> None:
    specs = [resolve_preset(each.partition("@")[0]) for each in evictor]
    for each in specs:
        check_evictor(each)
    for each in benchmark:
        check_benchmark(each)
    for each in protocol:
        check_choice("--protocol", each, PROTOCOLS)
    for each in ratio:
        parse_ratio(each)
    check_choice("The dtype", dtype, DTYPES)
    options.refuse_workers_without_ray(workers, ray)
    if all(each.endswith("@none") for each in evictor):
        for flag, is_given in (
            ("--restore-tokens", restore_tokens is not None),
            ("--restore-from", restore_from != "full"),
        ):
            if is_given:
                raise RestoreKVError(
                    f"{flag} is for adapters, and no --evictor has one; drop an @none, or leave "
                    f"out {flag}."
                )
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; name a folder with --out.")
    check_outputs_apart([json], [*model, *find_files_in_specs([*benchmark, *specs])])
    check_json_output(json)

    # From here on PyTorch is imported.
    from restorekv.cli.loading import silence_transformers
    from restorekv.cli.pools import open_pool
    from restorekv.evaluation.frame import GridResults
    from restorekv.evaluation.grid import Grid, find_unrestored, parse_method
    from restorekv.evaluation.grid_tables import describe_cut_texts, make_tables
    from restorekv.evaluation.kvpress_layout import export_kvpress
    from restorekv.evaluation.rows import make_payload
    from restorekv.evaluation.run import check_cells, run_grid
    from restorekv.model.names import SHIPPING

    common = {
        "prefix_policy": None if prefix_policy == "protocol" else prefix_policy,
        "on_small_budget": on_small_budget,
        "allocation": allocation,
        "restore_from": restore_from,
        "offset": offset,
        "max_context": max_context,
        "dtype": dtype,
        "restore_tokens": restore_tokens,
        "streaming_chunk": streaming_chunk or 0,
    }
    methods = [parse_method(each) for each in evictor]
    cells = Grid(
        model, methods, benchmark, protocol, ratio, seed or (), count, kv_dtype, common
    ).list_cells()
    check_cells(cells)
    for name, spec in find_unrestored(cells, methods):
        hint = ""
        if name not in SHIPPING:
            hint = f"; if it is a copy of a model that has one, {spec}@auto takes that"
        notes.print(
            f"No adapter for {spec} ships for {name}, so it is scored without restoring{hint}.",
            highlight=False,
            soft_wrap=True,
        )
    silence_transformers()
    with (
        show_progress_share("evaluating") as update,
        open_pool(ray, workers or options.DEFAULT_WORKERS, device) as pool,
        explain_interrupt(f"the same command continues what is in {out}"),
    ):
        results = run_grid(
            cells, out, pool, lambda progress: update(progress.what, progress.share), set_aside
        )
    if json:
        write_figures(json, make_payload(results))
    for table in make_tables(GridResults(results)):
        output.print(table)
    for note in describe_cut_texts(results):
        notes.print(note, highlight=False)
    export_kvpress(out)
    notes.print(
        f"{out}: {len(results)} cells; to make a page of them: restorekv report {out}",
        highlight=False,
    )


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that eval --out wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the page; DIR/report by default.")
    ] = None,
) -> None:
    if not folder.is_dir():
        raise RestoreKVError(
            f"There is no folder {folder}; give one that `restorekv eval --out` wrote."
        )
    module = import_extra("restorekv.evaluation.report", "eval")
    print_written(module.write_report(folder, out))
