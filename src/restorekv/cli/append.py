"""`restorekv append doc.rkv TEXT -o longer.rkv`: a cache file grows by a text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from restorekv.cli import options
from restorekv.cli.compress import summary
from restorekv.cli.session import figures_table, notes, open_documents, output, read_text
from restorekv.compression.growing import RESTORE
from restorekv.compression.prepared import one_of
from restorekv.files import check_target
from restorekv.seal import read_key


def run(
    file: Annotated[Path, typer.Argument(help="A cache file made by compress; it stays as it is.")],
    text: Annotated[str, typer.Argument(help="A UTF-8 text to put behind it, or - for stdin.")],
    out: Annotated[Path, typer.Option("--output", "-o", help="The cache file to write.")],
    restore: Annotated[
        str, typer.Option(help="Restore tokens of earlier parts: last (replaced), every (kept as pairs) or none.")
    ] = "last",
    adapter: options.Adapter = "auto",
    model: options.OtherModel = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    sign_key: options.SignKey = None,
) -> None:
    one_of("--restore", restore, RESTORE)
    check_target(out)
    key, added = read_key(sign_key), read_text(text)
    (document,) = open_documents([file], model, dtype, device, key)
    with notes.status("appending"):
        grown = document.append(added, restore=restore, adapter=None if adapter == "none" else adapter)
        grown.save(out, key)
    output.print(figures_table(f"Wrote {escape(str(out))}", summary(grown, out)))
