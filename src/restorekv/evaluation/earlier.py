"""Answers that another cell of the same folder has already: a run with `--count 3` goes on from one
with `--count 2`.

Such a cell differs in the number of contexts that its benchmark asks, or in the seed that draws
them, and in nothing else. Its answers to a context are taken over if the context and all that is
asked about it are the same, letter by letter.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from restorekv import tasks
from restorekv.errors import RestoreKVError
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.results import (
    CELLS,
    SECONDS,
    Result,
    describe_changes,
    load_lines,
    load_result,
)
from restorekv.tasks import Sample

EarlierLine = tuple[dict, dict[str, float]]  # a context's answers, and what they took
# Facts of a benchmark that follow from which of its contexts are asked.
DRAWN_FACTS = ("spec", "samples", "questions", "digest")
SAMPLES_DIGEST = 16  # hex digits, before those of the benchmark's source


def digest_text(text: str) -> str:
    """Return 12 hex digits of a text's hash, which tell contexts with one sample id apart."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digest_sample(sample: Sample) -> str:
    """Return a hash of a context and of all that is asked about it."""
    questions = [
        (
            question.id,
            question.task,
            question.text,
            question.answer_prefix,
            question.max_new_tokens,
            list(question.answers),
        )
        for question in sample.questions
    ]
    return _digest_asked(sample.id, digest_text(sample.context), questions)


def digest_line(line: Mapping[str, Any]) -> str | None:
    """Return `digest_sample` of the sample that a stored line answers; None for a line that does
    not say all of it.
    """
    keys = ("id", "task", "question", "answer_prefix", "max_new_tokens", "references")
    try:
        questions = [tuple(answer[key] for key in keys) for answer in line["answers"]]
        return _digest_asked(line["sample"], line["context"], questions)
    except KeyError:
        return None


def _digest_asked(sample_id: str | int, context: str, questions: Sequence[tuple]) -> str:
    text = json.dumps([sample_id, context, questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def find_earlier_lines(
    folder: Path, result: Result, digests: Mapping[str, str]
) -> dict[str, EarlierLine]:
    """Return what other cells of a folder answered that the result's cell would answer alike.

    Args:
        folder: The folder of the run.
        result: The cell that lacks answers.
        digests: `digest_sample` of every context that it asks, by id.

    Returns:
        Lines by the id of their sample.
    """
    found: dict[str, EarlierLine] = {}
    for path in sorted((folder / CELLS).iterdir()):
        if path == result.folder:
            continue
        other = _load_similar(path, result)
        if other is None:
            continue
        seconds = {line.get("sample"): line for line in load_lines(path / SECONDS)}
        for line in other.lines:
            name = line["sample"]
            if name in digests and digest_line(line) == digests[name]:
                took = dict(seconds.get(name, {}))
                took.pop("sample", None)
                found.setdefault(str(name), (line, took))
    return found


def _load_similar(path: Path, result: Result) -> Result | None:
    """Return the cell in a folder if its answers are those that the result's cell would give."""
    similar = strip_draw(result.cell)
    try:
        other = load_result(path)
        if strip_draw(other.cell) != similar:
            return None
        if describe_changes(_strip_facts(other.identity), _strip_facts(result.identity)):
            return None
        other.lines  # noqa: B018 - checks every line
    except (RestoreKVError, OSError):
        # Whatever is wrong with another cell, this one's contexts are then asked.
        return None
    return other


def strip_draw(cell: Cell) -> Cell:
    """Return the cell as if its benchmark asked one context, which every benchmark allows."""
    benchmark = tasks.make_benchmark(cell.benchmark)
    return replace(cell, benchmark=replace(benchmark, count=1, seed=0).spec)


def _strip_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a cell was made with, without what follows from which contexts were drawn."""
    benchmark = dict(facts["benchmark"])
    source = benchmark["digest"][SAMPLES_DIGEST:]
    for key in DRAWN_FACTS:
        benchmark.pop(key)
    return {**facts, "benchmark": {**benchmark, "source": source}}
