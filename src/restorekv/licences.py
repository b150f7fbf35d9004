"""What may be done with an adapter, told by the licences of the data it was trained on; no legal advice.

Names are those of the Hugging Face hub (huggingface.co/docs/hub/repositories-licenses). A rung of the table takes all
that the rungs before it take: 0 asks for attribution at most, 1 for the same licence, 2 and 3 forbid commercial use.
"""

import re
from collections.abc import Iterable

UNKNOWN = "unknown: ask whoever trained it"
PERMISSIVE = "apache-2.0"
RUNGS = (
    "apache-2.0 mit bsd-2-clause bsd-3-clause isc unlicense cc0-1.0 pddl public-domain odc-by "
    "cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0",
    "cc-by-sa-3.0 cc-by-sa-4.0 odbl gfdl",
    "cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0",
    "cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0",
)
RUNG = {name: number for number, names in enumerate(RUNGS) for name in names.split()}
OTHER_NAMES = {
    "odc-by-1.0": "odc-by",
    "cc0": "cc0-1.0",
    "pddl-1.0": "pddl",
    "odbl-1.0": "odbl",
    "apache-2": "apache-2.0",
}


def identifier(licence: str) -> str:
    """The hub's name: "CC BY-NC 4.0" is cc-by-nc-4.0; a licence that is not in the table stays as it is."""
    name = re.sub(r"[\s_]+", "-", licence.strip().lower())
    name = re.sub(r"-licen[cs]e", "", name)
    name = OTHER_NAMES.get(name, name)
    return name if name in RUNG else licence.strip()


def of_data(licences: Iterable[str | None]) -> str:
    """The licence of an adapter trained on data under these: the most restrictive one.

    apache-2.0 where all are permissive; UNKNOWN where there is none, or one that is not in the table.
    """
    names = [identifier(licence or "") for licence in licences]
    if not names or any(name not in RUNG for name in names):
        return UNKNOWN
    strictest = max(names, key=lambda name: RUNG[name])
    return strictest if RUNG[strictest] else PERMISSIVE


def of_rows(data: list[dict] | None) -> list[str | None]:
    """The licences that a record of data names, one or a list of them in every row; None for a row without."""
    told = [row.get("licence") for row in data or ()]
    flat = [name for names in told for name in (names if isinstance(names, list) else [names])]
    return [identifier(name) if isinstance(name, str) else None for name in flat]


def non_commercial(licence: str | None) -> bool:
    """Whether its name says so, in the table or not."""
    return bool(licence) and bool(re.search(r"(?<![a-z])nc(?![a-z])|non[ -]?commercial", licence.lower()))


def title(licence: str) -> str:
    """As people write it: CC BY-NC 4.0."""
    return re.sub(r"^cc-([a-z-]+)-([\d.]+)$", lambda part: f"CC {part[1].upper()} {part[2]}", licence)
