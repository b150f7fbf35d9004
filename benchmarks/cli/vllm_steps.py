"""`.venv-vllm/bin/python -m benchmarks vllm-steps`: decode steps of vLLM with documents, without
documents, and without the plugin, compared in one run.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.vllm_steps import StepOptions, make_tables, run_steps
from restorekv.files import check_target


def run(
    folder: Annotated[Path, typer.Option(help="Folder for the model and the documents.")],
    model: Annotated[str, typer.Option(help="Small decoder: smollm2 or a folder.")] = "smollm2",
    tokens: Annotated[int, typer.Option(help="Length of every document, in tokens.")] = 4096,
    documents: Annotated[int, typer.Option(min=1, help="Number of requests in a batch.")] = 8,
    ratio: Annotated[str, typer.Option(help="Ratio of the documents.")] = "0.1",
    evictor: Annotated[str, typer.Option(help="Evictor of the documents.")] = "snapkv",
    answer: Annotated[int, typer.Option(min=3, help="Length of every answer, in tokens.")] = 24,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of times that each side is measured.")
    ] = 12,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = StepOptions(model, tokens, documents, ratio, evictor, answer, rounds)
    run_benchmark(
        lambda tell: run_steps(folder, options, tell),
        lambda result: print_all(make_tables(result)),
        json,
    )
