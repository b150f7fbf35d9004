"""`restorekv push FOLDER REPO`: uploads a restore adapter and its model card to the Hugging Face
hub.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from restorekv.cli.session import notes, output
from restorekv.errors import AdapterError, reraise_as
from restorekv.files import read_bytes
from restorekv.model.load import DTYPES, check_dtype
from restorekv.restore import adapter_file, model_card, publish


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
    check_dtype(dtype)
    stored = adapter_file.read_adapter(folder)
    card = stored.card
    if card is None:
        raise AdapterError(
            f"{folder} has no restorekv.json, which names the model; load it with "
            "RestoreAdapter.from_pretrained and "
            "save it first."
        )
    if results:
        card = publish.merge_results(card, publish.read_results(results, stored))
        stored = replace(stored, card=card)
        if not dry_run:
            publish.save_adapter(folder, stored)
    card = publish.add_license(card, folder)
    stored = replace(stored, card=card)
    if dtype != "auto":
        lora = {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored.lora.items()}
        stored = replace(stored, lora=lora, card=replace(card, dtype=dtype))
    path = folder / adapter_file.README
    readme = None if model_card.is_generated_card(path) else _read_own_card(path)
    if dry_run:
        typer.echo(publish.prepare_upload(repo, stored, license, readme)[1], nl=False)
        return
    with notes.status(f"publishing {repo}"):
        address = publish.push_adapter(
            repo, stored, private=private, license=license, readme=readme, commit_message=message
        )
    output.print(f"Published {address}", markup=False)


def _read_own_card(path: Path) -> str:
    """Return the model card that a person wrote."""
    with reraise_as(AdapterError):
        return read_bytes(path, str(path), publish.README_LIMIT).decode("utf-8", "replace")
