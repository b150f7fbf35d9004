"""`python -m benchmarks serving`: answers a minute of our server and of `transformers serve`."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.serving import Options, make_tables
from benchmarks.serving import run_serving as measure
from restorekv.cli import options as flags
from restorekv.files import check_target


def run(
    model: flags.Model = "smollm2",
    tokens: Annotated[int, typer.Option(help="Length of the document, in tokens.")] = 2048,
    questions: Annotated[int, typer.Option(min=1, help="Number of questions in all.")] = 32,
    clients: Annotated[
        int, typer.Option(min=1, help="Number of clients that ask at the same time.")
    ] = 8,
    preset: Annotated[
        str, typer.Option(help="Preset that compresses the document: fast or best.")
    ] = "fast",
    ratio: Annotated[str, typer.Option(help="Share of the KV pairs to keep.")] = "0.1",
    answer: Annotated[int, typer.Option(help="Maximum length of every answer, in tokens.")] = 16,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(model, tokens, questions, clients, preset, ratio, answer)
    run_benchmark(
        lambda tell: measure(options, tell), lambda result: print_all(make_tables(result)), json
    )
