"""RULER as kvpress keeps it: rows of a context, a question, an answer prefix, answers, a task and a length limit.

The data set simonjegou/ruler of the hub, one config for each length, or local files of the same form. It was made with
NVIDIA/RULER and the tokenizer of Llama-3.1-8B (kvpress 0.5.5, evaluation/benchmarks/ruler).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from restorekv.data.files import local_files, values
from restorekv.errors import RestoreKVError
from restorekv.tasks import hub
from restorekv.tasks.base import Question, Sample

NAME = "simonjegou/ruler"
FIELDS = {"context": str, "question": str, "answer_prefix": str, "answer": list, "task": str, "max_new_tokens": int}


def hub_rows(length: int) -> Iterator[tuple[str, object]]:
    instead = "fetch it once with a network, give source=FOLDER with its files, or leave source out to generate"
    found = hub.dataset(NAME, str(length), "test", instead)
    return ((f"{NAME}, row {number}", row) for number, row in enumerate(found, 1))


def local_rows(where: str, length: int) -> Iterator[tuple[str, object]]:
    """Of a file, a folder, or the folder's subfolder of that length."""
    path = existing(where)
    for file in local_files(path / str(length) if (path / str(length)).is_dir() else path):
        yield from ((f"{file}, {place}", row) for place, row in values(file))


def existing(where: str) -> Path:
    if not Path(where).exists():
        raise RestoreKVError(f"There is no file or folder {where}; check the path.")
    return Path(where)


def samples(rows: Iterable[tuple[str, object]], tasks: tuple[str, ...]) -> list[Sample]:
    """The rows of these tasks; rows with one context are one sample, where its first row stands."""
    asked: dict[str, list[Question]] = {}
    counts: Counter[str] = Counter()
    for place, row in rows:
        check(place, row)
        if (task := row["task"]) not in tasks:
            continue
        name = f"{task}-{counts[task]}"
        counts[task] += 1
        question = Question(
            name, task, row["question"], tuple(row["answer"]), row["max_new_tokens"], row["answer_prefix"]
        )
        asked.setdefault(row["context"], []).append(question)
    if missing := [task for task in tasks if not counts[task]]:
        raise RestoreKVError(f"The data has no rows of the task {missing[0]}; give the tasks that it has.")
    return [Sample(questions[0].id, context, tuple(questions)) for context, questions in asked.items()]


def check(place: str, row: object) -> None:
    wrong = [
        field for field, kind in FIELDS.items() if not isinstance(row, dict) or not isinstance(row.get(field), kind)
    ]
    if wrong:
        raise RestoreKVError(f"{place} lacks the field {wrong[0]} of kvpress's RULER rows; give files of that form.")
    if not row["answer"] or not all(isinstance(answer, str) for answer in row["answer"]):
        raise RestoreKVError(f"{place} has no list of texts as its answer; give files of kvpress's form.")
