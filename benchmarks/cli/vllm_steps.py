"""`.venv-vllm/bin/python -m benchmarks vllm-steps`: decode steps of vLLM with documents, without,
and without the plugin, side by side.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import run_benchmark, run_each
from benchmarks.vllm_steps import StepOptions, make_tables, run_steps
from restorekv.files import check_target


def run(
    folder: Annotated[Path, typer.Option(help="Keeps model and documents.")],
    model: Annotated[str, typer.Option(help="A small decoder: smollm2, a folder.")] = "smollm2",
    tokens: Annotated[int, typer.Option(help="Length of every document.")] = 4096,
    documents: Annotated[int, typer.Option(min=1, help="Requests of a batch.")] = 8,
    ratio: Annotated[str, typer.Option(help="Of the documents.")] = "0.1",
    evictor: Annotated[str, typer.Option(help="Of the documents.")] = "snapkv",
    answer: Annotated[int, typer.Option(min=3, help="Tokens of every answer.")] = 24,
    rounds: Annotated[int, typer.Option(min=1, help="How often each side is measured.")] = 12,
    json: Annotated[Path | None, typer.Option(help="Write the figures here, for programs.")] = None,
) -> None:
    if json:
        check_target(json)
    options = StepOptions(model, tokens, documents, ratio, evictor, answer, rounds)
    run_benchmark(
        lambda tell: run_steps(folder, options, tell),
        lambda result: run_each(make_tables(result)),
        json,
    )
