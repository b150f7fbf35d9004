"""`python -m benchmarks decode`: what a decode step and many answers cost over a compressed cache,
on this machine.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.compare import KvpressPython, kvpress
from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.decode import Options
from benchmarks.decode import run_decode as measure
from benchmarks.decode_table import make_tables
from restorekv.files import check_target


def run(
    tokens: Annotated[
        int, typer.Option(help="Length T of the context of decode steps, in tokens.")
    ] = 32768,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Ratio; repeatable. By default 1, 0.4, 0.2, 0.1 and 0.05."),
    ] = None,
    repeat: Annotated[int, typer.Option(help="Rounds; medians are shown.")] = 5,
    questions: Annotated[
        int, typer.Option(help="Questions asked about one document; 0 leaves this out.")
    ] = 16,
    document: Annotated[int, typer.Option(help="Length of that document, in tokens.")] = 4096,
    layers: Annotated[
        int,
        typer.Option(min=1, help="Number of layers; Qwen3-0.6B has 28, fewer need less memory."),
    ] = 28,
    threads: Annotated[
        int, typer.Option(min=0, help="Number of CPU threads; 0 leaves it to PyTorch.")
    ] = 0,
    kvpress_python: KvpressPython = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Measure less: 4 layers, 4,096 and 512 tokens, r = 1 and 0.05."
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    ratios = tuple(ratio or Options.ratios)
    if quick:
        tokens = 4096
        document = 512
        layers = 4
        ratios = (1, 0.05)
    options = Options(
        tokens,
        ratios,
        repeat,
        questions,
        document,
        threads=threads,
        kvpress_python=kvpress(kvpress_python),
        shape={"num_hidden_layers": layers},
    )
    run_benchmark(
        lambda tell: measure(options, tell), lambda result: print_all(make_tables(result)), json
    )
