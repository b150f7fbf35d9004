"""LongBench's questions: of the hub, in kvpress's format, or of a folder, in that format or the official one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from restorekv.data.files import local_files, suffix, values
from restorekv.errors import RestoreKVError
from restorekv.tasks import hub
from restorekv.tasks.base import Question, Sample
from restorekv.tasks.longbench_prompts import EXTRA_TOKENS, PROMPTS

HUB = "Xnhyacinth/LongBench"
LABELLED = ("trec", "triviaqa", "samsum")  # the official inputs of these end with the answer prefix
INSTEAD = (
    f"fetch the dataset where there is a network, or unpack data.zip of THUDM/LongBench, and give path=FOLDER, where "
    f"tasks are files such as {next(iter(PROMPTS))}.jsonl or folders such as {next(iter(PROMPTS))}/"
)


def samples_of(task: str, path: str) -> Iterator[Sample]:
    """The task's contexts in the order of their first question; those that are the same text are one."""
    by_context: dict[str, list[Question]] = {}
    for number, (place, row) in enumerate(rows(task, path)):
        context, question = read(task, f"{task}-{number}", place, row)
        by_context.setdefault(context, []).append(question)
    for context, questions in by_context.items():
        yield Sample(questions[0].id, context, tuple(questions))


def rows(task: str, path: str) -> Iterable[tuple[str, object]]:
    """(Place for messages, row) of one task."""
    if not path:
        split = hub.dataset(HUB, task, "test", INSTEAD)
        return ((f"{HUB}, {task}, row {number}", row) for number, row in enumerate(split, 1))
    return ((f"{file}, {place}", row) for file in files_of(task, path) for place, row in values(file))


def files_of(task: str, path: str) -> list[Path]:
    """Files named for the task, or else all in folders named for it."""
    files = local_files(Path(path))
    named = [file for file in files if file.name.removesuffix(".gz").removesuffix(suffix(file)) == task]
    if len(named) > 1:
        raise RestoreKVError(f"{named[0]} and {named[1]} are both {task}; give a folder that has one of them.")
    found = named or [file for file in files if file.parent.name == task]
    if not found:
        raise RestoreKVError(f"{path} has no task {task}; {INSTEAD}, or leave it out by tasks=NAME+NAME.")
    return found


def read(task: str, name: str, place: str, row: object) -> tuple[str, Question]:
    """(Context, question) of a row in either format."""
    try:
        official = "input" in row
        strings = [row[key] for key in (("context", "input") if official else ("context", "question", "answer_prefix"))]
        answers, classes = row["answers"], row["all_classes"] or []
        if not answers or not isinstance(answers, list) or not isinstance(classes, list):
            raise TypeError
        if not all(isinstance(string, str) for string in (*strings, *answers, *classes)):
            raise TypeError
        text = prompted(task, row) if official else row
        asked = (text["question"], tuple(answers), int(text["max_new_tokens"]), text["answer_prefix"])
    except (TypeError, KeyError, ValueError) as error:
        raise RestoreKVError(f"{place} is no row of LongBench; fetch the file again.") from error
    return text["context"], Question(name, task, *asked, facts={"classes": classes} if classes else {})


def prompted(task: str, row: dict) -> dict:
    """An official row in kvpress's format."""
    prompt = PROMPTS[task]
    asked = row["input"].removesuffix(prompt.answer_prefix) if task in LABELLED else row["input"]
    return {
        "context": prompt.context.format(context=row["context"]),
        "question": prompt.question.format(input=asked),
        "answer_prefix": prompt.answer_prefix,
        "max_new_tokens": prompt.tokens + EXTRA_TOKENS,
    }
