"""Bar charts of benchmarks: compression compared with kvpress, the scoring of every method, and a
training step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.efficiency_page import PHASES
from benchmarks.panels import Panel, make_bars, make_chart
from restorekv.evaluation.charts import BLUE, GREEN, NARROW, ORANGE, PURPLE, WIDE, Chart, Mark
from restorekv.evaluation.tables import MINUS, format_ratio, name_evictor

OURS = "ours"
KVPRESS = "kvpress"
SIDES = {OURS: Mark(OURS, BLUE), KVPRESS: Mark(KVPRESS, ORANGE, hatch="\\\\")}
STEP = {
    "prefill": PHASES["prefill"],
    "score": PHASES["score"],
    "teacher": Mark("teacher", PURPLE, hatch="\\\\"),
    "restore": PHASES["restore"],
    "student": Mark("student", BLUE),
    "backward": Mark("backward", ORANGE, hatch="//"),
    "optimizer": Mark("optimizer", GREEN, hatch=".."),
}
MEBI = 1 << 20


def draw_compare(result: Mapping) -> Chart:
    """Draw a result of `compare`: seconds by phase, peak memory, milliseconds a token."""
    rows = sorted(result["rows"], key=lambda row: (row["tokens"], row["side"] != OURS))
    names = [f"T = {row['tokens']:,}, {row['side']}" for row in rows]
    panels = [
        stack_bars(
            "Seconds to compress",
            names,
            [row["seconds"] for row in rows],
            PHASES,
            _compare_times(result, rows),
        )
    ]
    whole = [f"T = {tokens:,}" for tokens in sorted({row["tokens"] for row in rows})]
    if any(row["peak"] is not None for row in rows):
        peaks = _collect_by_side(rows, lambda row: row["peak"] and row["peak"] / MEBI)
        panels.append(group_bars("Peak memory above the weights", "MB", whole, peaks))
    ratio = format_ratio(result["ratio"])
    cases = [f"{each}\n{which}" for each in whole for which in (ratio, "r = 1")]
    tokens = _collect_by_side(
        rows,
        *(lambda row, which=which: _token_milliseconds(row[which]) for which in ("small", "full")),
    )
    panels.append(group_bars("A token of an answer", "milliseconds", cases, tokens))
    repeat = (
        f"Median of {result['repeat']} measurements"
        if result["repeat"] > 1
        else "One measurement each"
    )
    title = f"Compressing with KVzip to {ratio} and answering"
    title += f", beside kvpress {result['kvpress']}" if result["kvpress"] else ""
    note = f"{repeat}; MB are 2^20 bytes."
    if result["kvpress"]:
        note += " Ratios are ours over kvpress, with the restore pass, which kvpress does not have."
    return make_chart("bench", title, panels, note)


def format_layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _token_milliseconds(decoding: Mapping) -> float | None:
    """Return the time of a token, or None if kvpress refused to decode."""
    return decoding["token"] * 1000 if "token" in decoding else None


def _collect_by_side(
    rows: Sequence[Mapping], *figures: Callable[[Mapping], float | None]
) -> dict[Mark, list[float | None]]:
    """Return the figures of each side that was measured, row after row."""
    values = {}
    for side, mark in SIDES.items():
        of_side = []
        for row in rows:
            if row["side"] == side:
                of_side += [figure(row) for figure in figures]
        if of_side:
            values[mark] = of_side
    return values


def _compare_times(result: Mapping, rows: Sequence[Mapping]) -> list[str]:
    """Return a text for each row: how much of kvpress's time it takes if it is ours, or ""."""
    ratios = result["ratios"]
    return [
        f", {ratios[str(row['tokens'])]['compress and restore']:.2f} of kvpress"
        if row["side"] == OURS and str(row["tokens"]) in ratios
        else ""
        for row in rows
    ]


def draw_scorers(result: Mapping) -> Chart:
    """Draw a result of `scorers`: what every method adds to a prefill, cheapest first."""
    rows = sorted(result["rows"], key=lambda row: row["multiple"])
    names = [name_evictor(row["method"]) for row in rows]
    values = {Mark("", BLUE): [row["multiple"] for row in rows]}
    panel = group_bars(
        "", f"prefills of {result['tokens']:,} tokens", names, values, digits=2, width=WIDE
    )
    title = f"What scoring adds to a prefill of {result['tokens']:,} tokens, in prefills"
    plain = [row["prefill"] for row in rows]
    note = (
        "A method's own prefill and scoring without the plain prefill, over the plain prefill that "
        "was measured before "
        f"each method and took {min(plain):.1f} to {max(plain):.1f} s. AM-fast: its reference pass "
        "and a fit at "
        f"{format_ratio(result['ratio'])}."
    )
    return make_chart("scorers", title, [panel], note)


def draw_training(result: Mapping) -> Chart:
    """Draw a result of `train`: seconds by phase, and memory."""
    rows = result["rows"]
    names = [row["variant"] for row in rows]
    panels = [stack_bars("Seconds of a step", names, [row["seconds"] for row in rows], STEP)]
    if all(row["peak"] is not None for row in rows):
        for key, words in (("peak", "Peak memory"), ("graph", "Graph before backward")):
            panels.append(
                group_bars(words, "MB", names, {Mark("", BLUE): [row[key] / MEBI for row in rows]})
            )
    title = f"One training step on a context of {result['tokens']:,} tokens"
    note = (
        f"KVzip, {format_ratio(result['ratio'])}, {result['questions']} questions with answers of "
        f"{result['answer']} ids; memory above what was resident before, MB are 2^20 bytes. "
        "Copied: attention copies "
        "the context for the backward pass; anew: it refers to it; then scores and teacher, then "
        "the full cache too, "
        "are read from a store."
    )
    return make_chart("train", title, panels, note)


def stack_bars(
    title: str,
    names: Sequence[str],
    seconds: Sequence[Mapping[str, float]],
    phases: Mapping[str, Mark],
    more: Sequence[str] = (),
) -> Panel:
    """Return a bar of stacked phases for every name, followed by its sum and the text in `more`."""
    parts = {}
    for phase, mark in phases.items():
        parts[mark] = [each.get(phase, 0) for each in seconds]
    texts = []
    for each, rest in zip(seconds, more or [""] * len(seconds), strict=True):
        total = each.get("total", sum(each.get(phase, 0) for phase in phases))
        texts.append(f"{total:.3g} s{rest}")
    return make_bars(title, "seconds", names, parts, [texts], stacked=True, width=WIDE)


def group_bars(
    title: str,
    unit: str,
    names: Sequence[str],
    values: Mapping[Mark, Sequence[float | None]],
    digits: int = 0,
    width: float = NARROW,
) -> Panel:
    """Return a group of bars for every name, a bar for each mark, labeled with its value.

    A value of None has no bar and is labeled "refused".
    """

    def format_value(value: float | None) -> str:
        return "refused" if value is None else f"{value:,.{digits}f}".replace("-", MINUS)

    texts = []
    for row in values.values():
        texts.append([format_value(value) for value in row])
    return make_bars(title, unit, names, values, texts, stacked=False, width=width)
