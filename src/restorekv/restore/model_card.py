"""The model card of an adapter (README.md) and the license in it, from what restorekv.json and the
LoRA config record.

A license is recorded and passed on. The last line of a card is a checksum of the rest, so that a
card which a person wrote or changed is recognized and kept.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable
from pathlib import Path

import yaml
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig

from restorekv.errors import RestoreKVError
from restorekv.files import read_bytes
from restorekv.model.names import to_hub_id
from restorekv.restore.adapter_file import AdapterCard

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
NAMELESS = "OWNER/NAME-OR-FOLDER"
SEAL = "<!-- written by restorekv, {} -->\n"
UNKNOWN = "unknown"
PERMISSIVE = frozenset(
    "apache-2.0 mit curl bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 isc ncsa postgresql unlicense wtfpl "
    "zlib "
    "cc0-1.0 pddl public-domain odc-by cdla-permissive-1.0 cdla-permissive-2.0 etalab-2.0 cc-by-2.0 cc-by-2.5 "
    "cc-by-3.0 cc-by-4.0".split()
)
# huggingface.co/docs/hub/repositories-licenses.
HUB = PERMISSIVE - {"public-domain", "curl"} | frozenset(
    "odbl gfdl afl-3.0 agpl-3.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0 "
    "bigscience-openrail-m c-uda cc cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 "
    "cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cdla-sharing-1.0 "
    "creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 eupl-1.1 eupl-1.2 "
    "fair-noncommercial-research-license gemma gpl gpl-2.0 gpl-3.0 grok2-community h-research intel-research lgpl "
    "lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mpl-2.0 ms-pl ofl-1.1 "
    "openmdw-1.0 openrail openrail++ osl-3.0 other unknown".split()
)
KNOWN = HUB | PERMISSIVE
ALIASES = {
    "cc0": "cc0-1.0",
    "odc-by-1.0": "odc-by",
    "mit-license": "mit",
    "apache-license-2.0": "apache-2.0",
}


def normalize_license(license: str) -> str:
    """Returns the hub's name, cc-by-nc-4.0 for "CC BY-NC 4.0"; a license that the hub does not know
    keeps its name.
    """
    name = "-".join(license.lower().replace("_", " ").split())
    name = ALIASES.get(name, UNKNOWN if name.startswith(UNKNOWN) else name)
    return name if name in KNOWN else license.strip()


def forbids_commercial_use(license: str | None) -> bool:
    """Whether the name of a license, known or not, forbids commercial use."""
    words = "".join(
        letter if letter.isalnum() else " " for letter in (license or "").lower()
    ).split()
    return "nc" in words or any(
        mark in "".join(words) for mark in ("noncommercial", "notforcommercial")
    )


def list_licenses(data: list[dict] | None) -> list[str]:
    """Returns what the rows of a record of data name, "unknown" for a row without a license."""
    names = [row.get("license") for row in data or ()]
    names = [
        name for each in names for name in (each if isinstance(each, list) and each else [each])
    ]
    return [
        normalize_license(name) if isinstance(name, str) and name.strip() else UNKNOWN
        for name in names
    ]


def combine_licenses(licenses: Iterable[str]) -> str:
    """Returns the license of an adapter trained on data under these: one that is non-commercial, if
    there is one.

    Else apache-2.0 where all are permissive, the only one that is not, or "unknown". This is no
    legal advice.
    """
    names = set(licenses)
    restrictive = names - PERMISSIVE
    if strict := sorted(filter(forbids_commercial_use, restrictive)):
        return strict[-1]
    if names and not restrictive:
        return "apache-2.0"
    return (
        restrictive.pop() if len(restrictive) == 1 and restrictive < KNOWN - {"other"} else UNKNOWN
    )


def inherit_license(card: AdapterCard, data: list[dict] | None) -> str | None:
    """Returns the license after training on `data`: an adapter that was non-commercial before stays
    so.
    """
    before = (
        [card.license]
        if card.license and (card.source or forbids_commercial_use(card.license))
        else []
    )
    licenses = list_licenses(data) + before
    return combine_licenses(licenses) if licenses else None


def find_noncommercial_license(card: AdapterCard) -> str | None:
    """Returns what forbids commercial use: the adapter's own license or one of its data's."""
    return next(filter(forbids_commercial_use, (card.license, *list_licenses(card.data))), None)


def parse_license(readme: str) -> str | None:
    """Returns the license that a README.md's front matter names, the strictest of several."""
    try:
        data = ModelCard(readme, ignore_metadata_errors=True).data
    except (yaml.YAMLError, ValueError, TypeError, RecursionError):
        return None
    names = [
        *(data.license if isinstance(data.license, list) else [data.license]),
        data.license_name,
    ]
    known = [
        normalize_license(name)
        for name in names
        if isinstance(name, str) and name not in (UNKNOWN, "other")
    ]
    return max(known, key=forbids_commercial_use, default=None)


