"""`restorekv convert-gate SOURCE -o gate.safetensors --model NAME`: a published gate in the format of restorekv."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from restorekv.cli import options
from restorekv.cli.session import figures_table, open_model, output
from restorekv.evictors import gate_file
from restorekv.evictors.published_gate import FAST_KVZIP, convert
from restorekv.files import check_target


def run(
    source: Annotated[
        str, typer.Argument(help=f"A .pt file of Fast KVzip, a folder of KVzap, a hub id of KVzap, or {FAST_KVZIP}.")
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="The gate file to write.")],
    model: options.Model = "bundled",
    dtype: options.Dtype = "auto",
) -> None:
    check_target(out)
    loaded, _ = open_model(model, dtype)
    gate = convert(source, loaded)
    gate_file.write(out, gate)
    rows = {"kind": gate.card.kind, "predicts": gate.card.target, "model": gate.card.model}
    output.print(figures_table(f"Wrote {escape(str(out))}", rows))
