"""`restorekv push FOLDER REPO`: uploads a restore adapter and its model card to the Hugging Face
hub.
"""

from pathlib import Path
from typing import Annotated

import typer

from restorekv.cli.choices import DTYPES
from restorekv.errors import AdapterError, check_choice


def run(
    folder: Annotated[
        Path, typer.Argument(help="The folder of a trained adapter, as runs/mine/adapter.")
    ],
    repo: Annotated[
        str, typer.Argument(help="OWNER/NAME on the hub, which is created if need be.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Only the owner sees the repository.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            help=f"Type of the LoRA weights: auto (as they are), {', '.join(DTYPES[1:])}."
        ),
    ] = "auto",
    license: Annotated[
        str | None,
        typer.Option(
            help="License by the hub's name for it; passed on from the data unless given."
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="What `restorekv eval --json` wrote for this adapter; recorded in its folder."
        ),
    ] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the model card and publish nothing.")
    ] = False,
) -> None:
    if not folder.is_dir():
        raise AdapterError(f"{folder} is not a folder; pass that of a trained adapter.")
    check_choice("The dtype", dtype, DTYPES)

    from restorekv.cli.upload import publish_folder  # which imports PyTorch

    publish_folder(
        folder,
        repo,
        private=private,
        dtype=dtype,
        license=license,
        results=results,
        message=message,
        dry_run=dry_run,
    )
