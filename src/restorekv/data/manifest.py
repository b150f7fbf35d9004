"""The record of a mixture: what a reader must know of its model, its sources, their licences and what was left out."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv._version import __version__
from restorekv.errors import RestoreKVError
from restorekv.model.load import model_fingerprint, model_name, rope_fingerprint
from restorekv.model.prompt import template_hash

FORMAT, VERSION, NAME = "restorekv-data", 1, "manifest.json"
RECORD = "build.json"  # stands where a mixture is unfinished
LIBRARIES = ("torch", "transformers", "datasets", "pyarrow")
PROBE = "Kv 0123456789: naïve, “tabs”\t\n\n日本 😀 What? Yes! (a; b) 'c' - d/e."
SAME = {"fingerprint": "model", "template": "chat template", "tokenizer": "tokenizer"}


def model_facts(model: PreTrainedModel, tokenizer: Tokenizer) -> dict:
    """The teacher: whose answers these are, and whose ids."""
    return {
        "name": model_name(model),
        "fingerprint": model_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "template": template_hash(tokenizer),
        "tokenizer": tokenizer_hash(tokenizer),
        "rope": rope_fingerprint(model.config),
    }


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """16 hex digits of the vocabulary and of how a text full of traps is cut."""
    facts = [sorted(tokenizer.get_vocab().items()), tokenizer.encode(PROBE, add_special_tokens=False)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def versions() -> dict[str, str]:
    return {
        "restorekv": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def read_manifest(folder: Path) -> dict:
    """Refuses what is missing, damaged or of another version."""
    path = folder / NAME
    if not path.is_file():
        unfinished = (folder / RECORD).is_file()
        mend = "finish it with restorekv data build --resume" if unfinished else "give a folder of restorekv data build"
        raise RestoreKVError(f"There is no {path}; {mend}.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        known = manifest["format"] == FORMAT
        number = manifest["version"]
        described = {"model", "sources", "longest", "licences"} <= set(manifest)
    except (ValueError, KeyError, TypeError) as error:
        raise RestoreKVError(f"{path} is damaged or no manifest of restorekv; build the data again.") from error
    if not known or not described:
        raise RestoreKVError(f"{path} is no manifest of restorekv's data; give a folder of restorekv data build.")
    if number != VERSION:
        raise RestoreKVError(f"{path} is of version {number}, not {VERSION}; use another restorekv or build again.")
    return manifest


def check_model(manifest: dict, model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Refuses answers of another model: they would not be the teacher's, nor their ids mean the same words."""
    now, made = model_facts(model, tokenizer), manifest["model"]
    for key, what in SAME.items():
        if now[key] != made.get(key):
            raise RestoreKVError(
                f"The data in {folder} was made by the model {made.get('name')} with another {what} "
                f"({made.get(key)}, not {now[key]}); build it for this model."
            )
