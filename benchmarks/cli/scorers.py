"""`python -m benchmarks scorers`: what every method's scoring costs on this machine, compared with
the prefill.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_result, run_benchmark
from benchmarks.scorers import Options, format_table
from benchmarks.scorers import run_scorers as measure
from restorekv.files import check_target


def run(
    tokens: Annotated[int, typer.Option(help="Length T of the context, in tokens.")] = 4096,
    layers: Annotated[
        int, typer.Option(min=1, help="Number of layers; Qwen3-0.6B has 28, fewer are faster.")
    ] = 28,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Name of an evictor, or am-fast; repeatable. By default all."),
    ] = None,
    ratio: Annotated[float, typer.Option(help="Ratio for which am-fast fits its cache.")] = 0.05,
    threads: Annotated[
        int, typer.Option(min=0, help="Number of CPU threads; 0 leaves it to PyTorch.")
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(
        tokens=tokens,
        methods=tuple(method or ()),
        ratio=ratio,
        threads=threads,
        shape={"num_hidden_layers": layers},
    )
    run_benchmark(
        lambda tell: measure(options, tell), lambda result: print_result(format_table(result)), json
    )
