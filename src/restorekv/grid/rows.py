"""Finished cells as rows for tables and programs: a cell's figures, and its paired gain over its base."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from restorekv import tasks
from restorekv.grid.cell import FULL, Cell
from restorekv.grid.fidelity import FIGURES
from restorekv.grid.results import Result
from restorekv.stats import compared

CONVENTIONS = ("prefix_policy", "on_tight", "allocation", "restore_from", "offset", "fingerprint", "dtype", "device")
HELD = ("pairs", "pairs_with_prefix", "bytes", "kept", "kept_with_prefix", "samples")


def rows(results: Sequence[Result]) -> list[dict]:
    """One row a finished cell, in their order. Scores in points; pairs and bytes are means over contexts."""
    done = {result.cell: result for result in results if result.done}
    return [row(result, done.get(base_of(cell)), full_of(cell, done)) for cell, result in done.items()]


def row(result: Result, base: Result | None, full: Result | None) -> dict:
    """`gain` is over the base without restoring, `recovered` its share of the base's loss against the full cache.

    The figures of fidelity are None for a cell that was answered before they were recorded.
    """
    cell, facts, found = result.cell, result.facts, result.summary
    told = {
        "model": cell.model, "benchmark": cell.benchmark, "protocol": cell.protocol, "evictor": cell.evictor,
        "method": facts["method"], "restored": cell.restored, "adapter": facts["adapter"] and facts["adapter"]["hash"],
        "label": label(cell), "ratio": cell.value, "storage": cell.storage, "streaming": cell.streaming,
        **{key: facts[key] for key in CONVENTIONS},
        **{key: found[key] for key in (*HELD, "score", "low", "high", "questions")},
        **{key: found.get(key) for key in FIGURES}, "metrics": found.get("metrics", {}),
        "tasks": {task: each["score"] for task, each in found["tasks"].items()}, "groups": dict(found["groups"]),
    }  # fmt: skip
    if not cell.restored or base is None:
        return told
    benchmark = tasks.make(cell.benchmark)
    by_context, theirs = benchmark.by_context(cell.protocol), base.answers
    told |= compared(result.answers, theirs, by_context)
    for group in found["groups"]:
        members = benchmark.groups()[group]
        ours, bases = ([a for a in side if a.family in members] for side in (result.answers, theirs))
        told["groups"][group] = compared(ours, bases, by_context)
    if full is not None:
        lost = full.summary["score"] - base.summary["score"]
        told["recovered"] = told["gain"] / lost if lost > 0 else None
    return told


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
