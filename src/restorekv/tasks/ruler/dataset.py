"""Reads RULER in kvpress's form: rows of a context, a question, an answer prefix, answers, a task and a limit.

The data set simonjegou/ruler of the hub has a config for each length; local files have the same form. It was made with
NVIDIA/RULER and the tokenizer of Llama-3.1-8B (kvpress 0.5.5, evaluation/benchmarks/ruler).
"""

from collections import Counter

from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Sample
from restorekv.tasks.rows import existing, field, group_by_context, hub_rows, kvpress_question, local_rows, well_formed

NAME = "simonjegou/ruler"
INSTEAD = "fetch it once with a network, give source=FOLDER with its files, or leave source out to generate"


def samples(source: str, length: int, tasks: tuple[str, ...]) -> list[Sample]:
    """Returns the distinct contexts of the hub, a file, a folder, or the folder's subfolder of that length."""
    if source == "hub":
        rows = hub_rows(NAME, str(length), "test", INSTEAD)
    else:
        folder = existing(source) / str(length)
        rows = local_rows(folder if folder.is_dir() else source)
    questions, counts = [], Counter()
    for place, row in rows:
        with well_formed(f"{place} is not a row of kvpress's RULER data set", "give files of that form"):
            task = field(row, "task")
            question = kvpress_question(row, f"{task}-{counts[task]}", task, "answer")
        if task in tasks:
            questions.append(question)
            counts[task] += 1
    if missing := [task for task in tasks if not counts[task]]:
        raise RestoreKVError(f"The data has no rows of the task {missing[0]}; give the tasks that it has.")
    return group_by_context(questions)
