"""What may be done with an adapter, told by the licences of the data it was trained on; no legal advice.

Names are those of the Hugging Face hub (huggingface.co/docs/hub/repositories-licenses). A rung takes all that the
rungs before it take: 0 asks for attribution at most, 1 for the same licence, 2 and 3 forbid commercial use. Licences
that are known and on no rung (GPL, no derivatives, Llama, ...) leave open what follows for an adapter.
"""

import re
from collections.abc import Iterable

UNKNOWN = "unknown: ask whoever trained it"
PERMISSIVE = "apache-2.0"
NC_SA = "cc-by-nc-sa-4.0"
VERSIONS = ("1.0", "2.0", "2.1", "2.5", "3.0", "4.0")  # of Creative Commons
FREE = (
    "apache-2.0 mit bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 isc ncsa postgresql unlicense wtfpl zlib "
    "cc0-1.0 pddl public-domain odc-by cdla-permissive-1.0 cdla-permissive-2.0 etalab-2.0"
)
LADDER = {"cc-by": 0, "cc-by-sa": 1, "cc-by-nc": 2, "cc-by-nc-sa": 3}
RUNG = {
    **dict.fromkeys(FREE.split(), 0),
    **dict.fromkeys(("odbl", "gfdl"), 1),
    **{f"{kind}-{version}": rung for kind, rung in LADDER.items() for version in VERSIONS},
}
HUB = frozenset(
    (
        FREE.replace(" public-domain", "") + " odbl gfdl afl-3.0 agpl-3.0 apple-amlr apple-ascl artistic-2.0 "
        "bigcode-openrail-m bigscience-bloom-rail-1.0 bigscience-openrail-m c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 "
        "cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 "
        "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cdla-sharing-1.0 creativeml-openrail-m "
        "deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gpl "
        "gpl-2.0 gpl-3.0 grok2-community h-research intel-research lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 "
        "llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mpl-2.0 ms-pl ofl-1.1 openmdw-1.0 openrail openrail++ osl-3.0 "
        "other unknown"
    ).split()
)
KNOWN = HUB | set(RUNG) | {f"{kind}-{version}" for kind in ("cc-by-nd", "cc-by-nc-nd") for version in VERSIONS}
PLACES = (
    (r"^(?:https?://)?(?:www\.)?(?=\w+\.(?:org|com)/)", ""),
    (r"^creativecommons\.org/licenses/", "cc-"),
    (r"^creativecommons\.org/publicdomain/zero/", "cc0-"),
    (r"^creativecommons\.org/publicdomain/mark/.*", "public-domain"),
    (r"^opendatacommons\.org/licenses/by\b", "odc-by"),
    (r"^apache\.org/licenses/license-", "apache-"),
    (r"^(?:opensource|spdx|gnu|opendatacommons|choosealicense)\.(?:org|com)/licenses?/", ""),
    (r"(?:\.[a-z]{2})?\.(?:html|txt)$|/(?:deed|legalcode)[\w.]*/?$|\+$", ""),
)
WORDS = (
    (r"""[\s_/,()"'“”–-]+""", "-"),
    (r"\bv(?=\d)", ""),
    (r"\b(?:the|gnu|licen[cs]e|version|international|unported|universal|generic|agreement|community)(?:-|$)", ""),
    (r"-(?:only|or-later|terms-of-use|dedication|new-or-revised|simplified)\b", ""),
    (r"^open-data-commons", "odc"),
    (r"creative-commons", "cc"),
    (r"attribution", "by"),
    (r"non-?commercial", "nc"),
    (r"share-?alike", "sa"),
    (r"no-?deriv(?:ative)?s?(?:-works)?", "nd"),
    (r"general-public", "gpl"),
    (r"^free-documentation.*", "gfdl"),
    (r"(lesser|affero)-gpl", lambda found: found[1][0] + "gpl"),
    (r"(gpl|llama)v?-?(?=\d)", lambda found: found[1] + "-" * (found[1] == "gpl")),
    (r"^(\d)-clause-bsd", r"bsd-\1-clause"),
    (r"^cc-?zero", "cc0"),
    (r"^cc0$", "cc0-1.0"),
    (r"^odc-public-domain.*", "pddl"),
    (r"^(?:odc-)?open-database.*", "odbl"),
    (r"^public-domain-.*", "public-domain"),
    (r"^(odc-by|odbl|pddl|gfdl)-\d.*", r"\1"),
    (r"^mozilla-public", "mpl"),
    (r"(?<=\d)-(?=\d$)", "."),
    (r"^-|-$", ""),
    (r"^(.+)-\1$", r"\1"),
)


