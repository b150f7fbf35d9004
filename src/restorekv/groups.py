"""Methods by groups of tasks (Table 1 of the paper, in small): every base beside itself with RestoreKV, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from restorekv.bundled.world import GROUPS
from restorekv.tables import name

Rows = Sequence[Mapping]  # of `Evaluation.rows`, or read from `restorekv eval --json`


def paired(rows: Rows, ratios: Iterable[float]) -> dict[tuple[str, str, float], Mapping]:
    """The cells that compare a method with itself restored: (method, group, ratio) -> score and gain."""
    wanted = set(ratios)
    return {
        (row["evictor"], group, row["ratio"]): cell
        for row in rows
        if row["restored"] and row["ratio"] in wanted
        for group, cell in row["groups"].items()
    }


def verdict(rows: Rows, ratios: Iterable[float]) -> str:
    """How many cells improve, and which do not, in words."""
    cells = paired(rows, ratios)
    better = [cell for cell in cells.values() if cell["gain"] > 0]
    sure = sum(cell["gain_low"] > 0 for cell in better)
    others = "; ".join(
        f"{name(method, False)}, {group}, r = {ratio:g}: {span(cell, 'gain', 'gain_low', 'gain_high', sign='+')}"
        for (method, group, ratio), cell in cells.items()
        if cell["gain"] <= 0
    )
    told = f"**{len(better)} of {len(cells)} paired cells improve**, {sure} of them with an interval above zero."
    return f"{told} Not improved: {others}." if others else told


def markdown(rows: Rows, ratios: Sequence[float]) -> str:
    """One table a group: rows are methods, columns ratios; restored cells tell the paired gain with its interval."""
    cells = {(row["evictor"], row["restored"], row["ratio"]): row for row in rows}
    methods = list(dict.fromkeys((row["evictor"], row["restored"]) for row in rows if row["evictor"] != "full"))
    full = next((row for row in rows if row["evictor"] == "full"), None)
    parts = []
    for group in GROUPS:
        head = f"### {group[0].upper()}{group[1:]}\n\n" + ", ".join(GROUPS[group])
        if full and group in full["groups"]:
            whole = full["groups"][group]
            head += f"; {whole['questions']} questions; full cache {span(whole, 'score', 'low', 'high')}"
        lines = ["| method |" + "".join(f" r = {ratio:g} |" for ratio in ratios), "|---" * (len(ratios) + 1) + "|"]
        for evictor, restored in methods:
            found = (cells.get((evictor, restored, ratio), {"groups": {}})["groups"].get(group) for ratio in ratios)
            label = f"**{name(evictor, True)}**" if restored else name(evictor, False)
            lines.append(f"| {label} |" + "".join(f" {told(cell)} |" for cell in found))
        parts.append(head + "\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def told(cell: Mapping | None) -> str:
    """A cell of the table."""
    if cell is None:
        return ""
    text = span(cell, "score", "low", "high")
    return f"{text}, {span(cell, 'gain', 'gain_low', 'gain_high', sign='+')}" if "gain" in cell else text


def span(cell: Mapping, *keys: str, sign: str = "") -> str:
    """ "93.5 (91 to 96)", or with signs."""
    middle, low, high = (cell[key] for key in keys)
    return f"{middle:{sign}.1f} ({low:{sign}.0f} to {high:{sign}.0f})"
