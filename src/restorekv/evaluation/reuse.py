"""Reuse of answers that another cell of the same folder already has: a run with `--count 3`
continues one with `--count 2`, and its report then leaves out the smaller run.

Such a cell differs in the number of contexts that its benchmark asks, or in the seed that draws
them, and in nothing else. Its answers to a context are reused if the context and all that is
asked about it are exactly the same.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from restorekv import tasks
from restorekv.errors import RestoreKVError
from restorekv.evaluation.grid import Cell, group_by
from restorekv.evaluation.results import (
    SECONDS,
    Result,
    describe_changes,
)
from restorekv.files import load_lines
from restorekv.tasks import Question, Sample

EarlierLine = tuple[dict, dict[str, float]]  # a context's line, and the seconds that it took
# What a line records about a question: everything that the answer and its score depend on.
QUESTION_KEYS = ("id", "task", "question", "answer_prefix", "max_new_tokens", "references")
DRAW_SETTINGS = ("count", "seed")
# Keys of a benchmark's identity that follow from which of its contexts are asked.
DRAWN_KEYS = ("spec", "samples", "questions", "digest")
SAMPLES_DIGEST = 16  # hex digits, before those of the benchmark's source


def digest_text(text: str) -> str:
    """Return 12 hex digits of a text's hash, to distinguish contexts with the same sample id."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def describe_question(question: Question) -> dict[str, Any]:
    """Return what an answer's line records about its question."""
    return {
        "id": question.id,
        "task": question.task,
        "question": question.text,
        "answer_prefix": question.answer_prefix,
        "max_new_tokens": question.max_new_tokens,
        "references": list(question.answers),
    }


def digest_sample(sample: Sample) -> str:
    """Return a hash of a context and of all that is asked about it."""
    questions = [describe_question(question) for question in sample.questions]
    return _digest_questions(sample.id, digest_text(sample.context), questions)


def digest_line(line: Mapping[str, Any]) -> str:
    """Return `digest_sample` of the sample that a stored line answers."""
    questions = [{key: answer[key] for key in QUESTION_KEYS} for answer in line["answers"]]
    return _digest_questions(line["sample"], line["context"], questions)


def _digest_questions(sample_id: str | int, context: str, questions: Sequence[dict]) -> str:
    text = json.dumps([sample_id, context, questions], ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def find_earlier_lines(
    others: Iterable[Result], result: Result, digests: Mapping[str, str]
) -> dict[str, EarlierLine]:
    """Return the lines of other cells that the result's cell would answer in the same way.

    Args:
        others: The cells of its folder; the cell itself may be among them.
        result: The cell that lacks answers.
        digests: `digest_sample` of every context that it asks, by id.

    Returns:
        Lines by the id of their sample.
    """
    found: dict[str, EarlierLine] = {}
    for other in others:
        if other.folder == result.folder or not _answers_the_same(other, result):
            continue
        try:
            lines = other.lines
            seconds = {line.get("sample"): line for line in load_lines(other.folder / SECONDS)}
        except (RestoreKVError, OSError):  # whatever is wrong with them, they are asked again
            continue
        for line in lines:
            name = line["sample"]
            if name in digests and digest_line(line) == digests[name]:
                took = dict(seconds.get(name, {}))
                took.pop("sample", None)
                found.setdefault(str(name), (line, took))
    return found


def find_contained_cells(results: Sequence[Result]) -> list[Result]:
    """Return the cells of smaller runs that a larger run of the folder contains.

    A run contains another if, for each of the other's cells, it has a finished cell of the same
    method that has answered all of its contexts.
    """
    runs = list(group_by(results, _identify_run).values())
    digests = {each.folder: {digest_line(line) for line in each.lines} for each in results}

    def is_within(small: Result, large: Result) -> bool:
        return (
            large.done
            and digests[small.folder] <= digests[large.folder]
            and _answers_the_same(small, large)
        )

    contained: list[Result] = []
    for run in list(runs):
        for other in runs:
            if other is not run and all(any(is_within(one, each) for each in other) for one in run):
                contained += run
                runs.remove(run)  # of two runs of the same contexts, the second stays
                break
    return contained


def _identify_run(result: Result) -> tuple[str, ...]:
    """Return what the cells of one run have in common: the questions, over all seeds."""
    cell = result.cell
    benchmark = tasks.make_benchmark(cell.benchmark)
    return replace(cell, benchmark=replace(benchmark, seed=0).spec).question_set


def _answers_the_same(other: Result, result: Result) -> bool:
    """Return whether two cells, and what they are made with, differ in nothing but the draw."""
    try:
        if strip_draw(other.cell) != strip_draw(result.cell):
            return False
    except RestoreKVError:  # a benchmark that is no longer installed
        return False
    return not describe_changes(_strip_identity(other.identity), _strip_identity(result.identity))


def strip_draw(cell: Cell) -> tuple[Cell, dict[str, Any]]:
    """Return the cell with only the name of its benchmark, and the benchmark's settings without
    those that draw contexts.
    """
    benchmark = tasks.make_benchmark(cell.benchmark)
    settings = asdict(benchmark)
    for key in DRAW_SETTINGS:
        settings.pop(key)
    return replace(cell, benchmark=benchmark.name), settings


def _strip_identity(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a cell was made with, without the entries that depend on the draw of contexts."""
    benchmark = dict(identity.get("benchmark", {}))
    source = benchmark.get("digest", "")[SAMPLES_DIGEST:]
    for key in DRAWN_KEYS:
        benchmark.pop(key, None)
    return {**identity, "benchmark": {**benchmark, "source": source}}
