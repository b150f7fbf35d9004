"""`python -m benchmarks scorers`: what every method's scoring costs beside the prefill, on this
machine.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_result, run_benchmark
from benchmarks.scorers import Options, format_table
from benchmarks.scorers import run_scorers as measure
from restorekv.files import check_target


def run(
    tokens: Annotated[int, typer.Option(help="Context length T.")] = 4096,
    layers: Annotated[
        int, typer.Option(min=1, help="Fewer make a quick look; Qwen3-0.6B has 28.")
    ] = 28,
    method: Annotated[
        list[str] | None,
        typer.Option(help="An evictor's name or am-fast; repeatable; all unless given."),
    ] = None,
    ratio: Annotated[float, typer.Option(help="The ratio that am-fast fits its cache for.")] = 0.05,
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's own choice.")
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the figures here, for programs.")] = None,
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
