"""The tables of a grid: scores with paired gains and KL to the full cache, and what caches held."""

import math
from collections.abc import Callable, Mapping, Sequence

from restorekv.evaluation.answers_kept import make_kept_table
from restorekv.evaluation.conditions import FULL_CACHE
from restorekv.evaluation.frame import ALL, TASK, GridResults, Row
from restorekv.evaluation.grid import group_by
from restorekv.evaluation.results import Result
from restorekv.evaluation.stats import MIN_FOR_INTERVAL, MIN_FOR_RANKING
from restorekv.evaluation.tables import (
    Table,
    format_gain,
    format_number,
    format_percent,
    format_score,
    make_slug,
)

SCORES = (
    "Score and further metrics: points, 0 to 100. Gain: over the evictor alone at the same ratio, "
    "paired (▲ restored scores higher, ▼ lower, ≈ either is possible){back}. KL: mean "
    "KL(full || cache) in nats over the tokens of the full cache's own answers; same: answers with "
    "the very text of the full cache's. "
    "In parentheses: 95 % bootstrap intervals over contexts; "
    f"fewer than {MIN_FOR_INTERVAL} contexts have none."
)
# Replaces {back} if a row shows that share.
BACK = ", and the share of its loss that came back, where it is a point or more"
HELD = (
    "Means over contexts. In parentheses: of the pairs that compete for the budget and of all "
    "pairs with the prefix, the mean of each context's share; of bytes, the mean's share of the "
    "full cache's. Bytes count whatever a cache holds."
)


def _format_score(row: Row) -> str:
    if not row["done"]:
        return f"running ({row['answered']} of {row['of']} contexts)"
    return format_score(row["score"], row["low"], row["high"])


def _shows_recovered(row: Row) -> bool:
    """Return whether to show the share of the loss that came back. Like the interval, it says
    nothing on a handful of texts.
    """
    return row.get("recovered") is not None and row["gain_low"] is not None


def _format_gain(row: Row) -> str:
    if "gain" not in row:
        return ""
    recovered = row.get("recovered")
    back = ""
    if _shows_recovered(row):
        back = f"{format_percent(recovered, 0)} back"
    few = row["gain_low"] is None
    return format_gain(row["gain"], row["gain_low"], row["gain_high"], back, few)


def _has_fidelity(row: Row) -> bool:
    """Return whether to show the distance to the full cache; the full cache's own row has none."""
    return "kl" in row and row["method"] != FULL_CACHE


def _format_divergence(row: Row) -> str:
    if _has_fidelity(row):
        return format_score(row["kl"], row["kl_low"], row["kl_high"], 3)
    return ""


def _format_same(row: Row) -> str:
    return format_percent(row["same"] / 100, 0) if _has_fidelity(row) else ""


def _format_size(row: Row, size: str, share: str) -> str:
    return f"{row[size]:,.0f} ({format_percent(row.get(share), 2)})"


NAMES: Mapping[str, Callable[[Row], str]] = {
    "part": lambda row: row["part"],
    "method": lambda row: row["method"],
    "r": lambda row: f"{row['ratio']:g}",
}
SCORE_COLUMNS = NAMES | {
    "score": _format_score,
    "gain": _format_gain,
    "KL": _format_divergence,
    "same": _format_same,
}
HELD_COLUMNS = NAMES | {
    "pairs": lambda row: _format_size(row, "pairs", "kept"),
    "pairs with prefix": lambda row: _format_size(row, "pairs_with_prefix", "kept_with_prefix"),
    "bytes": lambda row: _format_size(row, "bytes", "of_full"),
    "restore tokens": lambda row: format_number(row["restore_tokens"]),
    "prefix": lambda row: f"{row['prefix']:,.0f}",
    "context": lambda row: f"{row['tokens']:,.0f}",
    "contexts": lambda row: str(row["answered"]) + ("" if row["done"] else f" of {row['of']}"),
}


