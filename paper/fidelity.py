"""How far each row's caches are from the full one: KL(full || cache) and the share of equal
answers, in addition to the scores.

Every task counts, also those on which the full cache scores so low that there is nothing to lose. A
row's KL is the mean over all tokens of the full cache's answers, then over seeds. Intervals are
95 % bootstraps over contexts, differences are paired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paper.comparison_tables import ABSENT
from paper.experiment import Comparison
from paper.plan import RunKey
from paper.setting import Setting
from restorekv.evaluation.fidelity import tally_divergence
from restorekv.evaluation.grid import FULL
from restorekv.evaluation.results import Result
from restorekv.evaluation.stats import MIN_FOR_INTERVAL, Estimate, bootstrap_ratio
from restorekv.evaluation.tables import Table, format_number, format_range

NOTE = (
    "KL: mean KL(full || cache) in nats over the tokens of the full cache's answers; below it the "
    "95 % interval, or "
    "what parts it from {against} with the 95 % interval of that. Same: answers with the full "
    "cache's very text, in "
    "percent. All tasks count."
)
# Results by seed, as `plan.find_measured` returns them.
Found = Mapping[RunKey, Mapping[int | None, Sequence[Result]]]


@dataclass(frozen=True)
class Fidelity:
    """The fidelity of one row at one ratio, as means over seeds.

    `sums` of KL over tokens and the number of `tokens`, both (documents,); `same` is the share of
    equal answers in percent.
    """

    sums: np.ndarray
    tokens: np.ndarray
    same: float

    @property
    def kl(self) -> float:
        return float(self.sums.sum() / self.tokens.sum())


def load_fidelity(
    by_seed: Mapping[int | None, Sequence[Result]], tasks: Sequence[str]
) -> Fidelity | None:
    """Load the fidelity over some tasks, or over all if `tasks` is empty; None if none of them was
    asked.
    """
    sums = []
    tokens = []
    same = []
    for results in by_seed.values():
        lines = [
            [told for told in line["answers"] if not tasks or told["task"] in tasks]
            for result in results
            for line in result.lines
        ]
        every = [told for answers in lines for told in answers]
        if not every:
            return None
        of_seed = tally_divergence(lines)
        sums.append(of_seed[0])
        tokens.append(of_seed[1])
        same.append(100 * float(np.mean([told["same"] for told in every])))
    return Fidelity(np.mean(sums, 0), np.mean(tokens, 0), float(np.mean(same)))


def _bootstrap(one: Fidelity, other: Fidelity | None = None) -> Estimate:
    """Return the KL of a row, or its paired difference from another row, with its 95 % interval.

    There is no interval (None) over fewer than MIN_FOR_INTERVAL documents.
    """
    reference = (other.sums, other.tokens) if other else None
    value, low, high = bootstrap_ratio(one.sums, one.tokens, reference)
    # Documents without questions of these tasks are drawn too, but must not count here.
    if np.count_nonzero(one.tokens) < MIN_FOR_INTERVAL:
        return value, None, None
    return value, low, high


def collect_fidelity(
    experiment: Comparison, setting: Setting, found: Found
) -> dict[RunKey, Fidelity]:
    """Return the fidelity of every row except the full cache's, if it was recorded."""
    told = {
        spot: load_fidelity(by_seed, setting.benches[spot[1]].all_tasks)
        for spot, by_seed in found.items()
        if experiment.rows[spot[0]].evictor != FULL
    }
    return {spot: fidelity for spot, fidelity in told.items() if fidelity}


