"""`python -m benchmarks decode`: what a decode step and many answers cost over a compressed cache,
on this machine.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.compare import KvpressPython, kvpress
from benchmarks.cli.session import run_benchmark, run_each
from benchmarks.decode import Options
from benchmarks.decode import run_decode as measure
from benchmarks.decode_table import make_tables
from restorekv.files import check_target


def run(
    tokens: Annotated[int, typer.Option(help="Context length T of steps.")] = 32768,
    ratio: Annotated[
        list[float] | None, typer.Option(help="Repeatable; 1, 0.4, 0.2, 0.1 and 0.05 unless given.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Rounds, of which medians are told.")] = 5,
    questions: Annotated[
        int, typer.Option(help="Questions asked of one document; 0 leaves this out.")
    ] = 16,
    document: Annotated[int, typer.Option(help="Tokens of that document.")] = 4096,
    layers: Annotated[
        int, typer.Option(min=1, help="Qwen3-0.6B has 28; fewer need less memory.")
    ] = 28,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's own choice.")
    ] = 0,
    kvpress_python: KvpressPython = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="4 layers, 4,096 and 512 tokens, r = 1 and 0.05.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the figures here, for programs.")] = None,
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
        lambda tell: measure(options, tell), lambda result: run_each(make_tables(result)), json
    )
