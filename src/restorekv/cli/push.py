"""`restorekv push FOLDER REPO`: a restore adapter and its model card onto the Hugging Face hub."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from restorekv.cli.session import output, phase
from restorekv.errors import AdapterError
from restorekv.model.load import DTYPES, check_dtype
from restorekv.restore import adapter_file, card_results, hub, model_card


def run(
    folder: Annotated[Path, typer.Argument(help="The folder of a trained adapter, as runs/mine/adapter.")],
    repo: Annotated[str, typer.Argument(help="OWNER/NAME on the hub; made unless it is there.")],
    private: Annotated[bool, typer.Option("--private", help="Visible to its owner alone.")] = False,
    dtype: Annotated[
        str, typer.Option(help=f"Of the LoRA weights: auto (as they are), {', '.join(DTYPES[1:])}.")
    ] = "auto",
    licence: Annotated[
        str | None, typer.Option(help="Of the adapter, by the hub's name for it; follows from its data unless given.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="What `restorekv eval --json` wrote for this adapter; recorded in its folder.")
    ] = None,
    message: Annotated[str | None, typer.Option(help="Message of the commit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the model card and publish nothing.")] = False,
) -> None:
    if not folder.is_dir():
        raise AdapterError(f"{folder} is no folder; give that of a trained adapter.")
    check_dtype(dtype)
    stored = adapter_file.read(folder)
    if stored.card is None:
        raise AdapterError(
            f"{folder} has no restorekv.json, which tells the model; load it with RestoreAdapter.from_pretrained and "
            "save it first."
        )
    if results:
        card = replace(
            stored.card, results=card_results.joined(stored.card.results, card_results.read(results, stored))
        )
        stored = replace(stored, card=card)
        if not dry_run:
            model_card.save(folder, stored)
    stored = replace(stored, card=hub.with_origin(stored.card, folder, folder, bare=False))
    if dtype != "auto":
        lora = {name: tensor.to(getattr(torch, dtype)) for name, tensor in stored.lora.items()}
        stored = replace(stored, lora=lora, card=replace(stored.card, dtype=dtype))
    own = folder / adapter_file.README
    readme = None if model_card.is_ours(own) else own.read_text(encoding="utf-8", errors="replace")
    if dry_run:
        typer.echo(hub.prepare(repo, stored, licence, readme)[1], nl=False)
        return
    with phase(f"publishing {repo}"):
        address = hub.push(repo, stored, private=private, licence=licence, readme=readme, commit_message=message)
    output.print(f"Published {escape(address)}")
