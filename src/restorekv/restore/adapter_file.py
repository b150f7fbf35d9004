"""A restore adapter on disk, in the format in which adapters are published.

adapter_config.json, adapter_model.safetensors   a PEFT LoRA adapter
restore_embeddings.safetensors                   one tensor "restore_embeddings" (n, d)
restorekv.json                                   the record of its training, with checksums; others' adapters lack it
README.md                                        the model card; only its license is read back
"""

import hashlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from restorekv.errors import AdapterError
from restorekv.model import base_weights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDINGS, CARD = "restore_embeddings.safetensors", "restorekv.json"
README = "README.md"
FILES = (CARD, CONFIG, WEIGHTS, EMBEDDINGS, README)
PREFIX = "base_model.model."  # what PEFT puts before the names of the model's own modules
VERSION = 1


@dataclass(frozen=True)
class Card:
    """The record of what an adapter was made for; a field is None where nobody recorded it.

    `settings`: of the training. `data`: one row per source with source, examples, contexts, license and more.
    `results`: one row per measurement with benchmark, ratio, base, restored, full and more. `source`: the published
    adapter that this one is a copy of. `local`: whether `model` was a folder or file where the adapter was created.
    `weights`: see base_weights.py. `between`: the text between document and question in training.
    """

    model: str
    fingerprint: str
    rope: dict[str, object]
    restore_tokens: int
    dtype: str = "float32"
    evictor: str | None = None
    prefix_policy: str | None = None
    ratio_range: tuple[float, float] | None = None
    allocation: str = "global"
    restore_from: str = "full"
    embeddings: str = "learned"
    settings: dict[str, Any] | None = None
    data: list[dict[str, Any]] | None = None
    results: list[dict[str, Any]] | None = None
    license: str | None = None
    source: str | None = None
    local: bool | None = None
    weights: dict[str, Any] | None = None
    between: str | None = None

    def __post_init__(self) -> None:
        dicts = [*(self.data or ()), *(self.results or ()), self.settings or {}, self.weights or {}]
        texts = (self.license, self.source, self.between)
        typed = all(isinstance(each, dict) for each in dicts) and all(isinstance(each, str | None) for each in texts)
        if not (typed and isinstance(self.local, bool | None)):
            raise TypeError("a field of the record has another type")


@dataclass(frozen=True)
class Stored:
    """An adapter as its files hold it: `lora` by the model's own module names, `embeddings` (n, d)."""

    config: LoraConfig
    lora: dict[str, Tensor]
    embeddings: Tensor
    card: Card | None

    def weights_hash(self) -> str:
        """Returns 16 hex digits of names and values; values count as float32, which they are in use."""
        sha = hashlib.sha256()
        for name, value in sorted({"embeddings": self.embeddings, **self.lora}.items()):
            sha.update(name.encode() + value.detach().to("cpu", torch.float32).numpy().tobytes())
        return sha.hexdigest()[:16]


def plain(value: Any) -> Any:
    """Returns `value` as JSON would bring it back; raises AdapterError for what JSON cannot hold."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise AdapterError(
            f"An adapter's record holds plain JSON only ({error}); give numbers, texts and lists."
        ) from error


def with_license_key(record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record under today's key `license`, which was `licence` in older files; so for its rows of data."""
    record = {"license" if key == "licence" else key: value for key, value in record.items()}
    if record.get("data"):
        record["data"] = [with_license_key(row) for row in record["data"]]
    return record


