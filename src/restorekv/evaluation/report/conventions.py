"""Every convention and version of every cell: what all agree in, what differs by condition, and all of it as CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping

from restorekv.evaluation.report.names import Names
from restorekv.evaluation.report.page import Details, Section
from restorekv.evaluation.report.runs import SortedResults
from restorekv.evaluation.tables import table


def section(run: SortedResults, names: Names) -> list[Section]:
    """Returns tables of what is common and of what is not."""
    if not run.results:
        return []
    cells = {result.folder.name: flat(result.facts) for result in run.results}
    keys = list(dict.fromkeys(key for facts in cells.values() for key in facts))
    common = [key for key in keys if len(values(cells.values(), key)) == 1]
    differing = [key for key in keys if key not in common]
    intro = f"{len(run.results)} cells share {len(common)} conventions and versions and differ in {len(differing)}."
    versions = ", ".join(key.partition(".")[2] for key in differing if key.startswith("versions."))
    intro += f" They were not all made with the same versions of {versions}." if versions else ""
    same = [[key, *values(cells.values(), key)] for key in common]
    data = [{"cell": name, **facts} for name, facts in cells.items()]
    title = "The same in all cells"
    blocks = [Details(title, [table("conventions", title, ["convention", "value"], same, "", data, left=(0, 1))])]
    if differing:
        facts = [
            [flat(result.facts) for pool in grid.pools for result in pool.results] for grid in run.conditions.values()
        ]
        rows = [[key, *("; ".join(values(each, key)) for each in facts)] for key in differing]
        head = ["convention", *map(names.condition, run.conditions)]
        title, note = "Where cells differ", "Several values: they differ between the condition's cells."
        blocks.append(Details(title, [table("differences", title, head, rows, note, left=range(len(head)))]))
    return [Section("Conventions and versions", intro, blocks)]


def values(cells: object, key: str) -> list[str]:
    """Returns what the cells say of a convention, each value once."""
    return list(dict.fromkeys(shown(facts.get(key)) for facts in cells))


def flat(facts: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Returns nested facts under names as "benchmark.digest"; RoPE stays one."""
    names: dict[str, object] = {}
    for key, value in facts.items():
        nested = isinstance(value, Mapping) and key != "rope"
        names |= flat(value, f"{before}{key}.") if nested else {before + key: value}
    return names


def shown(value: object) -> str:
    """Returns a value on one line, in which line breaks and spaces at the ends stay visible."""
    if value is None:
        return "–"
    plain = isinstance(value, str) and value and value == value.strip() and "\n" not in value
    return value if plain else json.dumps(value, ensure_ascii=False)
