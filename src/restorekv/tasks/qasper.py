"""QASPER (arXiv 2105.03011): questions about scientific papers, by token F1 with the closest annotator.

The paper takes it from LongBench: 200 questions. The development set itself, 1,005 questions on 281 papers, is read
too; its references are those of the official evaluator (github.com/allenai/qasper-led-baseline, scripts/evaluator.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import local_files, values
from restorekv.errors import RestoreKVError
from restorekv.tasks import hub, longbench_rows
from restorekv.tasks.base import Benchmark, Question, Sample
from restorekv.tasks.longbench_prompts import EXTRA_TOKENS, PROMPTS
from restorekv.tasks.metrics import token_f1

HUB = "allenai/qasper"
REVISION = "refs/convert/parquet"  # the main branch is a script, which datasets 4 refuses
INSTEAD = "fetch qasper-dev-v0.3.json from allenai.org/project/qasper and give path=FILE"
PROMPT = PROMPTS["qasper"]


@dataclass(frozen=True)
class Qasper(Benchmark):
    """`source`: "longbench" (`path` as there) or "official" (`path` is a file of papers; the hub if empty)."""

    name: ClassVar[str] = "qasper"
    title: ClassVar[str] = "QASPER"

    path: str = ""
    source: str = "longbench"

    def __post_init__(self) -> None:
        if self.source not in ("longbench", "official"):
            raise RestoreKVError(f"QASPER's source is longbench or official, not {self.source!r}.")

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterable[Sample]:
        return official(self.path) if self.source == "official" else longbench_rows.samples_of("qasper", self.path)

    def score(self, question: Question, prediction: str) -> float:
        """The best token F1 over the references."""
        return max(token_f1(prediction, answer) for answer in question.answers)

    def described(self) -> dict[str, object]:
        place = HUB if self.source == "official" else longbench_rows.HUB
        return {
            "data": self.path or f"{place} (Hugging Face)",
            "licence": "CC BY 4.0",
            "metric": "token F1, best over annotators",
            "prompts": "LongBench's qasper in kvpress 0.5.5",
        }


def official(path: str) -> Iterator[Sample]:
    """A sample per paper that has questions."""
    for place, paper in papers(path):
        try:
            context = PROMPT.context.format(context=text(paper))
            asked = tuple(question(row) for row in records(paper["qas"]))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise RestoreKVError(f"{place} is no paper of QASPER; {INSTEAD}.") from error
        if asked:
            yield Sample(asked[0].id, context, asked)


def papers(path: str) -> Iterator[tuple[str, dict]]:
    """(Place for messages, paper): of the released file, {id: paper}, or of rows, a paper each."""
    if not path:
        rows = hub.dataset(HUB, None, "validation", INSTEAD, REVISION)
        yield from ((f"{HUB}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    files = local_files(Path(path))
    if len(files) > 1:
        raise RestoreKVError(f"{path} has {len(files)} files; give path=FILE, that of the development set.")
    for place, value in values(files[0]):
        if isinstance(value, dict) and "qas" not in value:
            yield from ((f"{files[0]}, paper {name}", paper) for name, paper in value.items())
        else:
            yield f"{files[0]}, {place}", value


def text(paper: dict) -> str:
    """Sections' names and paragraphs, a line each; who asked had read title and abstract, which are left out."""
    lines = []
    for section in records(paper["full_text"]):
        lines += [section["section_name"] or "", *section["paragraphs"]]
    return "\n".join(filter(None, (" ".join(line.split("\n")).strip() for line in lines)))


def question(row: dict) -> Question:
    answers = tuple(reference(annotation["answer"]) for annotation in records(row["answers"]))
    if not answers:
        raise ValueError(row)
    asked = PROMPT.question.format(input=row["question"])
    return Question(row["question_id"], "qasper", asked, answers, PROMPT.tokens + EXTRA_TOKENS, PROMPT.answer_prefix)


def reference(answer: dict) -> str:
    """What one annotator answered."""
    if answer["unanswerable"]:
        return "Unanswerable"
    if answer["extractive_spans"]:
        return ", ".join(answer["extractive_spans"])
    if answer["free_form_answer"]:
        return answer["free_form_answer"]
    return {True: "Yes", False: "No"}[answer["yes_no"]]


def records(table: list[dict] | dict[str, list]) -> list[dict]:
    """A list of records, which `datasets` stores as a record of lists."""
    if isinstance(table, list):
        return table
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