def write(folder: Path, stored: Stored, readme: str | None = None) -> None:
    """Completes all files before it replaces the first one of an older adapter; keeps README.md without a `readme`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as name:
            fresh = Path(name)
            stored.config.save_pretrained(name)
            config = json.loads((fresh / CONFIG).read_text(encoding="utf-8"))
            if isinstance(config.get("target_modules"), list):  # a set, in another order in every process
                config["target_modules"].sort()
            (fresh / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            lora = {PREFIX + key: value.contiguous() for key, value in stored.lora.items()}
            save_file(lora, fresh / WEIGHTS, metadata={"format": "pt"})
            save_file({"restore_embeddings": stored.embeddings.contiguous()}, fresh / EMBEDDINGS)
            sums = {file: digest(fresh / file) for file in (CONFIG, WEIGHTS, EMBEDDINGS)}
            card = {"version": VERSION, **asdict(stored.card), "sha256": sums}
            (fresh / CARD).write_text(json.dumps(card, indent=2, sort_keys=True) + "\n")
            if readme is not None:
                (fresh / README).write_text(readme, encoding="utf-8")
            for file in FILES if readme is not None else FILES[:-1]:
                os.replace(fresh / file, folder / file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"Cannot write the adapter to {folder}; choose a writable folder ({error}).") from error


def read(folder: Path) -> Stored:
    """Raises AdapterError for anything but a complete and undamaged adapter."""
    for file in (CONFIG, WEIGHTS, EMBEDDINGS):
        if not (folder / file).is_file():
            raise AdapterError(f"{folder} has no {file}; give the folder of a complete restore adapter.")
    card = read_card(folder)
    embeddings = tensors(folder / EMBEDDINGS).get("restore_embeddings")
    if embeddings is None or embeddings.ndim != 2 or 0 in embeddings.shape:
        raise AdapterError(f"{folder / EMBEDDINGS} has no tensor restore_embeddings (n, d); use another adapter.")
    lora = {key.removeprefix(PREFIX): value for key, value in tensors(folder / WEIGHTS).items()}
    return Stored(read_config(folder), lora, embeddings, card)


def read_config(folder: Path) -> LoraConfig:
    """Returns the LoRA config; refuses other kinds of adapter."""
    try:
        kind = json.loads((folder / CONFIG).read_text()).get("peft_type")
        config = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise AdapterError(f"{folder / CONFIG} is damaged; fetch or train the adapter again.") from error
    if kind != "LORA":
        raise AdapterError(f"{folder} holds a {kind} adapter; a restore adapter is a LORA one.")
    return config


def read_card(folder: Path) -> Card | None:
    """Returns the card, after it compares the checksums; None where there is no restorekv.json."""
    path = folder / CARD
    if not path.is_file():
        return None
    try:
        entries = with_license_key(json.loads(path.read_text()))
        version, sums = entries["version"], entries["sha256"]
        span = entries["ratio_range"]
        card = Card(**{field.name: entries[field.name] for field in fields(Card) if field.name in entries})
        card = replace(card, ratio_range=span and tuple(span))
        changed = [file for file, expected in sums.items() if digest(folder / file) != expected]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AdapterError(f"{path} is damaged; fetch or train the adapter again.") from error
    if version != VERSION:
        raise AdapterError(f"{path} has format version {version}; this restorekv reads version {VERSION}.")
    if changed:
        raise AdapterError(f"{folder / changed[0]} is not the file that was saved; fetch or train the adapter again.")
    return card


def tensors(path: Path) -> dict[str, Tensor]:
    """Reads safetensors only: it never opens a pickle, whatever the file is called."""
    try:
        loaded = load_file(path)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{path} is damaged or no safetensors file; fetch or train the adapter again.") from error
    if not all(torch.isfinite(tensor).all() for tensor in loaded.values()):
        raise AdapterError(f"{path} holds numbers that are not finite; use another adapter.")
    return loaded


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_model(name: str | Path, card: Card, own: Card) -> None:
    """Refuses another model or another rotation of its keys; warns of other weights of the same model."""
    if card.rope != own.rope:
        raise AdapterError(
            f"The adapter {name} was trained with RoPE {card.rope}, the model has {own.rope}; "
            "load the model with the same RoPE configuration."
        )
    if not base_weights.fits(f"adapter {name}", card, own):
        raise AdapterError(f"The adapter {name} was trained for another model ({card.model}); load that one.")
