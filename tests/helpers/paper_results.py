"""Finished cells of paper experiments, made by hand from a table of scores, without a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from restorekv.evaluation.grid import Cell
from restorekv.evaluation.results import ANSWERS, CELL, SECONDS, SUMMARY, Result
from restorekv.evaluation.rows import summarize_cell
from restorekv.files import write_json
from restorekv.tasks.base import digest_samples

FACTS = {
    "fingerprint": "1f2e",
    "dtype": "float32",
    "device": "cpu",
    "allocation": "global",
    "budget": "B",
    "score": "mean",
    "interval": "95 %",
    "prefix_policy": "free",
    "shape": {"layers": 3, "heads": 2},
    "adapter": None,
}


def finished(folder: Path, cell: Cell, said: Mapping[str, Sequence[tuple[float, ...]]]) -> Result:
    """Write and return a finished cell.

    `said` has, for every task, the answer about each document: (score, KL, tokens, same), or the
    score alone. Documents are numbered from 0 in every cell; each is asked all tasks.
    """
    place = folder / cell.name
    place.mkdir(parents=True)
    conventions = {
        "method": cell.evictor,
        "adapter": None,
        "shape": {"layers": 3},
        "prefix_policy": "free",
        "on_small_budget": cell.on_small_budget,
        "restore_from": cell.restore_from,
        "offset": cell.offset,
    }
    facts = {
        **conventions,
        **FACTS,
        "benchmark": {"title": cell.benchmark},
        "protocol": {"name": cell.protocol},
    }
    write_json(place / CELL, {"cell": cell.to_dict(), "facts": facts})
    held = {
        "prefix": 3,
        "cut": 0,
        "restore_tokens": 0,
        "tokens": 100,
        "pairs": 60,
        "pairs_with_prefix": 78,
        "bytes": 9,
    }
    lines = []
    for turn in range(len(next(iter(said.values())))):
        answers = [answer(f"{task}-{turn}", task, *figures[turn]) for task, figures in said.items()]
        line = {"sample": str(turn), "context": f"text {turn}", **held, "answers": answers}
        lines.append(json.dumps(line) + "\n")
    (place / ANSWERS).write_text("".join(lines))
    (place / SECONDS).write_text("")
    made = Result(place, cell, facts)
    write_json(place / SUMMARY, summarize_cell(made))
    return made


def answer(
    name: str, task: str, score: float, kl: float = 0.0, tokens: int = 1, same: bool = True
) -> dict:
    """Return an answer in the form in which workers report it."""
    return {
        "id": name,
        "task": task,
        "question": name,
        "answer_prefix": "",
        "max_new_tokens": 8,
        "references": [name],
        "prediction": digest_samples([]),
        "score": score,
        "kl": kl,
        "answer_tokens": tokens,
        "same": bool(same),
    }
