"""`restorekv compose a.rkv b.rkv -o both.rkv`: cache files that were made apart become one."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from restorekv.cli import options
from restorekv.cli.compress import summary
from restorekv.cli.session import figures_table, open_documents, output
from restorekv.compression.several import compose
from restorekv.files import check_target
from restorekv.seal import read_key


def run(
    files: Annotated[list[Path], typer.Argument(help="Cache files of one model, in the order of their texts.")],
    out: Annotated[Path, typer.Option("--output", "-o", help="The cache file to write.")],
    model: options.OtherModel = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    sign_key: options.SignKey = None,
) -> None:
    check_target(out)
    key = read_key(sign_key)
    whole = compose(open_documents(files, model, dtype, device, key))
    whole.save(out, key)
    output.print(figures_table(f"Wrote {escape(str(out))}", summary(whole, out)))