def make_tables(
    experiment: Comparison, setting: Setting, fidelities: Mapping[RunKey, Fidelity], key: str
) -> Iterator[Table]:
    """Yield a benchmark's table with a row for each method and columns for each ratio; none if it
    has no figures.
    """
    if not any(spot[1] == key for spot in fidelities):
        return
    ratios = list(
        dict.fromkeys(place.ratio for place in experiment.places if place.benchmark == key)
    )
    head = ["method"]
    for ratio in ratios:
        head += [f"r = {ratio:g} KL, nats", f"r = {ratio:g} same, %"]
    lines: list[list[str]] = []
    strong: list[int] = []
    for name, row in experiment.rows.items():
        if row.evictor != FULL:
            made = [
                cell
                for ratio in ratios
                for cell in _format_cells(experiment, fidelities, (name, key, ratio))
            ]
            if name in experiment.against and row.adapter is not None:
                strong.append(len(lines))
            lines.append([row.label, *made])
    others = {experiment.rows[row].label for row in experiment.against.values()}
    note = NOTE.format(against=others.pop() if len(others) == 1 else "its base")
    title = f"{experiment.title}: {setting.benches[key].shown}, fidelity to the full cache"
    data = list(list_figures(experiment, fidelities, key))
    yield Table(f"{experiment.name}-{key}-fidelity", title, head, lines, note, data, strong=strong)


def _format_cells(
    experiment: Comparison, fidelities: Mapping[RunKey, Fidelity], spot: RunKey
) -> list[str]:
    """Return a row's KL and share of equal answers at one ratio, as two texts."""
    mine = fidelities.get(spot)
    base = fidelities.get((experiment.against.get(spot[0], ""), *spot[1:]))
    if mine is None:
        return [ABSENT, ABSENT]
    value, low, high = _bootstrap(mine, base)
    small = []
    if base:
        small.append(format_number(value, 3, True))
    if low is not None and high is not None:
        small.append(format_range(low, high, 3, bool(base)))
    text = format_number(mine.kl, 3)
    if small:
        text += f" ({', '.join(small)})"
    return [text, format_number(mine.same, 0)]


def count_lowered(experiment: Comparison, fidelities: Mapping[RunKey, Fidelity]) -> Iterator[str]:
    """Say in how many pairs of a restored row and its base restoring lowers the KL."""
    rows = experiment.rows
    pairs = [
        (fidelities[spot], fidelities[other, *spot[1:]])
        for spot in fidelities
        if (other := experiment.against.get(spot[0], ""))
        and (other, *spot[1:]) in fidelities
        and rows[spot[0]].adapter is not None
        and rows[other].adapter is None
    ]
    if pairs:
        found = [_bootstrap(*pair) for pair in pairs]
        less = sum(value < 0 for value, _, _ in found)
        highs = [high for _, _, high in found if high is not None]
        lows = [low for _, low, _ in found if low is not None]
        surely = sum(high < 0 for high in highs)
        raised = sum(low > 0 for low in lows)
        text = f"Restoring lowers KL(full || cache) in {less} of {len(pairs)} pairs; "
        if highs:
            text += f"the interval is below zero in {surely} and above zero in {raised}."
        if len(highs) < len(pairs):
            lacking = len(pairs) - len(highs)
            text += " " * bool(highs)
            text += f"{lacking} of them have too few contexts for an interval."
        yield text


def list_figures(
    experiment: Comparison, fidelities: Mapping[RunKey, Fidelity], benchmark: str = ""
) -> Iterator[dict[str, object]]:
    """Yield the figures of one benchmark, or of all, for JSON and CSV files."""
    for spot, mine in fidelities.items():
        row, key, ratio = spot
        if benchmark not in ("", key):
            continue
        line = {"row": row, "label": experiment.rows[row].label, "benchmark": key, "ratio": ratio}
        line |= zip(("kl", "kl_low", "kl_high"), _bootstrap(mine), strict=True)
        line |= {"same": mine.same, "answer_tokens": float(mine.tokens.sum())}
        base = experiment.against.get(row, "")
        if (base, key, ratio) in fidelities:
            apart = _bootstrap(mine, fidelities[base, key, ratio])
            line |= {
                "against": base,
                **dict(zip(("kl_change", "change_low", "change_high"), apart, strict=True)),
            }
        yield line
