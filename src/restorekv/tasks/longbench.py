"""LongBench (arXiv 2308.14508), its 16 English tasks in the paper's six categories, as kvpress
0.5.5 evaluates them.

kvpress's prompts, lengths and scoring are used under every protocol: KVzip has none for LongBench.
Rows come in kvpress's format from the hub, or in that format or the official one from a folder.

longbench_prompts.json has the words of LongBench's config/dataset2prompt.json (MIT), odd spaces and
"asconcisely" included, as kvpress splits them
(evaluation/benchmarks/longbench/create_huggingface_dataset.py): `context` is what is compressed
(the instruction, the document and, for most tasks, the instruction again); `question` follows when
someone asks; `tokens` is the official limit of answers.
"""

import json
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restorekv.data.files import format_suffix, list_source_files
from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer
from restorekv.tasks.metrics import (
    compare_code,
    rouge_l,
    score_class,
    score_numbers,
    score_paragraph,
    token_f1,
)
from restorekv.tasks.reading import names_reference
from restorekv.tasks.rows import (
    Rows,
    check_form,
    get_field,
    get_texts,
    group_by_context,
    load_file_rows,
    load_hub_rows,
    parse_kvpress_row,
)

HUB = "Xnhyacinth/LongBench"
CATEGORIES = {
    "S-QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "M-QA": ("hotpotqa", "2wikimqa", "musique"),
    "Summ": ("gov_report", "qmsum", "multi_news"),
    "Few-shot": ("trec", "triviaqa", "samsum"),
    "Synth": ("passage_count", "passage_retrieval_en"),
    "Code": ("lcc", "repobench-p"),
}
TASKS = tuple(task for tasks in CATEGORIES.values() for task in tasks)
METRICS: dict[str, Callable[..., float]] = {
    **dict.fromkeys((*CATEGORIES["S-QA"], *CATEGORIES["M-QA"], "triviaqa"), token_f1),
    **dict.fromkeys((*CATEGORIES["Summ"], "samsum"), rouge_l),
    **dict.fromkeys(CATEGORIES["Code"], compare_code),
    "trec": score_class,
    "passage_count": score_numbers,
    "passage_retrieval_en": score_paragraph,
}
# In these tasks only an answer's first line counts, and official inputs end with the answer prefix.
FEW_SHOT = CATEGORIES["Few-shot"]
EXTRA_TOKENS = 20  # kvpress's addition to the official limits of answers
HUB_FIX = (
    "fetch the dataset with a network, or unpack data.zip of THUDM/LongBench, and give "
    "path=FOLDER, where tasks are "
    "files such as qasper.jsonl or folders such as qasper/"
)
WORDS = json.loads(Path(__file__).with_name("longbench_prompts.json").read_text("utf-8"))
# The texts have the fields {context} and {input}.
Prompt = namedtuple("Prompt", ("context", "question", "answer_prefix", "tokens"))
PROMPTS = {task: Prompt(**words) for task, words in WORDS.items()}


@dataclass(frozen=True)
class LongBench(Benchmark):
    """LongBench from the folder `path`, or from the hub if it is empty.

    `tasks` are names joined by "+"; if it is empty, all 16 are asked.
    """

    name = "longbench"
    title = "LongBench"
    license = "MIT; the texts keep the licenses of the data sets that they come from"
    correct_threshold = 0.5
    metric = (
        "token F1, ROUGE-L, class, paragraph, count or code similarity by task, best over "
        "references"
    )
    known_tasks = TASKS
    needs_whole_groups = True  # papers name the means of whole categories

    path: str = ""
    tasks: str = ""

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        for task in self.chosen_tasks:
            yield from load_task(task, self.path)

    def score(self, question: Question, prediction: str) -> float:
        """Return the best score over the references; in few-shot tasks, of the first line alone."""
        answer = prediction.lstrip()
        # Few-shot answers continue with further examples; only the first line counts.
        if question.task in FEW_SHOT:
            answer = answer.split("\n")[0]
        metric = METRICS[question.task]
        classes = {}
        if metric is score_class:
            classes = {"classes": question.facts["classes"]}
        return max(metric(answer, reference, **classes) for reference in question.answers)

    def is_right(self, answer: Mapping[str, Any]) -> bool:
        """Return whether an answer reaches `correct_threshold` or, in a task scored by token F1,
        names a reference in its first line.
        """
        is_question = METRICS[answer["task"]] is token_f1
        return super().is_right(answer) or (is_question and names_reference(answer))

    def describe_data(self) -> str:
        return self.path or f"{HUB} (Hugging Face)"

    def to_json(self) -> dict[str, object]:
        return {
            **super().to_json(),
            "prompts": "kvpress 0.5.5's, answers up to 20 tokens longer than LongBench's",
        }

    def group_tasks(self) -> Mapping[str, tuple[str, ...]]:
        """Return the categories that have all of their tasks asked."""
        return {
            name: tasks
            for name, tasks in CATEGORIES.items()
            if set(tasks) <= set(self.chosen_tasks)
        }


def load_task(task: str, path: str) -> list[Sample]:
    """Return the task's distinct contexts, from the files below `path` or from the hub if it is
    empty.
    """
    rows = _load_local_task(task, path) if path else load_hub_rows(HUB, task, "test", HUB_FIX)
    return group_by_context(
        _parse_row(task, f"{task}-{number}", location, row)
        for number, (location, row) in enumerate(rows)
    )


def _load_local_task(task: str, path: str) -> Rows:
    """Yield the rows of the file named for the task, or else of all files in folders named
    for it.
    """
    files = list_source_files(Path(path))
    named = [
        file
        for file in files
        if file.name.removesuffix(".gz").removesuffix(format_suffix(file)) == task
    ]
    if len(named) > 1:
        raise RestoreKVError(
            f"{named[0]} and {named[1]} are both {task}; give a folder that has one of them."
        )
    files = named or [file for file in files if file.parent.name == task]
    if not files:
        raise RestoreKVError(
            f"{path} has no task {task}; {HUB_FIX}, or leave it out by tasks=NAME+NAME."
        )
    for file in files:
        yield from load_file_rows(file)


def _parse_row(task: str, name: str, location: str, row: dict) -> tuple[str, Question]:
    """Return (context, question) of a row in either format."""
    with check_form(f"{location} is not a row of LongBench", "fetch the file again"):
        facts = {}
        if row["all_classes"]:
            facts = {"classes": get_texts(row, "all_classes")}
        return parse_kvpress_row(
            # Rows of the official files have "input", those of kvpress its own columns.
            {**row, **_add_prompt(task, row)} if "input" in row else row,
            name,
            task,
            "answers",
            facts,
        )


def _add_prompt(task: str, row: dict) -> dict:
    """Return an official row in kvpress's format."""
    prompt = PROMPTS[task]
    text = get_field(row, "input").removesuffix(prompt.answer_prefix if task in FEW_SHOT else "")
    return {
        "context": prompt.context.format(context=get_field(row, "context")),
        "question": prompt.question.format(input=text),
        "answer_prefix": prompt.answer_prefix,
        "max_new_tokens": prompt.tokens + EXTRA_TOKENS,
    }
