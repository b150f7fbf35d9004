"""`restorekv report DIR`: one page of tables and charts from the results that a folder holds."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from restorekv.cli.session import output
from restorekv.evaluation.report.build import report


def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="What eval --out, analyze and efficiency wrote.")],
    out: Annotated[Path | None, typer.Option(help="Where the page goes; DIR/report unless given.")] = None,
) -> None:
    output.print(f"Wrote {escape(str(report(folder, out)))}", soft_wrap=True)
