"""A made-up run folder: cells as a grid writes them, and costs as their command writes them."""

import json
import random
from dataclasses import replace
from pathlib import Path

from restorekv.compression.budget import Budget
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.results import SUMMARY, Result, open_result
from restorekv.evaluation.rows import summarize_cell
from restorekv.files import write_json

LAYERS, HEADS, DIM = 4, 2, 32
PREFIX = {"kvpress": 3, "kvzip": 28}
POLICY = {"kvpress": "counted", "kvzip": "free"}
RESTORE = 2
TASKS = {
    "tiny": ("single", "qa", "choice4"),
    "qasper": ("qasper",),
    "needle": ("needle_500", "needle_2000"),
}
TITLES = {"tiny": "Tiny suite", "qasper": "QASPER", "needle": "Needle in a haystack"}
SKILL = {"kvzip": 0.75, "snapkv": 0.35, "kvzip+": 0.8, "h2o": 0.2, "full": 0.95}

CONVENTIONS = {
    "model": "tiny",
    "fingerprint": "f" * 16,
    "dtype": "float32",
    "benchmark": "tiny:count=26",
    "protocol": "kvpress",
    "ratios": [0.05],
    "evictor": "kvzip",
}


def facts_of(cell: Cell, samples: int, **changes: object) -> dict:
    """Return a cell's facts in the form of a grid's, as far as a report reads them."""
    policy = cell.prefix_policy or POLICY[cell.protocol]
    name = cell.benchmark.partition(":")[0]
    adapter = {
        "hash": "5" * 12,
        "restore_tokens": RESTORE,
        "evictor": cell.evictor,
        "prefix_policy": "free",
    }
    return {
        "model": cell.model,
        "fingerprint": f"{cell.protocol:f<16}",
        "dtype": "float32",
        "rope": {"rope_theta": 10000.0},
        "shape": {"layers": LAYERS, "heads": HEADS, "head_dim": DIM, "hidden": 128},
        "prefix_policy": policy,
        "on_small_budget": cell.on_small_budget,
        "allocation": cell.allocation,
        "restore_from": cell.restore_from,
        "offset": cell.offset,
        "budget": "B = floor(r T L H), exact",
        "method": cell.evictor
        + (f":chunk=2000,sinks={PREFIX['kvzip']}" if cell.protocol == "kvzip" else ""),
        "adapter": adapter if cell.restored else None,
        "benchmark": {
            "data": "generated",
            "license": "Apache-2.0",
            "metric": "share found",
            "title": TITLES[name],
            "spec": cell.benchmark,
            "samples": samples,
            "questions": samples * len(TASKS[name]),
            "digest": "d" * 16,
        },
        "protocol": {
            "name": cell.protocol,
            "before": "<user>" if cell.protocol == "kvpress" else "<system> & <user>",
            "after": "<assistant>",
            "stops": f"stops of {cell.protocol}",
            "rope": "the model's own",
            "cut": "the end of contexts that are too long",
        },
        "score": "mean over tasks of the mean over questions x 100",
        "interval": "95 %, bootstrap over contexts",
        "decoding": "greedy",
        "device": "cpu",
        "threads": 1,
        "versions": {"restorekv": "0.1.0", "torch": "2.13.0"},
        **changes,
    }


def line_of(cell: Cell, sample: str, rng: random.Random) -> dict:
    """Return a context's answers; the better the method and the larger the ratio, the more are
    right.
    """
    tokens, prefix = rng.randrange(800, 1200), PREFIX[cell.protocol]
    counted = (cell.prefix_policy or POLICY[cell.protocol]) == "counted"
    budget = Budget.of_ratio(
        cell.ratio, tokens + prefix * counted, LAYERS, HEADS, RESTORE * cell.restored, "clip"
    )
    held = budget.pairs if counted else budget.pairs + prefix * LAYERS * HEADS
    name = cell.benchmark.partition(":")[0]
    chance = SKILL[cell.evictor] * (
        1 if cell.evictor == "full" else min(1, (cell.ratio_value * 5) ** 0.5)
    )
    chance += cell.restored * (1 - chance) * 0.5
    answers = [
        {
            "id": f"{sample}" if name == "needle" else f"{sample}-{turn}",
            "task": task,
            "question": f"What is <b>{sample}</b> & {turn}?",
            "answer_prefix": "",
            "max_new_tokens": 8,
            "references": [f"r{rng.randrange(100)}"],
            "prediction": "<script>alert(1)</script>",
            "score": float(rng.random() < chance),
            "kl": 1 - chance if cell.evictor != "full" else 0.0,
            "answer_tokens": 5,
            "same": cell.evictor == "full",
        }
        for turn, task in enumerate(TASKS[name])
        if name != "needle" or task.endswith("_" + sample.partition("-")[0])
    ]
    return {
        "sample": sample,
        "context": sample if name == "qasper" else f"{cell.benchmark} {sample}",
        "tokens": tokens,
        "prefix": prefix,
        "restore_tokens": RESTORE * cell.restored,
        "pairs": budget.pairs,
        "pairs_with_prefix": held,
        "bytes": held * DIM * 8,
        "cut": 0,
        "answers": answers,
    }


