"""LongHealth (arXiv 2401.14490): the records of 20 fictional patients, 20 questions of five options about each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import values
from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Question, Sample
from restorekv.tasks.letter import Lettered

OPTIONS = ("answer_a", "answer_b", "answer_c", "answer_d", "answer_e")


@dataclass(frozen=True)
class LongHealth(Lettered):
    """A context is the records of `patients` patients, in the order of their ids; those left over are not asked.

    RestoreKV's evaluation takes one; of several, every question names its patient.
    """

    name: ClassVar[str] = "longhealth"
    title: ClassVar[str] = "LongHealth"
    file: ClassVar[str] = "benchmark_v5.json"
    source: ClassVar[str] = "github.com/kbressem/LongHealth (data/benchmark_v5.json)"

    patients: int = 1

    def __post_init__(self) -> None:
        if self.patients < 1:
            raise RestoreKVError(f"A context of LongHealth has at least 1 patient, not {self.patients}.")

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        path = self.located()
        found = patients_of(path)
        names = sorted(found)
        for start in range(0, len(names) - self.patients + 1, self.patients):
            group = names[start : start + self.patients]
            blocks = [block(*text) for name in group for text in found[name]["texts"].items()]
            asked = [
                self.made(path, name, found[name], row, protocol) for name in group for row in found[name]["questions"]
            ]
            yield Sample("+".join(group), "\n\n".join(blocks).strip(), tuple(asked))

    def made(self, path: Path, name: str, patient: dict, row: dict, protocol: str) -> Question:
        """From a question of the file, which tells the right answer by its text."""
        options = [row[key] for key in OPTIONS if row.get(key)]
        right = [option.strip() for option in options]
        if row["correct"].strip() not in right:
            raise RestoreKVError(f"{path}: the answer to question {row['No']} of {name} is no option; mend the file.")
        text = row["question"].strip()
        if self.patients > 1:
            known = ", ".join(f"{key.capitalize()}: {patient[key]}" for key in ("name", "birthday", "diagnosis"))
            text = f"About patient ID {name}, {known}: {text}"
        return self.question(f"{name}-{row['No']}", text, options, right.index(row["correct"].strip()), protocol)

    def described(self) -> dict[str, object]:
        return {
            "data": f"{self.file}, patients a context: {self.patients}",
            "licence": "Apache-2.0",
            "metric": "accuracy of the first letter read",
        }


def block(name: str, text: str) -> str:
    """A record between tags of its name."""
    return f"<{name}>\n{text}\n</{name}>"


def patients_of(path: Path) -> dict[str, dict]:
    """The file's patients by id; raises RestoreKVError where one is not in the form of version 5."""
    every = [row for _, row in values(path)]
    if len(every) != 1 or not isinstance(every[0], dict) or not every[0]:
        raise RestoreKVError(f"{path} is not one JSON object of patients; fetch it again.")
    for name, patient in every[0].items():
        if not is_patient(patient):
            raise RestoreKVError(f"{path}: {name} lacks texts or questions in the form of version 5; fetch it again.")
    return every[0]


def is_patient(patient: object) -> bool:
    """Whether it has what is read of it."""
    if not isinstance(patient, dict) or not isinstance(patient.get("texts"), dict):
        return False
    texts = [*patient["texts"].values(), *(patient.get(key) for key in ("name", "birthday", "diagnosis"))]
    return (
        all(isinstance(text, str) for text in texts)
        and isinstance(patient.get("questions"), list)
        and all(map(is_question, patient["questions"]))
    )


def is_question(row: object) -> bool:
    """Options may lack (they are left out); number, question and the right answer may not."""
    return (
        isinstance(row, dict)
        and "No" in row
        and all(isinstance(row.get(key), str) for key in ("question", "correct"))
        and all(isinstance(row.get(key, ""), str) for key in OPTIONS)
    )
