"""`python -m benchmarks device`: a GPU compared with the CPU, and what the GPU's own code paths
save.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_result, run_benchmark
from benchmarks.device import Options, format_tables
from benchmarks.device import run_device as measure
from restorekv.files import check_target


def run(
    device: Annotated[str, typer.Option(help="Device to compare with the CPU.")] = "cuda",
    texts: Annotated[int, typer.Option(min=1, help="Number of texts that both compress.")] = 4,
    tokens: Annotated[
        int,
        typer.Option(
            min=2, help="Length T of the text that the random model compresses, in tokens."
        ),
    ] = 32768,
    layers: Annotated[int, typer.Option(min=1, help="Number of layers; Qwen3-0.6B has 28.")] = 28,
    answer: Annotated[
        int, typer.Option(min=1, help="Length of the random model's answers, in tokens.")
    ] = 128,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(device=device, texts=texts, tokens=tokens, layers=layers, answer=answer)
    run_benchmark(
        lambda tell: measure(options, tell),
        lambda result: print_result(format_tables(result)),
        json,
    )
