"""`python -m benchmarks serving`: answers a minute of our server and of transformers' own."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import run_benchmark, run_each
from benchmarks.serving import Options, make_tables
from benchmarks.serving import run_serving as measure
from restorekv.cli import options as flags
from restorekv.files import check_target


def run(
    model: flags.Model = "smollm2",
    tokens: Annotated[int, typer.Option(help="Length of the document.")] = 2048,
    questions: Annotated[int, typer.Option(min=1, help="Questions in all.")] = 32,
    clients: Annotated[int, typer.Option(min=1, help="Clients that ask at once.")] = 8,
    preset: Annotated[str, typer.Option(help="How the document is compressed.")] = "fast",
    ratio: Annotated[str, typer.Option(help="Share of the KV pairs to hold.")] = "0.1",
    answer: Annotated[int, typer.Option(help="Tokens of every answer at most.")] = 16,
    json: Annotated[Path | None, typer.Option(help="Write the figures here, for programs.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(model, tokens, questions, clients, preset, ratio, answer)
    run_benchmark(
        lambda tell: measure(options, tell), lambda result: run_each(make_tables(result)), json
    )
