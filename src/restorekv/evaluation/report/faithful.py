"""Fidelity to the full cache: divergence at the full cache's own answers, and how many answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from restorekv.evaluation.fidelity import summarized
from restorekv.evaluation.report.blocks import Cell, Row, Section, Table, at, number, percent, table
from restorekv.evaluation.report.names import Names, slug
from restorekv.evaluation.report.runs import Place, Run

INTRO = (
    "How far a compressed cache's predictions are from the full cache's, whatever the references say: the mean "
    "KL(full || cache) in nats over the tokens of the full cache's own answers, and the share of answers that have the "
    "very text of the full cache's."
)
NOTE = "Below each divergence its 95 % interval (bootstrap over contexts), then the share of answers that are the same."


def section(run: Run, names: Names) -> list[Section]:
    """Shows a table for every place whose finished cells recorded their fidelity."""
    blocks = [made for place in run.places if (made := of_place(run, names, place))]
    return [Section("Fidelity to the full cache", INTRO, blocks)] if blocks else []


def of_place(run: Run, names: Names, place: Place) -> Table | None:
    """Methods by ratios; None where nothing was recorded."""
    data = list(figures(run, names, place))
    if not data:
        return None
    ratios = sorted({row["ratio"] for row in data}, reverse=True)
    found = {(row["method"], row["ratio"]): row for row in data}
    rows = [
        Row([names.label(method), *(shown(found.get((names.label(method), ratio))) for ratio in ratios)])
        for method in names.of(place)
    ]
    head = ["method", *map(at, ratios)]
    return table(slug("fidelity", names.key(place)), f"{names.place(place)}: fidelity", head, rows, NOTE, data)


def figures(run: Run, names: Names, place: Place) -> Iterator[dict[str, object]]:
    """A row for every finished cell that recorded its fidelity, for the CSV too."""
    for method, by_ratio in run.places[place].cells.items():
        for ratio, pool in by_ratio.items():
            if pool.done and (found := summarized(pool.lines)):
                yield {"method": names.label(method), "ratio": ratio, **found}


def shown(row: Mapping | None) -> Cell:
    if row is None:
        return Cell("–", tone="muted")
    interval = f"{number(row['kl_low'], 3)} to {number(row['kl_high'], 3)}"
    return Cell(number(row["kl"], 3), f"{interval}; {percent(row['same'] / 100, 0)} the same")
