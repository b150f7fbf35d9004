"""`python -m benchmarks book`: a book compressed at once and in parts, compared with
transformers.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import torch
import typer

from benchmarks.book import Options, make_table, run_book
from benchmarks.cli.session import print_all, run_benchmark
from restorekv.cli import options as flags
from restorekv.files import check_target

# typer wants lists as the defaults of repeatable options
RATIOS = ["1", "0.2", "0.1"]


def run(
    model: flags.Model = "gemma3-270m",
    tokens: Annotated[int, typer.Option(min=1000, help="Length of the book, in tokens.")] = 30_000,
    evictor: Annotated[str, typer.Option(help=flags.EVICTOR_HELP)] = "kvzip",
    ratio: Annotated[
        list[str], typer.Option(help="Share of the KV pairs to keep; repeatable.")
    ] = RATIOS,
    part: Annotated[int, typer.Option(min=64, help="Length of a part, in tokens.")] = 2048,
    answer: Annotated[int, typer.Option(min=1, help="Length of every answer, in tokens.")] = 14,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder for what was measured, with which a later run continues."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(model, tokens, evictor, tuple(ratio), part, answer)
    with TemporaryDirectory(prefix="restorekv-bench-") as name:
        place = folder or Path(name)
        run_benchmark(
            lambda tell: run_book(options, tell, torch.get_num_threads(), place),
            lambda result: print_all([make_table(result)]),
            json,
        )
