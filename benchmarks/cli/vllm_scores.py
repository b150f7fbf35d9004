"""`.venv-vllm/bin/python -m benchmarks vllm-scores`: a benchmark's scores by `ask`, and by vLLM
through HTTP.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.vllm_scores import make_tables, run_scores
from restorekv.compression.budget import parse_ratio
from restorekv.files import check_target
from restorekv.tasks import make_benchmark


def run(
    folder: Annotated[Path, typer.Option(help="Folder for cache files and answers.")],
    benchmark: Annotated[
        str, typer.Option(help="Benchmark, with its settings.")
    ] = "ruler:length=1024,per_task=5",
    ratio: Annotated[
        list[str] | None, typer.Option(help="Ratio; repeatable. By default 0.1 and 0.05.")
    ] = None,
    evictor: Annotated[str, typer.Option(help="Evictor or preset.")] = "best",
    model: Annotated[str, typer.Option(help="Small decoder: smollm2 or a folder.")] = "smollm2",
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    ratios = ratio or ["0.1", "0.05"]
    # Check the options before a model is loaded.
    for each in ratios:
        parse_ratio(each)
    make_benchmark(benchmark)
    if json:
        check_target(json)
    run_benchmark(
        lambda tell: run_scores(folder, model, benchmark, ratios, evictor, tell),
        lambda result: print_all(make_tables(result)),
        json,
    )