def identifier(licence: str) -> str:
    """The hub's name from SPDX's, a full one or an address: "CC BY-NC 4.0" is cc-by-nc-4.0; what is unknown stays."""
    name = licence.strip().lower()
    if (plain := re.sub(r"[\s_]+", "-", name)) in KNOWN:
        return plain
    for pattern, instead in (*PLACES, *WORDS):
        name = re.sub(pattern, instead, name)
    if found := re.fullmatch(r"cc-by((?:-(?:nc|sa|nd))*)-(\d(?:\.\d)?)(?:-[a-z]{2,3})?", name):
        name = "-".join(["cc-by", *(part for part in ("nc", "sa", "nd") if part in found[1]), found[2]])
    return next((each for each in (name, name + ".0") if each in KNOWN), licence.strip())


def known(licence: str) -> bool:
    """Whether it is a licence with a name, on a rung or not."""
    return identifier(licence) in KNOWN


def of_data(licences: Iterable[str | None]) -> str:
    """The licence of an adapter trained on data under these: the strictest one, the newest of its rung.

    PERMISSIVE where all are permissive; NC_SA where one asks for the same licence and another forbids commercial use;
    UNKNOWN where there is none or one on no rung, unless another one forbids commercial use.
    """
    names = [identifier(licence or "") for licence in licences]
    placed = [name for name in names if name in RUNG]
    strictest = max(placed, key=lambda name: (RUNG[name], version(name), name), default=None)
    if strictest is None or (len(placed) < len(names) and RUNG[strictest] < LADDER["cc-by-nc"]):
        return UNKNOWN
    if RUNG[strictest] == LADDER["cc-by-nc"] and any(RUNG[name] == LADDER["cc-by-sa"] for name in placed):
        return NC_SA
    return strictest if RUNG[strictest] else PERMISSIVE


def version(name: str) -> str:
    """The number at the end of a name, "" where there is none."""
    found = re.search(r"-(\d\.\d)$", name)
    return found[1] if found else ""


def of_row(row: dict) -> list[str | None]:
    """The licences that a row of a record of data names; None for a row without."""
    names = row.get("licence")
    names = names if isinstance(names, list) and names else [names]
    return [identifier(name) if isinstance(name, str) and name.strip() else None for name in names]


def of_rows(data: list[dict] | None) -> list[str | None]:
    """Of all rows."""
    return [name for row in data or () for name in of_row(row)]


def non_commercial(licence: str | None) -> bool:
    """Whether its name says so, on a rung or not."""
    words = r"(?<![a-z])nc(?![a-z])|non[ _-]?commercial|not for commercial"
    return bool(licence) and bool(re.search(words, licence.lower()))


def asks_for_names(licence: str | None) -> bool:
    """Whether it asks that the authors of the data be named."""
    return bool(licence) and licence.startswith(("cc-by", "odc-by", "odbl", "gfdl", "etalab"))


def title(licence: str) -> str:
    """As people write it: CC BY-NC 4.0."""
    return re.sub(r"^cc-([a-z-]+)-([\d.]+)$", lambda part: f"CC {part[1].upper()} {part[2]}", licence)
