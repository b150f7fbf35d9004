"""Publish a restore adapter, or show the model card that it would have."""

from dataclasses import replace
from pathlib import Path

import torch
import typer

from restorekv.cli.terminal import notes, output
from restorekv.errors import AdapterError, reraise_as
from restorekv.files import read_bytes
from restorekv.restore import adapter_file, model_card, publish


def publish_folder(
    folder: Path,
    repo: str,
    *,
    private: bool,
    dtype: str,
    license: str | None,
    results: Path | None,
    message: str | None,
    dry_run: bool,
) -> None:
    """Publish an adapter; the arguments are the options of `restorekv push`."""
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