def is_generated_card(path: Path) -> bool:
    """Whether `path` may be replaced: nothing is there, or a card of ours that nobody has changed."""
    if not path.exists():
        return True
    try:
        text = read_bytes(path, str(path)).decode()
    except (RestoreKVError, UnicodeDecodeError):
        return False
    body, mark, seal = text.rpartition(SEAL.partition("{")[0])
    return mark + seal == _make_seal(body)


def _make_seal(body: str) -> str:
    """Returns the last line of a card."""
    return SEAL.format(hashlib.sha256(body.encode()).hexdigest())


def render_card(card: AdapterCard, config: LoraConfig, name: str = NAMELESS) -> str:
    """Returns the whole README.md; `name` is what users are shown how to load."""
    settings = {
        key: "none" if value is None else value for key, value in (card.settings or {}).items()
    }
    # Then training generated no answers.
    answered = card.data and all(row.get("answers") for row in card.data)
    for key in ("keep", "checkpoint_every", *["max_new_tokens"] * bool(answered)):
        settings.pop(key, None)
    targets = config.target_modules
    license = normalize_license(card.license or UNKNOWN)
    evictor, _, evictor_settings = (card.evictor or "").partition(":")
    body = ModelCard.from_template(
        make_front_matter(card, config),
        TEMPLATE,
        card=card,
        config=config,
        name=name,
        lora=bool(targets),
        title=Path(card.model).name or "a model without a name",
        targets=targets if isinstance(targets, str) else sorted(targets or ()),
        settings=settings,
        settings_rows=[{"setting": key, "value": value} for key, value in settings.items()],
        data_rows=[
            dict.fromkeys(("source", "examples", "contexts", "license")) | row
            for row in card.data or ()
        ],
        with_intervals=any("low" in row for row in card.results or ()),
        license=license,
        non_commercial=find_noncommercial_license(card),
        arguments=make_usage_arguments(card, name),
        compression=find_changed_settings(card),
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
    """Names a base model only if the hub has it, and a license that the hub knows or "other"."""
    license = normalize_license(card.license or UNKNOWN)
    license_name = None
    if license not in HUB:
        letters = (
            letter if letter.isascii() and (letter.isalnum() or letter == ".") else " "
            for letter in license
        )
        license = "other"
        license_name = "-".join("".join(letters).lower().split())
    tags = ["restorekv", "kv-cache", "long-context", *["lora"] * bool(config.target_modules)]
    base = to_hub_id(card.model) if is_on_hub(card) else None
    return ModelCardData(
        library_name="peft", base_model=base, tags=tags, license=license, license_name=license_name
    )


def is_on_hub(card: AdapterCard) -> bool:
    """Whether others find the base model on the hub; for records without `local`, this machine's
    disk decides.
    """
    local = Path(card.model).exists() if card.local is None else card.local
    return not local and is_hub_name(to_hub_id(card.model))


def is_hub_name(name: str) -> bool:
    """Whether `name` is OWNER/NAME as the hub wants it."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def make_usage_arguments(card: AdapterCard, name: str) -> dict[str, object]:
    """Return the arguments of `compress`, with a ratio near 0.1."""
    low, high = card.ratio_range or (0.1, 0.1)
    return {
        "evictor": card.evictor or "kvzip",
        "ratio": min(max(0.1, low), high),
        "adapter": name,
    }


def find_changed_settings(card: AdapterCard) -> dict[str, object]:
    """Return the fields of `CompressionConfig` that the card says and that are not the defaults."""
    defaults = {"prefix_policy": "free", "allocation": "global", "restore_from": "full"}
    said = {name: getattr(card, name) for name in defaults}
    return {name: value for name, value in said.items() if value not in (None, defaults[name])}


def format_table(rows: list[dict]) -> str:
    """Returns a Markdown table; columns come in the order in which they first appear."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [[format_cell(row[key]) if key in row else "" for key in columns] for row in rows]
    heads = [key.replace("_", " ") for key in columns]
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(columns), *lines)
    )


def format_cell(value: object) -> str:
    """Returns the text for one cell of a table."""
    if value is None:
        return "not recorded"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        value = ", ".join(value) or "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
