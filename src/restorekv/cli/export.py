"""`restorekv export doc.rkv -o doc.portable.safetensors`: a cache that other engines take as an ordinary prefix."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from restorekv.cli import options
from restorekv.cli.session import figures_table, open_model, output, yarn_of
from restorekv.compression.context import CompressedContext, size
from restorekv.compression.context_file import read
from restorekv.files import check_target
from restorekv.seal import read_key


def run(
    file: Annotated[Path, typer.Argument(help="A cache file made by compress with --allocation per-head.")],
    out: Annotated[Path, typer.Option("--output", "-o", help="The portable file to write.")],
    model: options.OtherModel = None,
    sign_key: options.SignKey = None,
) -> None:
    check_target(out)
    key = read_key(sign_key)
    stored = read(file, key)
    loaded, tokenizer = open_model(
        model or stored.manifest.model, stored.manifest.dtype, rope=yarn_of(stored.manifest.rope)
    )
    portable = CompressedContext.load(stored, loaded, tokenizer).portable()
    portable.save(out, key)
    facts = {
        "document": f"{portable.name}, T = {portable.manifest.tokens:,} tokens",
        "prefix": f"m = {portable.tokens:,} positions, {portable.manifest.dtype}",
        "bytes": size(portable.keys.nbytes + portable.values.nbytes),
    }
    output.print(figures_table(f"Wrote {escape(str(out))}", facts))
