"""The folder of a mixture while it is made: begun, gone on with, finished, or left as it was."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.atomic import write_json
from restorekv.data.config import BuildConfig
from restorekv.data.manifest import NAME, RECORD, check_model, read_manifest
from restorekv.errors import RestoreKVError

PARTS = "parts"


def check_folder(out: Path, resume: bool) -> None:
    """Refuses a folder that holds something else, before a model is loaded."""
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; give the name of a folder.")
    if resume:
        return
    if (out / NAME).exists() or (out / RECORD).exists():
        raise RestoreKVError(f"{out} already holds a data set; go on with --resume or choose another folder.")
    if out.exists() and any(out.iterdir()):
        raise RestoreKVError(f"{out} is not empty; choose another folder.")


def earlier(out: Path) -> dict | None:
    """What was being made here, if anything."""
    try:
        return json.loads((out / RECORD).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RestoreKVError(f"{out / RECORD} is damaged; build into another folder.") from error


def start(out: Path, record: dict) -> dict:
    """Writes down what is being made, after checking that what was begun here is the same.

    Files of the sources may have been mended meanwhile: answers are only taken over for the texts they were made for.
    """
    before = earlier(out) or record
    differs = [key for key in record if key != "sources" and before.get(key) != record[key]]
    if differs:
        raise RestoreKVError(f"{out} was begun with another {differs[0]}; give the same flags or another folder.")
    (out / PARTS).mkdir(parents=True, exist_ok=True)
    write_json(out / RECORD, record)
    return record


def finished(out: Path, model: PreTrainedModel, tokenizer: Tokenizer, config: BuildConfig) -> dict:
    """The manifest of a complete folder, if that is what was asked for again."""
    manifest = read_manifest(out)
    check_model(manifest, model, tokenizer, out)
    if manifest.get("settings") != asdict(config):
        raise RestoreKVError(f"{out} holds data made with other settings; choose another folder.")
    clear(out)
    return manifest


def abandon(out: Path) -> None:
    """Leaves nothing behind where nothing has been asked yet."""
    if not any((out / PARTS).iterdir()):
        clear(out)
    if not any(out.iterdir()):
        out.rmdir()


def clear(out: Path) -> None:
    """Removes what only the making needed."""
    shutil.rmtree(out / PARTS, ignore_errors=True)
    (out / RECORD).unlink(missing_ok=True)
