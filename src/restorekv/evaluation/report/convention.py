"""Every convention of every cell: what all agree in once, what differs by method, and all of it as CSV."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from restorekv.evaluation.report.blocks import Details, Row, Section, Table, table
from restorekv.evaluation.report.names import Names
from restorekv.evaluation.report.runs import Place, Run


def section(run: Run, names: Names) -> list[Section]:
    """Tables of what is common and of what is not."""
    if not run.results:
        return []
    cells = {result.folder.name: flat(result.facts) for result in run.results}
    keys = list(dict.fromkeys(key for facts in cells.values() for key in facts))
    values = {key: {shown(facts.get(key)) for facts in cells.values()} for key in keys}
    common = [key for key in keys if len(values[key]) == 1]
    differing = [key for key in keys if key not in common]
    versions = [key for key in differing if key.startswith("versions.")]
    told = f"{len(run.results)} cells share {len(common)} conventions and versions and differ in {len(differing)}."
    if versions:
        names_of = ", ".join(key.partition(".")[2] for key in versions)
        told += f" They were not all made with the same versions of {names_of}."
    data = [{"cell": name, **facts} for name, facts in cells.items()]
    same = [[key, *values[key]] for key in common]
    first = table("conventions", "The same in all cells", ["convention", "value"], same, "", data, left=(0, 1))
    return [
        Section(
            "Conventions and versions",
            told,
            [Details("The same in all cells", [first]), *by_place(run, names, differing)],
        )
    ]


def by_place(run: Run, names: Names, keys: list[str]) -> Iterator[Details]:
    """For every place what differs somewhere in the run, a column a method."""
    for place in run.places:
        made = of_place(run, names, place, keys)
        if made:
            yield Details(f"{names.place(place)}: conventions", [made])


def of_place(run: Run, names: Names, place: Place, keys: list[str]) -> Table | None:
    """Rows are conventions, columns the full cache and the methods."""
    grid = run.places[place]
    columns = [("full cache", grid.full)] if grid.full else []
    columns += [(names.label(method), next(iter(grid.cells[method].values()))) for method in names.of(place)]
    facts = [flat(pool.facts) for _, pool in columns]
    rows = [Row([key, *(shown(mine.get(key)) for mine in facts)]) for key in keys]
    head = ["convention", *(label for label, _ in columns)]
    if not rows:
        return None
    note = "Of what differs between ratios or seeds, that of the first cell; the CSV of all cells has every one."
    left = range(len(head))
    return table(
        f"conventions-{names.key(place)}", f"{names.place(place)}: where cells differ", head, rows, note, left=left
    )


def flat(facts: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Nested facts as "benchmark.digest"; RoPE stays one."""
    found: dict[str, object] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping) and key != "rope":
            found |= flat(value, f"{before}{key}.")
        else:
            found[before + key] = value
    return found


def shown(value: object) -> str:
    """On one line; line breaks and spaces at the ends stay visible."""
    if value is None:
        return "–"
    if isinstance(value, str):
        plain = value == value.strip() and "\n" not in value and value
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)
