"""The model card of an adapter: README.md, written from what its restorekv.json and adapter_config.json record.

What nobody recorded is said to be unknown. The last line is a checksum of the rest, so that a card which a person has
written or changed is told from ours and left alone.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import replace
from pathlib import Path
from textwrap import dedent, fill

import yaml
from huggingface_hub import ModelCardData
from peft import LoraConfig

from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.model.load import hub_name
from restorekv.restore import adapter_file, license
from restorekv.restore.adapter_file import README, Card, Stored
from restorekv.restore.card_training import cell, facts, table, training
from restorekv.restore.card_usage import here, in_kvpress

NAMELESS = "OWNER/NAME-OR-FOLDER"
PAPER = "https://arxiv.org/abs/2608.01247"
TAGS = ["restorekv", "kv-cache", "long-context"]
FRONT = re.compile(r"\s*---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.S)
SEAL = re.compile(r"<!-- written by restorekv, ([0-9a-f]{64}) -->\n\Z")


def save(folder: Path, stored: Stored) -> None:
    """The adapter with its card; a README.md that is not ours stays, and that is told.

    Results that the folder has for these very weights and this evictor stay unless there are new ones.
    """
    stored = replace(stored, card=with_results(folder, stored))
    own = is_ours(folder / README)
    if not own:
        message = (
            f"{folder / README} was written or changed by someone and stays as it is; remove it to get a new card."
        )
        warnings.warn(message, RestoreKVWarning, stacklevel=4)
    adapter_file.write(folder, stored, text(stored.card, stored.config) if own else None)


def with_results(folder: Path, stored: Stored) -> Card:
    """The card with the folder's results where it has none and they are of the same adapter."""
    if stored.card.results is not None or not (folder / adapter_file.CARD).is_file():
        return stored.card
    try:
        before = adapter_file.read(folder)
    except AdapterError:
        return stored.card
    same = before.card.evictor == stored.card.evictor and before.weights_hash() == stored.weights_hash()
    return replace(stored.card, results=before.card.results) if same else stored.card


def is_ours(path: Path) -> bool:
    """Whether `path` may be replaced: nothing is there, or a card of ours that nobody has changed."""
    if not path.exists():
        return True
    try:
        found = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    seal = SEAL.search(found)
    return seal is not None and seal[1] == checksum(found[: seal.start()])


