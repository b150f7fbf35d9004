"""`restorekv push FOLDER REPO`: uploads a restore adapter and its model card to the Hugging Face
hub.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from restorekv.cli.choices import DTYPES
from restorekv.cli.terminal import notes, output
from restorekv.errors import AdapterError, check_choice, reraise_as
from restorekv.files import read_bytes


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

    # From here on PyTorch is imported.
    import torch

    from restorekv.restore import adapter_file, model_card, publish

    stored = adapter_file.read_adapter(folder)
    card = stored.card
    if card is None:
        raise AdapterError(
            f"{folder} has no restorekv.json, which names the model; load it with "
            "RestoreAdapter.from_pretrained and save it first."
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
        stored = replace(stored, lora=lora, card=adapter_file.change_lora_dtype(card, dtype))
    path = folder / adapter_file.README
    readme = None
    if not model_card.is_generated_card(path):  # a person wrote it
        with reraise_as(AdapterError):
            readme = read_bytes(path, str(path), publish.README_LIMIT).decode("utf-8", "replace")
    if dry_run:
        typer.echo(publish.prepare_upload(repo, stored, license, readme)[1], nl=False)
        return
    with notes.status(f"publishing {repo}"):
        address = publish.push_adapter(
            repo, stored, private=private, license=license, readme=readme, commit_message=message
        )
    output.print(f"Published {address}")
