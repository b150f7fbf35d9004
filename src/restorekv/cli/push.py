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
        Path, typer.Argument(help="Folder of a trained adapter, such as runs/mine/adapter.")
    ],
    repo: Annotated[
        str, typer.Argument(help="Repository OWNER/NAME on the hub; it is created if needed.")
    ],
    private: Annotated[
        bool, typer.Option("--private", help="Create a repository that only its owner sees.")
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            help="Type of the LoRA weights: auto (as they are), float32, bfloat16 or float16."
        ),
    ] = "auto",
    license: Annotated[
        str | None,
        typer.Option(
            help="License of the adapter, by the hub's name for it; by default that of its data."
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="JSON file of `restorekv eval --json` with this adapter's scores, for the model "
            "card; the folder records them."
        ),
    ] = None,
    message: Annotated[str | None, typer.Option(help="Commit message.")] = None,
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
