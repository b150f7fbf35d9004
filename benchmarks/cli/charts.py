"""`python -m benchmarks charts`: a chart of every result that a benchmark's --json wrote."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.charts import write_charts
from restorekv.cli.terminal import print_written
from restorekv.errors import RestoreKVError

RESULTS = Path("benchmarks/results")


def run(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help=f"JSON files of benchmarks; {RESULTS}/*.json by default."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the charts, an SVG of every file.")] = Path(
        "docs/charts"
    ),
    png: Annotated[bool, typer.Option("--png", help="Write a PNG of each, too.")] = False,
) -> None:
    given = files or sorted(RESULTS.glob("*.json"))
    if not given:
        raise RestoreKVError(
            f"There are no results in {RESULTS}; name files that a benchmark's --json wrote."
        )
    for path in write_charts(given, out, png):
        print_written(path)
