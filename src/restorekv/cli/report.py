"""`restorekv report DIR`: makes one page of tables and charts from the results in a folder."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from restorekv.cli.session import output
from restorekv.evaluation.report.build import report


def run(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that eval --out or analyze --out wrote.")],
    out: Annotated[Path | None, typer.Option(help="The folder of the page; DIR/report unless given.")] = None,
) -> None:
    output.print(f"Wrote {escape(str(report(folder, out)))}", soft_wrap=True)
