"""Finished cells, written as grids write them, but without a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from restorekv import tasks
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.results import ANSWERS, SUMMARY, Result, open_result
from restorekv.evaluation.reuse import describe_question
from restorekv.evaluation.rows import summarize_cell
from restorekv.files import write_json
from restorekv.tasks import Question


def finished(
    folder: Path, cell: Cell, asked: Sequence[tuple[Question, str]], **benchmark: object
) -> Result:
    """Write and return a cell with one question for each context, scored by the benchmark."""
    scored = tasks.make_benchmark(cell.benchmark)
    result = open_result(folder, cell, facts(cell, benchmark))
    lines = []
    for turn, (question, said) in enumerate(asked):
        answer = {
            **describe_question(question),
            "prediction": said,
            "score": scored.score(question, said),
            "kl": 0.0,
            "answer_tokens": 1,
            "same": True,
        }
        figures = {
            "context": f"text {turn}",
            "tokens": 100,
            "prefix": 3,
            "cut": 0,
            "restore_tokens": 0,
            "pairs": 60,
            "pairs_with_prefix": 78,
        }
        lines.append(
            json.dumps({"sample": str(turn), **figures, "bytes": 1000, "answers": [answer]}) + "\n"
        )
    (result.folder / ANSWERS).write_text("".join(lines))
    write_json(result.folder / SUMMARY, summarize_cell(result))
    return result


def facts(cell: Cell, benchmark: Mapping[str, object]) -> dict:
    """Return the facts of a cell, as far as exports of results read them."""
    return {
        "model": cell.model,
        "fingerprint": "0",
        "device": "cpu",
        "dtype": "float32",
        "method": cell.evictor,
        "prefix_policy": cell.prefix_policy or ("free" if cell.evictor == "full" else "counted"),
        "on_small_budget": cell.on_small_budget,
        "allocation": cell.allocation,
        "restore_from": cell.restore_from,
        "offset": cell.offset,
        "adapter": {"hash": "ab12", "restore_tokens": 8} if cell.adapter else None,
        "benchmark": dict(benchmark),
        "shape": {"layers": 3, "heads": 2},
        "versions": {"restorekv": "0.1.0"},
    }
