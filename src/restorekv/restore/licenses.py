"""Licenses of adapters: the hub's names for them, and how an adapter inherits one from its data
and its base model.

Only training and publishing use this; loading an adapter does not. None of this is legal advice.
"""

from __future__ import annotations

from collections.abc import Iterable

from restorekv.model.names import GEMMA3, GEMMA3_ID
from restorekv.restore.adapter_file import AdapterCard

UNKNOWN = "unknown"
GEMMA = "gemma"
# Types of models under Google's Gemma terms; later generations have other licenses.
GEMMA_TYPES = frozenset("gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text".split())
PERMISSIVE = frozenset(
    "apache-2.0 mit curl bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 isc ncsa "
    "postgresql unlicense wtfpl zlib cc0-1.0 pddl public-domain odc-by cdla-permissive-1.0 "
    "cdla-permissive-2.0 etalab-2.0 cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0".split()
)
# huggingface.co/docs/hub/repositories-licenses.
HUB = PERMISSIVE - {"public-domain", "curl"} | frozenset(
    "odbl gfdl afl-3.0 agpl-3.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m "
    "bigscience-bloom-rail-1.0 bigscience-openrail-m c-uda cc cc-by-nc-2.0 cc-by-nc-3.0 "
    "cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 "
    "cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cdla-sharing-1.0 "
    "creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 eupl-1.1 eupl-1.2 "
    "fair-noncommercial-research-license gemma gpl gpl-2.0 gpl-3.0 grok2-community h-research "
    "intel-research lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 llama3.3 "
    "llama4 lppl-1.3c mpl-2.0 ms-pl ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 other "
    "unknown".split()
)
KNOWN = HUB | PERMISSIVE
ALIASES = {
    "cc0": "cc0-1.0",
    "odc-by-1.0": "odc-by",
    "mit-license": "mit",
    "apache-license-2.0": "apache-2.0",
}


def normalize_license(license: str) -> str:
    """Return the hub's name of a license, such as cc-by-nc-4.0 for "CC BY-NC 4.0"; a license that
    the hub does not know keeps its name.
    """
    # Case and separators differ between sources; the hub writes names with hyphens.
    name = "-".join(license.lower().replace("_", " ").split())
    if name in ALIASES:
        name = ALIASES[name]
    elif name.startswith(UNKNOWN):
        name = UNKNOWN
    return name if name in KNOWN else license.strip()


def forbids_commercial_use(license: str | None) -> bool:
    """Return whether a license, known or not, forbids commercial use, judging by its name."""
    # Words of letters and digits, whatever separates them.
    chars = [each if each.isalnum() else " " for each in (license or "").lower()]
    words = "".join(chars).split()
    joined = "".join(words)
    return "nc" in words or "noncommercial" in joined or "notforcommercial" in joined


def list_licenses(data: list[dict] | None) -> list[str]:
    """Return the licenses that the rows of a data record name; "unknown" for a row without one."""
    licenses = []
    for row in data or ():
        named = row.get("license")
        # A row of data may name several licenses, and all of them count.
        several: list[object] = named if isinstance(named, list) and named else [named]
        for name in several:
            if isinstance(name, str) and name.strip():
                licenses.append(normalize_license(name))
            else:
                licenses.append(UNKNOWN)
    return licenses


def count_by_license(data: list[dict] | None) -> list[dict[str, object]]:
    """Return a row per license of the data with its contexts and examples; counts that are not
    recorded are taken as 0.
    """
    totals: dict[str, dict[str, int]] = {}
    for row in data or ():
        name = ", ".join(list_licenses([row]))
        total = totals.setdefault(name, {"contexts": 0, "examples": 0})
        for key in total:
            count = row.get(key)
            if isinstance(count, int):
                total[key] += count
    return [{"license": name, **totals[name]} for name in sorted(totals)]


def combine_licenses(licenses: Iterable[str]) -> str:
    """Return the license of an adapter that was trained on data under these licenses.

    It is a non-commercial one if there is any; else apache-2.0 if all are permissive; else the one
    that is not permissive, if there is just one and its name is known; else "unknown".
    """
    names = set(licenses)
    restrictive = names - PERMISSIVE
    # If several forbid commercial use, the last by name, so that the answer does not depend on
    # the order.
    non_commercial = sorted(filter(forbids_commercial_use, restrictive))
    if non_commercial:
        return non_commercial[-1]
    if names and not restrictive:
        return "apache-2.0"
    # A single license that is not permissive can be kept; two could contradict each other.
    if len(restrictive) == 1 and restrictive < KNOWN - {"other"}:
        return restrictive.pop()
    return UNKNOWN


def find_base_license(card: AdapterCard) -> str | None:
    """Return the license of the base model that its adapters inherit, or None if none is known.

    Gemma's terms count an adapter as a derivative of the model, to be passed on under them.
    """
    architecture = (card.weights or {}).get("architecture")
    model_type = None
    if isinstance(architecture, dict):
        model_type = architecture.get("model_type")
    is_gemma = card.model in (GEMMA3, GEMMA3_ID) or model_type in GEMMA_TYPES
    return GEMMA if is_gemma else None


def inherit_license(card: AdapterCard, data: list[dict] | None) -> str | None:
    """Return the license of an adapter that was trained on `data`, or None if nothing is known.

    It also respects the base model's license and that of the adapter that training began with,
    which `card` describes.
    """
    licenses = list_licenses(data)
    base = find_base_license(card)
    if base:
        licenses.append(base)
    # A permissive license asks for nothing, and says nothing about data that are not recorded.
    before = normalize_license(card.license or "")
    if before and before not in PERMISSIVE:
        licenses.append(before)
    return combine_licenses(licenses) if licenses else None


def find_noncommercial_license(card: AdapterCard) -> str | None:
    """Return a license that forbids commercial use, the adapter's own or one of its data's, or
    None.
    """
    licenses = (card.license, *list_licenses(card.data))
    return next(filter(forbids_commercial_use, licenses), None)
