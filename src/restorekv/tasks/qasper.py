"""QASPER (arXiv 2105.03011): questions about scientific papers, scored by token F1 with the closest
annotator.

RestoreKV's paper takes 200 questions from LongBench. The development set itself has 1,005 on
281 papers; its references are those of the official evaluator
(github.com/allenai/qasper-led-baseline, scripts/evaluator.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from restorekv.data.files import list_source_files
from restorekv.errors import RestoreKVError
from restorekv.tasks import longbench
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer
from restorekv.tasks.metrics import token_f1
from restorekv.tasks.reading import names_reference
from restorekv.tasks.rows import Rows, check_form, load_file_rows, load_hub_rows

HUB = "allenai/qasper"
REVISION = "refs/convert/parquet"  # the main branch is a script, which datasets 4 refuses
HUB_FIX = "fetch qasper-dev-v0.3.json from allenai.org/project/qasper and give path=FILE"
PROMPT = longbench.PROMPTS["qasper"]


@dataclass(frozen=True)
class Qasper(Benchmark):
    """QASPER from LongBench or from its own development set.

    `source` is "longbench" (with `path` as there) or "official" (`path` is a file of papers; the
    hub if it is empty).
    """

    name = "qasper"
    title = "QASPER"
    license = "CC BY 4.0"
    metric = "token F1, best over annotators"
    correct_threshold = 0.5  # half of the words in common

    path: str = ""
    source: str = "longbench"

    def __post_init__(self) -> None:
        if self.source not in ("longbench", "official"):
            raise RestoreKVError(
                f"QASPER's source must be longbench or official, not {self.source!r}."
            )

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> list[Sample]:
        if self.source == "longbench":
            return longbench.load_task("qasper", self.path)
        return [
            sample
            for location, paper in _load_papers(self.path)
            for sample in _parse_paper(location, paper)
        ]

    def score(self, question: Question, prediction: str) -> float:
        return max(token_f1(prediction, answer) for answer in question.answers)

    def is_right(self, answer: Mapping[str, Any]) -> bool:
        """Return whether an answer reaches `correct_threshold`, or names a reference in its first
        line.
        """
        return super().is_right(answer) or names_reference(answer)

    def describe_data(self) -> str:
        return self.path or f"{HUB if self.source == 'official' else longbench.HUB} (Hugging Face)"

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "prompts": "LongBench's qasper in kvpress 0.5.5"}


def _load_papers(path: str) -> Rows:
    """Yield (location for messages, paper) from the hub, from the released file, which is one
    object {id: paper}, or from a file with a paper in each row.
    """
    if not path:
        yield from load_hub_rows(HUB, None, "validation", HUB_FIX, REVISION)
        return
    files = list_source_files(Path(path))
    if len(files) > 1:
        raise RestoreKVError(
            f"{path} has {len(files)} files; give path=FILE, that of the development set."
        )
    for location, row in load_file_rows(files[0]):
        if isinstance(row, dict) and "qas" not in row:
            yield from ((f"{files[0]}, paper {name}", paper) for name, paper in row.items())
        else:
            yield location, row


def _parse_paper(location: str, paper: dict) -> Iterator[Sample]:
    """Yield a paper's sample if it has questions."""
    with check_form(f"{location} is not a paper of QASPER", HUB_FIX):
        context = PROMPT.context.format(context=_join_sections(paper))
        questions = tuple(_parse_question(row) for row in _list_records(paper["qas"]))
        if questions:
            yield Sample(questions[0].id, context, questions)


def _join_sections(paper: dict) -> str:
    """Return the section names and paragraphs, one per line, without the title and the abstract:
    those who asked the questions had read them.
    """
    lines = []
    for section in _list_records(paper["full_text"]):
        lines += [section["section_name"] or "", *section["paragraphs"]]
    return "\n".join(filter(None, (" ".join(line.split("\n")).strip() for line in lines)))


def _parse_question(row: dict) -> Question:
    answers = tuple(
        _parse_reference(annotation["answer"]) for annotation in _list_records(row["answers"])
    )
    if not answers:
        raise ValueError(row)
    text = PROMPT.question.format(input=row["question"])
    return Question(
        row["question_id"],
        "qasper",
        text,
        answers,
        PROMPT.tokens + longbench.EXTRA_TOKENS,
        PROMPT.answer_prefix,
    )


def _parse_reference(answer: dict) -> str:
    """Return the answer of one annotator as the official evaluator writes it."""
    if answer["unanswerable"]:
        return "Unanswerable"
    if answer["extractive_spans"]:
        return ", ".join(answer["extractive_spans"])
    return answer["free_form_answer"] or {True: "Yes", False: "No"}[answer["yes_no"]]


def _list_records(table: list[dict] | dict[str, list]) -> list[dict]:
    """Return a table as a list of records; `datasets` stores it as a record of lists."""
    if isinstance(table, list):
        return table
    return [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
