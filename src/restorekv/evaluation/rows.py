"""Finished cells as rows for tables and programs: a cell's figures, and its paired gain over its base."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

from restorekv import tasks
from restorekv.evaluation.cell import FULL, Cell
from restorekv.evaluation.fidelity import FIGURES
from restorekv.evaluation.results import Result
from restorekv.evaluation.stats import Answer, compared, counted, mean_score, without_loss
from restorekv.evaluation.summary import metrics

CONVENTIONS = ("prefix_policy", "on_tight", "allocation", "restore_from", "offset", "fingerprint", "dtype", "device")
HELD = ("pairs", "pairs_with_prefix", "bytes", "kept", "kept_with_prefix", "samples")


def rows(results: Sequence[Result]) -> list[dict]:
    """One row a finished cell, in their order. Scores in points; pairs and bytes are means over contexts."""
    done = {result.cell: result for result in results if result.done}
    return [row(result, done.get(base_of(cell)), full_of(cell, done)) for cell, result in done.items()]


def row(result: Result, base: Result | None, full: Result | None) -> dict:
    """`gain` is over the base without restoring, `recovered` its share of the base's loss against the full cache.

    Means leave out the tasks on which the full cache scores below 10, `left_out`; `tasks` shows them all the same, and
    the figures of fidelity are over all tasks. Those are None for a cell that was answered before they were recorded.
    """
    cell, facts, found, benchmark = result.cell, result.facts, result.summary, tasks.make(result.cell.benchmark)
    by_context = benchmark.by_context(cell.protocol)
    base = base if cell.restored else None
    out = without_loss(full.answers, by_context) if full else []
    mine, theirs, whole = (counted(side.answers, out) if side else [] for side in (result, base, full))
    groups = {name: benchmark.groups()[name] for name in found["groups"]}
    told = {
        "model": cell.model, "benchmark": cell.benchmark, "protocol": cell.protocol, "evictor": cell.evictor,
        "method": facts["method"], "restored": cell.restored, "adapter": facts["adapter"] and facts["adapter"]["hash"],
        "label": label(cell), "ratio": cell.value, "storage": cell.storage, "streaming": cell.streaming,
        **{key: facts[key] for key in CONVENTIONS}, **{key: found[key] for key in HELD},
        **compared(mine, theirs, by_context), "questions": found["questions"],
        "metrics": metrics(result.lines, {answer.family for answer in mine}),
        **{key: found.get(key) for key in FIGURES},
        "tasks": {task: each["score"] for task, each in found["tasks"].items()}, "left_out": out,
        "groups": {
            name: compared(*(counted(of_tasks(side, members), out) for side in (result, base)), by_context)
            for name, members in groups.items()
        },
    }  # fmt: skip
    if base and full:
        lost = mean_score(whole, by_context) - mean_score(theirs, by_context)
        told["recovered"] = told["gain"] / lost if lost > 0 else None
    return told


def of_tasks(result: Result | None, members: Container[str]) -> list[Answer]:
    """Returns the answers to some of the tasks; none where there is no cell."""
    return [answer for answer in result.answers if answer.family in members] if result else []


def base_of(cell: Cell) -> Cell:
    """The same evictor at the same ratio without restoring."""
    return replace(cell, adapter=None, restore_tokens=None, restore_from="full")


def full_of(cell: Cell, done: dict[Cell, Result]) -> Result | None:
    """The full cache asked the same."""
    return next((result for other, result in done.items() if other.evictor == FULL and other.place == cell.place), None)


def label(cell: Cell) -> str:
    """What tells a cell from others of its evictor: where its adapter lies, tokens used and controls."""
    told = [] if cell.adapter in (None, "auto") else [cell.adapter]
    told += [f"n = {cell.restore_tokens}"] if cell.restore_tokens else []
    told += [cell.allocation] if cell.allocation != "global" else []
    told += ["from the evicted cache"] if cell.restore_from != "full" else []
    told += [f"streamed {cell.streaming} tokens at a time"] if cell.streaming else []
    told += [cell.storage] if cell.storage != "model" else []
    return ", ".join([*told, *([f"offset {cell.offset}"] if cell.offset else [])])


def payload(results: Sequence[Result]) -> dict:
    """For programs: rows, what every cell was made with, and every answer."""
    made = {result.cell.name: result.facts for result in results if result.done}
    answers = {result.cell.name: result.lines for result in results if result.done}
    return {"rows": rows(results), "facts": made, "answers": answers}
