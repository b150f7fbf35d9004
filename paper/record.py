"""The record of a page's figures: the full cache's scores by task, what caches held, and when and
with what the page was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.workload import describe_machine
from restorekv import tasks
from restorekv.evaluation.grid import FULL, Cell
from restorekv.evaluation.report import Block, Section
from restorekv.evaluation.results import Result
from restorekv.evaluation.rows import SUMMARY_COLUMNS
from restorekv.evaluation.stats import MIN_FOR_INTERVAL, MIN_FOR_RANKING, MIN_FULL_SCORE
from restorekv.evaluation.tables import Table, format_number, format_score, name_method

RULE = (
    f"A task on which the full cache scores below {MIN_FULL_SCORE:g} has nothing to lose: it is "
    "asked and shown here, but left out of every mean on this page. Where all tasks of a mean are "
    "below, it is over all of them. Fidelity counts every task."
)
NOTE = (
    "Means over contexts. Pairs: those that the budget counts. With prefix: all that a cache held, "
    "the chat prefix "
    "included. Methods in one line held the same."
)


def make_section(results: Mapping[Cell, Result]) -> Section | None:
    """Return the last section of a page, or None if nothing was measured."""
    done = {cell: result for cell, result in results.items() if result.done}
    blocks: list[Block] = (
        [_make_full_cache_table(done)] if any(cell.evictor == FULL for cell in done) else []
    )
    return (
        Section("The full cache, and what the caches held", RULE, [*blocks, _make_held_table(done)])
        if done
        else None
    )


def _make_full_cache_table(done: Mapping[Cell, Result]) -> Table:
    """Return a table of the full cache's score on every task."""
    rows = []
    data = []
    for cell, result in done.items():
        for task, points in result.summary["tasks"].items() if cell.evictor == FULL else ():
            counts = points["score"] >= MIN_FULL_SCORE
            shown = format_score(points["score"], points["low"], points["high"])
            rows.append(
                [
                    *_describe_benchmark(cell),
                    task,
                    format_number(points["questions"], 0),
                    shown,
                    "counts" if counts else "below 10",
                ]
            )
            figures = {key: points[key] for key in ("questions", "score", "low", "high")}
            data.append(
                {
                    "benchmark": cell.benchmark,
                    "protocol": cell.protocol,
                    "task": task,
                    **figures,
                    "counts": counts,
                }
            )
    head = ["benchmark", "settings", "task", "questions", "score of the full cache", "in means"]
    note = f"Points, 0 to 100; 95 % intervals over at least {MIN_FOR_INTERVAL} contexts."
    return Table("full-cache", "The full cache by task", head, rows, note, data, left=(0, 1, 2, 5))


def _make_held_table(done: Mapping[Cell, Result]) -> Table:
    """Return a table of what caches held: a row for every benchmark, ratio and size."""
    groups: dict[tuple, dict[str, None]] = {}
    for cell, result in sorted(
        done.items(), key=lambda item: (item[0].benchmark, item[0].protocol, -item[0].ratio_value)
    ):
        sizes = tuple(result.summary[key] for key in ("pairs", "pairs_with_prefix", "bytes"))
        groups.setdefault((*_describe_benchmark(cell), cell.ratio_value, *sizes), {})[
            name_method(cell.evictor, cell.restored)
        ] = None
    rows = [
        [title, settings, f"{ratio:g}", ", ".join(names), *(f"{size:,.0f}" for size in sizes)]
        for (title, settings, ratio, *sizes), names in groups.items()
    ]
    head = ["benchmark", "settings", "r", "methods", "pairs", "with prefix", "bytes"]
    return Table("held", "Held for a context", head, rows, NOTE, left=(0, 1, 3))


def _describe_benchmark(cell: Cell) -> tuple[str, str]:
    """Return a benchmark's title, and the spec that makes it."""
    return tasks.make_benchmark(cell.benchmark).title, cell.benchmark


def describe_texts(results: Mapping[Cell, Result]) -> Iterator[str]:
    """Yield how many texts each benchmark has, and whether scores of so few rank nothing."""
    counts: dict[str, dict[int, None]] = {}
    for cell, result in results.items():
        if result.done:
            counts.setdefault(cell.benchmark, {})[result.summary["samples"]] = None
    if not counts:
        return
    told = [
        f"{' or '.join(f'{count:,}' for count in sorted(numbers))} of `{benchmark}`"
        for benchmark, numbers in counts.items()
    ]
    fewest = min(min(numbers) for numbers in counts.values())
    glimpse = ""
    if fewest < MIN_FOR_RANKING:
        glimpse = f" Fewer than {MIN_FOR_RANKING} texts are a glimpse, which ranks nothing."
    yield f"Texts: {', '.join(told)}.{glimpse}"


def describe_adapters(results: Mapping[Cell, Result]) -> Iterator[str]:
    """Yield which adapters restored, by the hash of their weights, and the caches of which
    evictors.
    """
    evictors: dict[str, dict[str, None]] = {}
    for cell, result in results.items():
        adapter = result.identity.get("adapter") if result.done else None
        if adapter:
            evictors.setdefault(adapter["hash"], {})[cell.evictor] = None
    if evictors:
        told = [f"{weights} ({', '.join(names)})" for weights, names in evictors.items()]
        yield f"Adapters that restored, by the hash of their weights: {'; '.join(told)}."


def describe_run(command: str) -> dict[str, Any]:
    """Return date, versions, processor, threads, system and the command, as plain JSON values."""
    return {**describe_machine(torch.get_num_threads()), "command": command}


def format_run(made: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `describe_run` returned as a sentence, if there was a command."""
    if made["command"]:
        versions = ", ".join(
            f"{package} {version}" for package, version in made["versions"].items()
        )
        yield f"Written on {made['date']} by `{made['command']}` ({versions}; {made['processor']})."


def collect_sizes(done: Sequence[Result]) -> dict[str, dict]:
    """Return the pairs and bytes that each cell's caches held, by the cell's name."""
    return {
        result.cell.name: {key: result.summary[key] for key in SUMMARY_COLUMNS} for result in done
    }
