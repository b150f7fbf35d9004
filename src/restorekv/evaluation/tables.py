"""Rows of `grid.rows` as rich tables, and what methods are called."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

FULL = "full"
Rows = Sequence[Mapping]
NAMES = {
    "kvzip": "KVzip",
    "kvzip+": "KVzip+",
    "contrastkv": "ContrastKV",
    "contrastkv-simple": "ContrastKV (simplified)",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "fastkvzip": "Fast KVzip",
    "am-fast": "AM-fast",
    "kvzap": "KVzap",
    "expected-attention": "Expected Attention",
    "keydiff": "KeyDiff",
    "knorm": "Knorm",
    "streaming": "StreamingLLM",
    "tova": "TOVA",
    "random": "Random",
    "full": "Full cache",
}
RESTORED = {"kvzip": "RestoreKV", "kvzip+": "RestoreKV+"}


def name(evictor: str, restored: bool) -> str:
    """What the paper calls a method."""
    base = NAMES.get(evictor, evictor)
    return RESTORED.get(evictor, f"{base} + RestoreKV") if restored else base


def scores(rows: Rows) -> list[Table]:
    """A table for every model, benchmark and protocol: methods by ratios, score with its 95 % interval.

    Restored rows tell what they recover of the base's loss.
    """
    places = dict.fromkeys((row["model"], row["benchmark"], row["protocol"]) for row in rows)
    return [scores_of([row for row in rows if place(row) == each]) for each in places]


def fidelity(rows: Rows) -> list[Table]:
    """Returns a table for every model, benchmark and protocol whose answers were compared with the full cache's."""
    measured = [row for row in rows if row.get("kl") is not None and row["evictor"] != FULL]
    places = dict.fromkeys(map(place, measured))
    return [fidelity_of([row for row in measured if place(row) == each]) for each in places]


def fidelity_of(rows: Rows) -> Table:
    """Of one model, benchmark and protocol: KL with its interval, and the share of answers that stay the same."""
    cells = {(method(row), row["ratio"]): row for row in rows}
    first, ratios = rows[0], sorted({row["ratio"] for row in rows}, reverse=True)
    table = Table(
        title=f"{first['benchmark']}, {first['model']}, protocol {first['protocol']}: fidelity to the full cache",
        min_width=72,
        caption="mean KL(full || cache) in nats over the tokens of the full cache's answers (95 % interval); "
        "share of answers with the full cache's text",
    )
    table.add_column("method", no_wrap=True)
    for ratio in ratios:
        table.add_column(f"r = {ratio:g}", justify="right")
    for key in dict.fromkeys(map(method, rows)):
        found = [cells.get((key, ratio)) for ratio in ratios]
        table.add_row(titled(*key), *map(_fidelity, found), style="bold" if key[1] else None, end_section=key[1])
    return table


def _fidelity(row: Mapping | None) -> str:
    if row is None:
        return "not measured"
    return f"{row['kl']:.3f} ({row['kl_low']:.2f}-{row['kl_high']:.2f})\n{row['same']:.0f}% the same"


def place(row: Mapping) -> tuple[str, str, str]:
    return row["model"], row["benchmark"], row["protocol"]


def scores_of(rows: Rows) -> Table:
    """Of one model, benchmark and protocol."""
    cells = {(method(row), row["ratio"]): row for row in rows}
    ratios = sorted({row["ratio"] for row in rows if row["evictor"] != FULL}, reverse=True)
    full = next((row for row in rows if row["evictor"] == FULL), None)
    first = rows[0]
    table = Table(
        title=f"{first['benchmark']}, {first['model']}, protocol {first['protocol']}: score (95 % interval), "
        f"{first['questions']} questions on {first['samples']} contexts",
        min_width=72,
        caption=(f"full cache: {_score(full)}; " if full else "")
        + "last, where restored: share of the base's loss that came back"
        + left_out(first),
    )
    table.add_column("method", no_wrap=True)
    for ratio in ratios:
        table.add_column(f"r = {ratio:g}", justify="right")
    for key in dict.fromkeys(method(row) for row in rows if row["evictor"] != FULL):
        told = [cells.get((key, ratio)) for ratio in ratios]
        restored = key[1]
        table.add_row(titled(*key), *map(_score, told), style="bold" if restored else None, end_section=restored)
    return table


def left_out(row: Mapping) -> str:
    """Says which tasks the scores leave out, with the full cache's mark."""
    below, every = row.get("left_out") or [], row["tasks"]
    if not below:
        return ""
    if len(below) == len(every):
        return "; the full cache is below 10 on every task: there is nothing to lose"
    return f"; left out: full cache below 10 ({', '.join(below)})"


def method(row: Mapping) -> tuple[str, bool, str]:
    """Evictor, restored or not, and what tells it from others of the kind."""
    return row["evictor"], row["restored"], row["label"]


def titled(evictor: str, restored: bool, label: str) -> str:
    return name(evictor, restored) + (f" ({label})" if label else "")


def _score(row: Mapping | None) -> str:
    if row is None:
        return "running"
    text = f"{row['score']:.1f} ({row['low']:.0f}-{row['high']:.0f})"
    share = row.get("recovered")
    return text if share is None else f"{text}\n{share:+.0%}"


def metrics(rows: Rows) -> list[Table]:
    """Returns a table of further metrics for every model, benchmark and protocol that has any."""
    measured = [row for row in rows if row.get("metrics")]
    return [metrics_of([row for row in measured if place(row) == each]) for each in dict.fromkeys(map(place, measured))]


def metrics_of(rows: Rows) -> Table:
    """Of one model, benchmark and protocol, in points: the score and what is reported beside it."""
    first, names = rows[0], list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    table = Table(title=f"{first['benchmark']}, {first['model']}, protocol {first['protocol']}: further metrics")
    for title in ("method", "r", "score", *(name.replace("_", " ") for name in names)):
        table.add_column(title, justify="left" if title == "method" else "right")
    for row in rows:
        figures = (f"{row['metrics'].get(name, math.nan):.1f}" for name in names)
        table.add_row(titled(*method(row)), f"{row['ratio']:g}", f"{row['score']:.1f}", *figures)
    return table


def held(rows: Rows) -> Table:
    """Pairs and bytes a context's cache holds, on average, and the real ratio with the prefix."""
    table = Table(title="Held per context (mean): KV pairs in the budget, pairs with the chat prefix, bytes")
    for title in ("method", "r", "pairs", "with prefix", "bytes", "share of full"):
        table.add_column(title, justify="left" if title == "method" else "right")
    full = {place(row): row["bytes"] for row in rows if row["evictor"] == FULL}
    for row in rows:
        share = f"{row['bytes'] / full[place(row)]:.1%}" if place(row) in full else ""
        table.add_row(
            titled(*method(row)), f"{row['ratio']:g}", f"{row['pairs']:,.0f}", f"{row['pairs_with_prefix']:,.0f}",
            f"{row['bytes']:,.0f}", share,
        )  # fmt: skip
    return table
