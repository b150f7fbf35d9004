"""Makes the model card (README.md) of an adapter from its restorekv.json and LoRA config, and reads
the license that a model card names.

The last line of a card is a checksum of the rest, so that a card which a person wrote or changed is
recognized and kept.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig

from restorekv.errors import RestoreKVError
from restorekv.files import read_bytes
from restorekv.model.names import to_hub_id
from restorekv.restore.adapter_file import AdapterCard
from restorekv.restore.licenses import (
    HUB,
    PERMISSIVE,
    UNKNOWN,
    count_by_license,
    find_base_license,
    find_noncommercial_license,
    forbids_commercial_use,
    normalize_license,
)
from restorekv.spec import drop_gate, split_specs

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# The data source with the parts that paper/results/corpus.md names. It is recognized by its hash,
# since anybody else's corpus has the same title.
MANY_GENRES = "Corpus of many genres (41 files, ea14c13fa8dcb481,"
PLACEHOLDER = "OWNER/NAME-OR-FOLDER"
SEAL = "<!-- written by restorekv, {} -->\n"


def parse_license(readme: str) -> str | None:
    """Return the license that a README.md's front matter names, the strictest of several."""
    try:
        data: Any = ModelCard(readme, ignore_metadata_errors=True).data
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return None
    names = [data.license]
    if isinstance(data.license, list):
        names = list(data.license)
    names.append(data.license_name)
    known = [
        normalize_license(name)
        for name in names
        if isinstance(name, str) and name not in (UNKNOWN, "other")
    ]

    def compute_strictness(license: str) -> tuple[bool, bool]:
        return forbids_commercial_use(license), license not in PERMISSIVE

    return max(known, key=compute_strictness, default=None)


def is_generated_card(path: Path) -> bool:
    """Return whether `path` may be replaced: nothing is there, or an unchanged card of ours."""
    if not path.exists():
        return True
    try:
        text = read_bytes(path, str(path)).decode()
    except (RestoreKVError, UnicodeDecodeError):
        return False
    body, mark, rest = text.rpartition(SEAL.partition("{")[0])
    return mark + rest == _make_seal(body)


def _make_seal(body: str) -> str:
    """Return the last line of a card."""
    return SEAL.format(hashlib.sha256(body.encode()).hexdigest())


def render_card(card: AdapterCard, config: LoraConfig, name: str = PLACEHOLDER) -> str:
    """Return the whole README.md; `name` is what the example in it loads."""
    # How often a run writes checkpoints does not decide what it learns. Neither does the length of
    # generated answers if training generated none.
    unimportant = {"keep", "checkpoint_every"}
    if card.data and all(row.get("answers") for row in card.data):
        unimportant.add("max_new_tokens")
    settings = {
        key: "none" if value is None else value
        for key, value in (card.settings or {}).items()
        if key not in unimportant
    }
    targets = config.target_modules
    evictor, _, evictor_settings = _find_first_evictor(card).partition(":")
    columns = dict.fromkeys(("source", "examples", "contexts", "license"))
    body = ModelCard.from_template(
        make_front_matter(card, config),
        str(TEMPLATE),
        card=card,
        config=config,
        name=name,
        lora=bool(targets),
        title=Path(card.model).name or "a model without a name",
        targets=targets if isinstance(targets, str) else sorted(targets or ()),
        settings=settings,
        settings_rows=[{"setting": key, "value": value} for key, value in settings.items()],
        data_rows=[columns | row for row in card.data or ()],
        license_rows=count_by_license(card.data),
        many_genres=any(MANY_GENRES in str(row.get("source")) for row in card.data or ()),
        with_intervals=any("low" in row for row in card.results or ()),
        with_lora_dtype=any("lora_dtype" in row for row in card.results or ()),
        with_small_budget=any("on_small_budget" in row for row in card.results or ()),
        license=normalize_license(card.license or UNKNOWN),
        non_commercial=find_noncommercial_license(card),
        base_license=find_base_license(card),
        arguments=_make_usage_arguments(card, name),
        compression=_find_changed_settings(card),
        evictor=evictor,
        evictor_settings=evictor_settings,
        table=format_table,
        cell=format_cell,
        json=json.dumps,
        quote=shlex.quote,
    )
    body = f"{body}\n\n"
    return body + _make_seal(body)


def make_front_matter(card: AdapterCard, config: LoraConfig) -> ModelCardData:
    """Return the metadata of a card: a base model only if the hub has it, and a license that the
    hub knows or "other".
    """
    license = normalize_license(card.license or UNKNOWN)
    license_name = None
    if license not in HUB:
        chars = [
            char if char.isascii() and (char.isalnum() or char == ".") else " " for char in license
        ]
        license = "other"
        license_name = "-".join("".join(chars).lower().split())
    tags = ["restorekv", "kv-cache", "long-context"]
    if config.target_modules:
        tags.append("lora")
    return ModelCardData(
        library_name="peft",
        base_model=to_hub_id(card.model) if is_on_hub(card) else None,
        tags=tags,
        license=license,
        license_name=license_name,
    )


def is_on_hub(card: AdapterCard) -> bool:
    """Return whether others can find the base model on the hub; for records without `local`, this
    machine's disk decides.
    """
    is_local = card.local
    if is_local is None:
        is_local = Path(card.model).exists()
    return not is_local and is_hub_name(to_hub_id(card.model))


def is_hub_name(name: str) -> bool:
    """Return whether `name` is OWNER/NAME as the hub wants it."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _find_first_evictor(card: AdapterCard) -> str:
    """Return the spec of the evictor that the adapter was trained for, or the first of several; ""
    if none is recorded.
    """
    specs = split_specs(card.evictor or "")
    return specs[0] if specs else ""


def _make_usage_arguments(card: AdapterCard, name: str) -> dict[str, object]:
    """Return the arguments of `compress` in the card's example, with a ratio near 0.1."""
    low, high = card.ratio_range or (0.1, 0.1)
    return {
        # The file of a gate is only on the machine of whoever trained the adapter.
        "evictor": drop_gate(_find_first_evictor(card) or "kvzip"),
        "ratio": min(max(0.1, low), high),
        "adapter": name,
    }


def _find_changed_settings(card: AdapterCard) -> dict[str, object]:
    """Return the fields of `CompressionConfig` that the card records with values other than the
    defaults.
    """
    defaults = {"prefix_policy": "free", "allocation": "global", "restore_from": "full"}
    changed: dict[str, object] = {}
    for name, default in defaults.items():
        value = getattr(card, name)
        if value not in (None, default):
            changed[name] = value
    return changed


def format_table(rows: list[dict]) -> str:
    """Return a Markdown table; columns come in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[key.replace("_", " ") for key in columns], ["---"] * len(columns)]
    for row in rows:
        lines.append([format_cell(row[key]) if key in row else "" for key in columns])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_cell(value: object) -> str:
    """Return the text for one cell of a table."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        value = ", ".join(value) or "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
