"""`python -m benchmarks compare`: compressing and answering on this machine, compared with kvpress
0.5.5.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.compare import Options
from benchmarks.compare import run_comparison as measure
from benchmarks.compare_table import make_tables
from restorekv.errors import RestoreKVError
from restorekv.files import check_target

KVPRESS = Path(".venv-kvpress/bin/python")  # made by `make bench`
KvpressPython = Annotated[
    Path | None,
    typer.Option(
        help=f"Python of an environment with kvpress; by default {KVPRESS}, if it is there."
    ),
]


def run(
    tokens: Annotated[
        str, typer.Option(help="Context lengths T in tokens, separated by commas.")
    ] = "2048,4096",
    ratio: Annotated[
        str, typer.Option(help="Share of the KV pairs to keep, above 0 and at most 1.")
    ] = "0.05",
    layers: Annotated[
        int, typer.Option(min=1, help="Number of layers; Qwen3-0.6B has 28, fewer are faster.")
    ] = 28,
    repeat: Annotated[
        int, typer.Option(min=1, help="Measurements of every side and T; medians are shown.")
    ] = 1,
    threads: Annotated[
        int,
        typer.Option(min=0, help="Number of CPU threads of both sides; 0 leaves it to PyTorch."),
    ] = 0,
    kvpress_python: KvpressPython = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    options = Options(
        tokens=lengths(tokens),
        ratio=ratio,
        repeat=repeat,
        threads=threads,
        kvpress_python=kvpress(kvpress_python),
        shape={"num_hidden_layers": layers},
    )
    run_benchmark(
        lambda tell: measure(options, tell), lambda result: print_all(make_tables(result)), json
    )


def kvpress(given: Path | None) -> Path | None:
    """Return the Python with kvpress: the one given, or the one that `make bench` made, or None."""
    found = given or (KVPRESS if KVPRESS.exists() else None)
    return found and found.absolute()


def lengths(given: str) -> list[int]:
    """Parse "2048,4096" to [2048, 4096], sorted and without duplicates."""
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise RestoreKVError(
            f"--tokens takes whole numbers with commas between them, not {given!r}."
        )
    return sorted({int(part) for part in parts})
