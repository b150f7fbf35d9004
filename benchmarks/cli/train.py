"""`python -m benchmarks train`: time and memory of one training step, phase by phase, on this
machine.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_result, run_benchmark
from benchmarks.training import Options, format_table
from benchmarks.training import run_training as measure
from restorekv.files import check_target


def run(
    tokens: Annotated[int, typer.Option(help="Length T of the context, in tokens.")] = 2048,
    layers: Annotated[
        int, typer.Option(min=1, help="Number of layers; Qwen3-0.6B has 28, fewer are faster.")
    ] = 28,
    questions: Annotated[int, typer.Option(help="Number of questions in the step.")] = 4,
    answer: Annotated[int, typer.Option(help="Length of every answer, in tokens.")] = 128,
    ratio: Annotated[float, typer.Option(help="Ratio of the step.")] = 0.1,
    threads: Annotated[
        int, typer.Option(min=0, help="Number of CPU threads; 0 leaves it to PyTorch.")
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(
        tokens, questions, answer, ratio, threads, shape={"num_hidden_layers": layers}
    )
    run_benchmark(
        lambda tell: measure(options, tell), lambda result: print_result(format_table(result)), json
    )