def licence_of(folder: Path) -> str | None:
    """What the folder's README.md names."""
    try:
        return licence_in((folder / README).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None


def licence_in(readme: str) -> str | None:
    """What the front matter names, the strictest of several; None where it names none."""
    found = FRONT.match(readme)
    try:
        told = yaml.safe_load(found[1]) if found else None
    except yaml.YAMLError:
        return None
    if not isinstance(told, dict):
        return None
    names = told.get("license")
    names = [*(names if isinstance(names, list) else [names]), told.get("license_name")]
    named = [license.identifier(name) for name in names if isinstance(name, str) and name not in ("unknown", "other")]
    return max(named, key=license.non_commercial, default=None)


def text(card: Card, config: LoraConfig, name: str = NAMELESS) -> str:
    """The whole README.md; `name` is what users are told to load."""
    parts = (
        f"---\n{front_matter(card, config)}\n---\n", method(card, config), made_for(card, config), training(card),
        results(card), here(card, name), in_kvpress(card, config, name), citation(),
    )  # fmt: skip
    body = "\n".join(parts)
    return f"{body}\n<!-- written by restorekv, {checksum(body + chr(10))} -->\n"


def checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def front_matter(card: Card, config: LoraConfig) -> str:
    """YAML as the hub wants it: a base model only where it has a name there, a licence it knows or "other"."""
    licence = license.identifier(card.licence or license.UNKNOWN)
    named = licence in license.HUB
    licence_name = None
    if licence == license.UNKNOWN:
        licence = "unknown"
    elif not named:
        licence, licence_name = "other", re.sub(r"[^a-z0-9.]+", "-", licence.lower()).strip("-")
    return ModelCardData(
        library_name="peft", base_model=hub_name(card.model) if is_hub_id(card) else None,
        tags=TAGS + ["lora"] * bool(config.target_modules),
        license=licence, license_name=licence_name,
    ).to_yaml()  # fmt: skip


def is_hub_id(card: Card) -> bool:
    """Whether others find the base model on the hub; records of before `local` are compared with this machine."""
    local = Path(card.model).exists() if card.local is None else card.local
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", hub_name(card.model))) and not local


def method(card: Card, config: LoraConfig) -> str:
    """What the adapter does, as this very one does it."""
    n, pairs = f"{card.restore_tokens} restore tokens", f"{card.restore_tokens} key-value pairs"
    if card.restore_from == "evicted":
        reads = f"This is a control of the paper: {n} read only what eviction has left"
    else:
        reads = f"Before anything is dropped, {n} read the full cache"
    told = [
        f"A restore adapter of [RestoreKV]({PAPER}).",
        "A long context's KV cache is evicted once, before any question is known.",
        f"{reads}, in one pass through the model {'with this' if config.target_modules else 'without a'} LoRA,",
        f"and leave {pairs} in every layer and KV head.",
        "They take their share of the same budget and are to bring back part of what eviction loses.",
        "The LoRA is in the model during that pass alone; the" if config.target_modules else "The",
        "model itself is unchanged.",
    ]
    if (card.settings or {}).get("nested") is True:
        told.append(f"In training the first k of the {n} were used, k drawn anew each time, so the first k work alone.")
    title = f"# Restore adapter for {cell(Path(card.model).name or 'a model without a name')}"
    return f"{title}\n\n{fill(' '.join(told), 120, break_on_hyphens=False)}\n"


def made_for(card: Card, config: LoraConfig) -> str:
    """The conventions; an adapter that was never described has defaults in its card, which are no record."""
    known = card.evictor is not None
    span = card.ratio_range and f"{card.ratio_range[0]:g} to {card.ratio_range[1]:g}"
    targets = config.target_modules
    rows = {
        "base model": f"{card.model}, a folder of whoever trained it" if card.local else card.model,
        "fingerprint of its weights": card.fingerprint,
        "where these came from": (card.weights or {}).get("source"),
        "RoPE": card.rope,
        "evictor": card.evictor,
        "restore tokens (n)": card.restore_tokens,
        "chat prefix": {"free": "kept beside the budget (free)", "counted": "in the budget (counted)"}.get(
            card.prefix_policy, card.prefix_policy
        ),
        "allocation": card.allocation if known else None,
        "the restore pass reads": f"the {card.restore_from} cache" if known else None,
        "compression ratios": span,
        "restore embeddings": card.embeddings if card.source is None else None,
        "LoRA": f"rank {config.r}, alpha {config.lora_alpha:g}" if targets else "none",
        "LoRA on": targets if isinstance(targets, str) else ", ".join(sorted(targets or ())) or "nothing",
        "LoRA weights in the file": card.dtype,
    }
    lines = ["## What it was made for", "", facts(rows), ""]
    if card.source:
        lines += [
            f"A copy of {card.source}, whose authors publish no record of this kind: fingerprint and RoPE are those of "
            "the model it was loaded into here, the evictor is told by its name.", "",
        ]  # fmt: skip
    return "\n".join(lines)


def results(card: Card) -> str:
    found = table(card.results) if card.results else "None recorded."
    if any("low" in row for row in card.results or ()):
        found += "\n\nlow, high: 95 % interval of restored, bootstrap over documents; gain: restored minus base."
    return f"## Results\n\n{found}\n"


def citation() -> str:
    return dedent("""\
        ## Citation

        ```bibtex
        @article{restorekv,
          title   = {RestoreKV: Recovering Full-Cache Behavior Under Aggressive Query-Agnostic KV Cache Eviction},
          author  = {Baek, Changwoo and Shin, Seungjun and Kong, Kyeongbo},
          journal = {arXiv preprint arXiv:2608.01247}
        }
        ```
        """)
