"""The tables of a grid: scores with paired gains and KL to the full cache, and what caches held."""

from collections.abc import Callable, Mapping, Sequence

from restorekv.evaluation.answers_kept import make_kept_table
from restorekv.evaluation.frame import ALL, FULL_CACHE, TASK, GridResults, Row
from restorekv.evaluation.grid import group_by
from restorekv.evaluation.stats import FEW, get_interval
from restorekv.evaluation.tables import (
    Table,
    format_gain,
    format_number,
    format_percent,
    format_score,
    make_slug,
)

SCORES = (
    "Score and further metrics: points, 0 to 100. Gain: over the base at the same ratio, paired "
    "(▲ restored scores higher, ▼ lower), and the share of the base's loss that came back. KL: "
    "mean KL(full || cache) in nats over the tokens of the full cache's own answers; same: answers "
    "with the very text of the full cache's. In parentheses: 95 % bootstrap intervals over "
    f"contexts; fewer than {FEW} contexts have none."
)
HELD = (
    "Means over contexts, and what that is of the full cache's: of the pairs that compete for the "
    "budget, of all pairs with the prefix, of the bytes. Bytes count whatever a cache holds."
)


def score_text(row: Row) -> str:
    """Return a score with its interval, or how far the cells have come."""
    if not row["done"]:
        return f"running ({row['answered']} of {row['of']} contexts)"
    return format_score(row["score"], *get_interval(row))


def gain_text(row: Row) -> str:
    """Return the paired gain over the base, its interval and the share of loss that came back."""
    if "gain" not in row:
        return ""
    recovered = row.get("recovered")
    back = "" if recovered is None else f"{format_percent(recovered, 0)} back"
    return format_gain(row["gain"], *get_interval(row, "gain_"), back)


def fidelity_text(row: Row) -> str:
    """Return KL with its interval; the full cache is what others are compared with."""
    if "kl" not in row or row["method"] == FULL_CACHE:
        return ""
    return format_score(row["kl"], *get_interval(row, "kl_"), 3)


def contexts_text(row: Row) -> str:
    """Return how many contexts are answered, and of how many where cells still run."""
    return f"{row['answered']:,}" if row["done"] else f"{row['answered']} of {row['of']}"


def size_text(size: str, share: str) -> Callable[[Row], str]:
    """Return a column with a mean size and what it is of the full cache's."""
    return lambda row: f"{row[size]:,.0f} ({format_percent(row.get(share), 2)})"


NAMES: Mapping[str, Callable[[Row], str]] = {
    "part": lambda row: row["part"],
    "method": lambda row: row["method"],
    "r": lambda row: f"{row['ratio']:g}",
}
SCORE_COLUMNS = NAMES | {
    "score": score_text,
    "gain": gain_text,
    "KL": fidelity_text,
    "same": lambda row: format_percent(row["same"] / 100, 0) if fidelity_text(row) else "",
}
HELD_COLUMNS = NAMES | {
    "pairs": size_text("pairs", "kept"),
    "pairs with prefix": size_text("pairs_with_prefix", "kept_with_prefix"),
    "bytes": size_text("bytes", "of_full"),
    "restore tokens": lambda row: format_number(row["restore_tokens"]),
    "prefix": lambda row: f"{row['prefix']:,.0f}",
    "context": lambda row: f"{row['tokens']:,.0f}",
    "contexts": contexts_text,
}


def scores_table(rows: Sequence[Row], kind: str = ALL) -> Table:
    """Return the scores of one condition over all tasks, or by group of tasks or by task."""
    own = [row for row in rows if row["kind"] == kind]
    where = own[0]["condition"]
    what = "scores" if kind == ALL else f"scores by {kind}"
    metrics = dict.fromkeys(key for row in own for key in row if key.startswith("metric "))
    columns = dict(SCORE_COLUMNS)
    for key in metrics:
        title = key.removeprefix("metric ").replace("_", " ")
        columns[title] = lambda row, key=key: format_number(row.get(key))
    paired = [row["as_many_pairs"] for row in own if "as_many_pairs" in row]
    notes = [SCORES]
    if paired and all(paired):
        notes.append("Both rows of a pair hold the same number of KV pairs, context by context.")
    elif paired:
        unlike = len(paired) - sum(paired)
        count = f"{unlike} of {len(paired)} pairs"
        notes.append(f"In {count} restored and base hold different numbers of KV pairs.")
    if left_out := own[0].get("left_out"):
        every = ", ".join(dict.fromkeys(row["part"] for row in rows if row["kind"] == TASK))
        if left_out == every:
            notes.append("The full cache is below 10 on every task: there is nothing to lose.")
        else:
            notes.append(f"Left out of means, because the full cache is below 10: {left_out}.")
    name = make_slug(what, own[0]["name"])
    return Table.from_figures(name, f"{where}: {what}", own, columns, " ".join(notes), (0, 1))


def held_table(rows: Sequence[Row]) -> Table:
    """Return pairs and bytes of one condition's caches, means over the contexts answered so far."""
    held = [row for row in rows if row["kind"] == ALL and "pairs" in row]
    where = rows[0]["condition"]
    title = f"{where}: what the caches held"
    return Table.from_figures(make_slug("held", rows[0]["name"]), title, held, HELD_COLUMNS, HELD)


def count_gains(rows: Sequence[Row]) -> str:
    """Say how many pairs of a base and its restored cell improve, and how surely."""
    pairs = [row for row in rows if row["kind"] == ALL and "gain" in row]
    if not pairs:
        return ""
    intervals = [
        interval for row in pairs if (interval := get_interval(row, "gain_"))[0] is not None
    ]
    more = sum(row["gain"] > 0 for row in pairs)
    above = sum(low > 0 for low, _ in intervals)
    below = sum(high < 0 for _, high in intervals)
    text = f"{more} of {len(pairs)} paired cells improve, "
    text += f"{above} of them with a 95 % interval above zero; "
    text += f"{below or 'none'} with one below zero."
    if few := len(pairs) - len(intervals):
        text += f" {few} have fewer than {FEW} contexts, too few for an interval."
    return text


def tables_of(grid: GridResults) -> list[Table]:
    """Return scores and sizes of every condition and the answers kept, as `restorekv eval` prints
    them.
    """
    by_condition = group_by(grid.rows(), lambda row: row["condition"])
    tables = [make(rows) for rows in by_condition.values() for make in (scores_table, held_table)]
    kept = make_kept_table(grid)
    return [*tables, kept] if kept else tables
