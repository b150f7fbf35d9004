"""Finished cells as rows for tables and programs: a cell's figures, and its paired gain over its base."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from restorekv import tasks
from restorekv.evaluation.fidelity import FIGURES
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.results import Result
from restorekv.evaluation.stats import Answer, compared, counted, mean_score, without_loss
from restorekv.evaluation.summary import metrics

CONVENTIONS = ("prefix_policy", "on_tight", "allocation", "restore_from", "offset", "fingerprint", "dtype", "device")
CACHE_FIGURES = ("pairs", "pairs_with_prefix", "bytes", "kept", "kept_with_prefix", "samples")


def rows(results: Sequence[Result]) -> list[dict]:
    """Returns a row for every finished cell, in their order. Scores are in points; pairs and bytes are means."""
    done = {result.cell: result for result in results if result.done}
    full = {cell.question_set: result for cell, result in reversed(done.items()) if cell.evictor == FULL}
    return [row(result, done.get(base_of(cell)), full.get(cell.question_set)) for cell, result in done.items()]


def row(result: Result, base: Result | None, full: Result | None) -> dict:
    """Returns a cell's figures; `gain` is over the base, `recovered` its share of the base's loss to the full cache.

    Means leave out the tasks on which the full cache scores below 10 (`left_out`); `tasks` holds every task, and
    fidelity is over all tasks. Figures of fidelity are None for a cell that was answered before they were recorded.
    """
    cell, facts, figures, benchmark = result.cell, result.facts, result.summary, tasks.make(result.cell.benchmark)
    by_context = benchmark.by_context(cell.protocol)
    base = base if cell.restored else None
    left_out = without_loss(full.answers, by_context) if full else []
    own, of_base, of_full = (counted(side.answers, left_out) if side else [] for side in (result, base, full))

    def of_group(side: Result | None, members: Container[str]) -> list[Answer]:
        return counted([each for each in side.answers if each.family in members], left_out) if side else []

    groups = {name: benchmark.groups()[name] for name in figures["groups"]}
    columns = {
        "model": cell.model, "benchmark": cell.benchmark, "protocol": cell.protocol, "evictor": cell.evictor,
        "method": facts["method"], "restored": cell.restored, "adapter": facts["adapter"] and facts["adapter"]["hash"],
        "label": label(cell), "ratio": cell.value, "storage": cell.storage, "streaming": cell.streaming,
        **{key: facts[key] for key in CONVENTIONS}, **{key: figures[key] for key in CACHE_FIGURES},
        **compared(own, of_base, by_context), "questions": figures["questions"],
        "metrics": metrics(result.lines, {answer.family for answer in own}),
        **{key: figures.get(key) for key in FIGURES},
        "tasks": {task: each["score"] for task, each in figures["tasks"].items()}, "left_out": left_out,
        "groups": {
            name: compared(of_group(result, members), of_group(base, members), by_context)
            for name, members in groups.items()
        },
    }  # fmt: skip
    if base and full:
        loss = mean_score(of_full, by_context) - mean_score(of_base, by_context)
        columns["recovered"] = columns["gain"] / loss if loss > 0 else None
    return columns


def base_of(cell: Cell) -> Cell:
    """Returns the same evictor at the same ratio without restoring."""
    return replace(cell, adapter=None, restore_tokens=None, restore_from="full")


def label(cell: Cell) -> str:
    """Says how a cell differs from others of its evictor: its adapter, the tokens it uses and its controls."""
    parts = [
        (cell.adapter, cell.adapter != "auto"),
        (f"n = {cell.restore_tokens}", cell.restore_tokens),
        (cell.allocation, cell.allocation != "global"),
        ("from the evicted cache", cell.restore_from != "full"),
        (f"streamed {cell.streaming} tokens at a time", cell.streaming),
        (cell.storage, cell.storage != "model"),
        (f"offset {cell.offset}", cell.offset),
    ]
    return ", ".join(part for part, applies in parts if part and applies)


def payload(results: Sequence[Result]) -> dict:
    """Returns rows, what every cell was made with, and every answer, for programs."""
    done = {result.cell.name: result for result in results if result.done}
    return {
        "rows": rows(results),
        "facts": {name: result.facts for name, result in done.items()},
        "answers": {name: result.lines for name, result in done.items()},
    }
