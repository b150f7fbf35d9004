"""`python -m benchmarks kernel`: what attention over a compressed cache costs in one decode step on
this GPU.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_result, run_benchmark
from benchmarks.kernel import REHEARSAL, Options, format_table
from benchmarks.kernel import run_kernel as measure
from restorekv.files import check_target


def run(
    tokens: Annotated[int, typer.Option(help="Length T of the context, in tokens.")] = 32768,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Ratio; repeatable. By default 1, 0.4, 0.2, 0.1 and 0.05."),
    ] = None,
    questions: Annotated[
        int, typer.Option(help="Number of questions that are answered together.")
    ] = 1,
    tail: Annotated[
        int, typer.Option(help="Pairs of restore tokens, question and answer so far.")
    ] = 64,
    layers: Annotated[
        int, typer.Option(help="Number of layers; Llama-3.1-8B has 32, fewer need less memory.")
    ] = 32,
    repeat: Annotated[int, typer.Option(help="Number of replays; the median is shown.")] = 50,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Run a tiny shape on the CPU in Triton's interpreter, without figures.",
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(tokens=tokens, questions=questions, tail=tail, layers=layers, repeat=repeat)
    options = replace(options, ratios=tuple(ratio)) if ratio else options
    options = REHEARSAL if rehearse else options
    run_benchmark(
        lambda tell: measure(options, tell, rehearse),
        lambda result: print_result(format_table(result)),
        json,
    )