def write_cell(
    folder: Path, cell: Cell, samples: int = 6, answered: int | None = None, **changes: object
) -> Result:
    """Write a cell with answers about the first `answered` contexts; None means all, and that it is
    done.

    Questions depend only on the benchmark.
    """
    names = list(map(str, range(samples)))
    if cell.benchmark.startswith("needle"):
        names = [f"{length}-{depth:g}" for length in (500, 2000) for depth in (0, 50, 100)]
    result = open_result(folder, cell, facts_of(cell, len(names), **changes))
    for number, name in enumerate(names[:answered]):
        same, own = random.Random(f"{cell.benchmark} {name}"), random.Random(f"{cell} {name}")
        line = line_of(cell, name, own)
        sized = line_of(cell, name, same)
        for answer, asked in zip(line["answers"], sized["answers"], strict=True):
            answer["references"] = asked["references"]
        result.append({**sized, "answers": line["answers"]}, {"ask": 0.1 * number})
    if answered is None:
        write_json(result.folder / SUMMARY, summarize_cell(result))
    return result


def write_scores(folder: Path, cell: Cell, scores: list[list[float]]) -> Result:
    """Write a finished cell with these scores, by context and question."""
    result = open_result(folder, cell, facts_of(cell, len(scores)))
    for number, own in enumerate(scores):
        line = line_of(cell, str(number), random.Random(number))
        answers = [
            {**answer, "score": score} for answer, score in zip(line["answers"], own, strict=True)
        ]
        result.append({**line, "answers": answers}, {"ask": 0.1})
    write_json(result.folder / SUMMARY, summarize_cell(result))
    return result


def cells_of(
    benchmark: str, evictors: tuple[str, ...], ratios: tuple[str, ...], **common: object
) -> list[Cell]:
    """Return the cells of the full cache, and of every evictor alone and restored."""
    cells = [Cell.full_cache(model="tiny", benchmark=benchmark, **common)]
    for evictor in evictors:
        for ratio in ratios:
            base = Cell("tiny", benchmark, evictor, ratio, **common)
            cells += [base, replace(base, adapter="auto")]
    return cells


def write_run(
    folder: Path,
    evictors: tuple[str, ...] = ("kvzip", "snapkv"),
    ratios: tuple[str, ...] = ("0.2", "0.05"),
    samples: int = 6,
) -> Path:
    """Write a run of two benchmarks, one of them with two seeds, under both protocols, and of the
    benchmark `needle`.
    """
    for protocol in POLICY:
        for benchmark in ("tiny:count=6", "tiny:count=6,seed=1", "qasper"):
            for cell in cells_of(benchmark, evictors, ratios, protocol=protocol):
                write_cell(folder, cell, samples)
    for cell in cells_of("needle", evictors[:1], ratios):
        write_cell(folder, cell)
    return folder


def write_costs(folder: Path) -> Path:
    """Write a file like that of `python -m benchmarks efficiency`."""
    (folder / "efficiency").mkdir(parents=True, exist_ok=True)
    (folder / "efficiency" / "tiny-cpu.json").write_text(json.dumps(efficiency()))
    return folder


def efficiency() -> dict:
    seconds = {"prefill": 0.4, "score": 0.6, "restore": 0.0, "evict": 0.02, "total": 1.02}
    restored = seconds | {"restore": 0.01, "total": 1.03}
    return {
        "analysis": "efficiency",
        "label": "tiny-cpu",
        "definitions": {"total": "prefill to eviction"},
        "conventions": CONVENTIONS
        | {
            "machine": "two cores",
            "threads": 1,
            "tokens": 2048,
            "repeat": 3,
            "latency_context": "prefill",
        },
        "compression": [
            {
                "evictor": "kvzip",
                "restored": False,
                "adapter": None,
                "seconds": seconds,
                "peak": 123_000_000,
            },
            {
                "evictor": "kvzip",
                "restored": True,
                "adapter": "shipped",
                "seconds": restored,
                "peak": 124_000_000,
            },
            {
                "evictor": "snapkv",
                "restored": False,
                "adapter": None,
                "seconds": seconds,
                "peak": None,
            },
            {
                "evictor": "snapkv",
                "restored": True,
                "adapter": "random",
                "seconds": restored,
                "peak": None,
            },
        ],
        "overhead": {
            "kvzip": {"seconds": 0.01, "share": 0.01, "peak": 1_000_000, "peak_share": 0.008},
            "snapkv": {"seconds": 0.01, "share": 0.01, "peak": None, "peak_share": None},
        },
        "latency": [
            {
                "ratio": ratio,
                "restored": restored,
                "milliseconds": 0.2 + 0.25 * ratio,
                "least": 0.19 + 0.25 * ratio,
                "most": 0.22 + 0.25 * ratio,
                "bytes": int(4e6 * ratio),
                "pairs": int(24576 * ratio),
                "restore_tokens": 2 * restored,
            }
            for ratio in (1.0, 0.5, 0.2, 0.05)
            for restored in (False, True)
        ],
        "latency_ratio": {"1": 1.0, "0.5": 1.0, "0.2": 1.0, "0.05": 1.0},
    }
