"""`python -m benchmarks memory`: memory and time of every phase of a compression and how they grow
with the text, measured on this machine or computed on paper.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.compare import lengths
from benchmarks.cli.session import print_result, run_benchmark
from benchmarks.memory import MODES, Options
from benchmarks.memory import run_memory as measure
from benchmarks.memory_on_paper import format_table
from benchmarks.memory_table import format_tables
from restorekv.files import check_target


def run(
    tokens: Annotated[
        str, typer.Option(help="Context lengths T in tokens, separated by commas.")
    ] = "2048,4096,8192,16384,32768",
    layers: Annotated[int, typer.Option(min=1, help="Number of layers; Qwen3-0.6B has 28.")] = 4,
    mode: Annotated[
        list[str] | None,
        typer.Option(help=f"How to compress: {', '.join(MODES)}; repeatable. By default all."),
    ] = None,
    evictor: Annotated[str, typer.Option(help="Evictor that scores.")] = "kvzip",
    ratio: Annotated[
        str, typer.Option(help="Share of the KV pairs to keep, above 0 and at most 1.")
    ] = "0.05",
    filled: Annotated[
        bool,
        typer.Option(
            "--filled", help="Fill the cache with random numbers instead of reading a text."
        ),
    ] = False,
    part: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens that streaming reads at a time; 0 takes 2,048, or half of the smallest "
            "T if that is less.",
        ),
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure less: 512, 1,024 and 2,048 tokens, one layer.")
    ] = False,
    on_paper: Annotated[
        bool, typer.Option("--on-paper", help="Only compute what larger models would need.")
    ] = False,
    threads: Annotated[
        int, typer.Option(min=0, help="Number of CPU threads; 0 leaves it to PyTorch.")
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    if on_paper:
        print_result(format_table())
        return
    modes = tuple(mode or ())
    if not modes:
        modes = tuple(each for each in MODES if not (filled and each == "streaming"))
    options = Options(
        tokens=[512, 1024, 2048] if quick else lengths(tokens),
        modes=modes,
        evictor=evictor,
        ratio=ratio,
        filled=filled,
        part=part,
        threads=threads,
        shape={"num_hidden_layers": 1 if quick else layers},
    )
    run_benchmark(
        lambda tell: measure(options, tell),
        lambda result: print_result(format_tables(result)),
        json,
    )
