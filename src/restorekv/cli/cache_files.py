"""`restorekv append`, `compose` and `export`: cache files that are made of other cache files."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from restorekv.cli import options
from restorekv.cli.choices import GROWING
from restorekv.cli.inputs import (
    check_cache_files,
    check_output_kind,
    check_outputs_apart,
    read_text,
)
from restorekv.cli.terminal import notes, print_figures
from restorekv.errors import RestoreKVError, check_choice

if TYPE_CHECKING:
    from restorekv.compression.growing import RestoreParts


def append(
    file: Annotated[Path, typer.Argument(help="Cache file made by compress; it is not changed.")],
    text: Annotated[
        str,
        typer.Argument(
            help="Text, HTML, PDF, DOCX or EPUB file to add at its end, or - for stdin."
        ),
    ],
    out: options.CacheFile,
    restore: Annotated[
        str,
        typer.Option(
            help="Restore tokens: last (new ones replace the earlier parts'), every (the earlier "
            "parts' stay, too) or none."
        ),
    ] = "last",
    adapter: options.SameAdapter = "auto",
    model: options.OtherModel = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    check_choice("--restore", restore, GROWING)
    if restore == "none" and adapter not in ("auto", "none"):
        raise RestoreKVError("--restore none restores nothing; leave out --restore or --adapter.")
    check_outputs_apart([out], (file, text, model))
    check_output_kind(out, "restorekv-cache")
    check_cache_files([file])
    added = read_text(text)

    from restorekv.cli.compress_text import summarize_cache  # which imports PyTorch
    from restorekv.cli.loading import open_documents

    (document,) = open_documents([file], model, dtype, device)
    with notes.status("appending"):
        grown = document.append(
            added,
            restore=cast("RestoreParts", restore),
            adapter=None if adapter == "none" else adapter,
        )
        grown.save(out)
    print_figures(f"Wrote {out}", summarize_cache(grown, out))


def compose(
    files: Annotated[
        list[Path],
        typer.Argument(help="Cache files made with one model, in the order of their texts."),
    ],
    out: options.CacheFile,
    model: options.OtherModel = None,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    check_outputs_apart([out], (*files, model))
    check_output_kind(out, "restorekv-cache")
    check_cache_files(files)

    from restorekv.cli.compress_text import summarize_cache  # which imports PyTorch
    from restorekv.cli.loading import open_documents
    from restorekv.many_contexts import compose as compose_documents

    whole = compose_documents(open_documents(files, model, dtype, device))
    whole.save(out)
    print_figures(f"Wrote {out}", summarize_cache(whole, out))


def export(
    file: Annotated[
        Path, typer.Argument(help="Cache file made by compress with --allocation per-head.")
    ],
    out: Annotated[Path, options.make_output_option("Portable file to write.", "--output", "-o")],
    model: options.OtherModel = None,
) -> None:
    check_outputs_apart([out], (file, model))
    check_output_kind(out, "restorekv-portable")
    check_cache_files([file])

    from restorekv.cli.loading import open_documents  # which imports PyTorch
    from restorekv.context import format_bytes

    (document,) = open_documents([file], model, None, "cpu")
    portable = document.portable()
    portable.save(out)
    facts = {
        "document": f"{portable.name}, T = {portable.manifest.tokens:,} tokens",
        "prefix": f"m = {portable.tokens:,} positions, {portable.manifest.dtype}",
        "bytes": format_bytes(portable.keys.nbytes + portable.values.nbytes),
    }
    print_figures(f"Wrote {out}", facts)