def make_scores_table(rows: Sequence[Row], kind: str = ALL) -> Table:
    """Return the scores of one condition over all tasks, or by group of tasks or by task."""
    own = [row for row in rows if row["kind"] == kind]
    what = "scores" if kind == ALL else f"scores by {kind}"
    columns = dict(SCORE_COLUMNS)
    # Benchmarks with further metrics get a column for each.
    for key in dict.fromkeys(key for row in own for key in row if key.startswith("metric ")):
        title = key.removeprefix("metric ").replace("_", " ")
        columns[title] = lambda row, key=key: format_number(row.get(key))
    back = BACK if any(map(_shows_recovered, own)) else ""
    notes = [SCORES.format(back=back)]
    if max(row.get("contexts", 0) for row in own) < MIN_FOR_RANKING:
        notes.append(f"Fewer than {MIN_FOR_RANKING} contexts are a glimpse, which ranks nothing.")
    if len({row.get("seeds") for row in own if row["done"]}) > 1:
        notes.append(
            "Rows of fewer seeds than others were asked fewer texts: do not compare their scores. "
            "The table of what the caches held counts the contexts of each."
        )
    # A gain is a fair comparison only if both rows hold the same number of pairs.
    paired = [row["as_many_pairs"] for row in own if "as_many_pairs" in row]
    if paired and all(paired):
        notes.append("Both rows of a pair hold the same number of KV pairs, context by context.")
    elif paired:
        count = f"{len(paired) - sum(paired)} of {len(paired)} pairs"
        notes.append(f"In {count} the two rows hold different numbers of KV pairs.")
    if left_out := own[0].get("left_out"):
        if left_out == ", ".join(dict.fromkeys(row["part"] for row in rows if row["kind"] == TASK)):
            notes.append(
                "The full cache is below 10 on every task, so scores say little; the distance to "
                "its answers and the answers kept say more."
            )
        else:
            notes.append(f"Left out of means, because the full cache is below 10: {left_out}.")
    name = make_slug(what, own[0]["name"])
    title = f"{own[0]['condition']}: {what}"
    return Table.from_figures(
        name, title, own, columns, " ".join(notes), left=(0, 1), keys=len(NAMES)
    )


def make_held_table(rows: Sequence[Row]) -> Table:
    """Return pairs and bytes of one condition's caches, means over the contexts answered so far."""
    held = [row for row in rows if row["kind"] == ALL and "pairs" in row]
    title = f"{rows[0]['condition']}: what the caches held"
    return Table.from_figures(
        make_slug("held", rows[0]["name"]), title, held, HELD_COLUMNS, HELD, keys=len(NAMES)
    )


def describe_cut_texts(results: Sequence[Result]) -> list[str]:
    """Say for each benchmark how many of its texts were too long: how many lost their ends, and how
    many reach beyond the positions that the model was made for, for example because the tokenizer
    states no limit.
    """
    cut_counts: dict[str, tuple[int, int]] = {}
    beyond_counts: dict[str, tuple[int, int]] = {}
    for result in results:
        title = result.identity["benchmark"]["title"]
        # Results of earlier versions do not record the positions.
        positions = result.identity.get("positions", math.inf)
        cut = sum(line["cut"] > 0 for line in result.lines)
        beyond = sum(line["prefix"] + line["tokens"] > positions for line in result.lines)
        for counts, count in ((cut_counts, cut), (beyond_counts, beyond)):
            if count:
                counts[title] = max(counts.get(title, (0, 0)), (count, len(result.lines)))
    notes = []
    for title, (count, texts) in cut_counts.items():
        notes.append(
            f"{title}: {count} of {texts} texts were longer than the model's positions or "
            "--max-context, and their ends were not read."
        )
    for title, (count, texts) in beyond_counts.items():
        notes.append(
            f"{title}: {count} of {texts} texts reach beyond the positions that the model was made "
            "for, where answers are bad with any cache; --max-context cuts them."
        )
    return notes


def count_gains(rows: Sequence[Row]) -> str:
    """Say in how many pairs restoring scores higher than the evictor alone, and how many of the
    gains have intervals that exclude zero.
    """
    pairs = [row for row in rows if row["kind"] == ALL and "gain" in row]
    if not pairs:
        return ""
    sure = [row for row in pairs if row["gain_low"] is not None]
    more = sum(row["gain"] > 0 for row in pairs)
    above = sum(row["gain_low"] > 0 for row in sure)
    below = sum(row["gain_high"] < 0 for row in sure)
    text = (
        f"{more} of {len(pairs)} paired cells improve, {above} of them with a 95 % interval above "
        f"zero; {below or 'none'} with one below zero."
    )
    if few := len(pairs) - len(sure):
        have = "has" if few == 1 else "have"
        text += f" {few} {have} fewer than {MIN_FOR_INTERVAL} contexts, too few for an interval."
    return text


def make_tables(grid: GridResults) -> list[Table]:
    """Return what `restorekv eval` prints: scores and sizes by condition, and the answers kept."""
    tables = []
    for rows in group_by(grid.list_rows(), lambda row: row["condition"]).values():
        tables += [make_scores_table(rows), make_held_table(rows)]
    kept = make_kept_table(grid)
    return [*tables, kept] if kept else tables
