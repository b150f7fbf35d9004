"""The World Factbook (last edition, January 2026): sections about countries as lines of fields, asked field by field.

The questions are machine-made: what is given for a field. Figures of 2025 are younger than SmolLM2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from restorekv.tasks.base import Question, Sample
from restorekv.tasks.excerpts import spread
from restorekv.tasks.metrics import normalised
from restorekv.tasks.reading import Reading, check_split
from restorekv.tasks.splits import EVALUATION, factbook_splits


@dataclass(frozen=True)
class Factbook(Reading):
    """Whole documents of 512 to 4,096 tokens.

    Of a file given as `path` the documents of one `split` are taken, which is decided over the whole collection.
    """

    name: ClassVar[str] = "factbook"
    title: ClassVar[str] = "Factbook"
    shipped: ClassVar[str] = "factbook/evaluation.jsonl.gz"
    source: ClassVar[str] = "60 sections of The World Factbook (factbook/factbook.json at 8662a8b1)"
    licence: ClassVar[str] = "CC0"

    split: str = EVALUATION

    def __post_init__(self) -> None:
        check_split(self.split)

    def read(self, size: Callable[[str], int]) -> Iterator[Sample]:
        for place, row in self.of_split():
            try:
                asked = [
                    self.asked(f"{row['id']}/{number}", "factbook", told["question"], told["answers"])
                    for number, told in enumerate(spread(row["questions"], self.questions), 1)
                ]
                yield Sample(row["id"], row["context"], tuple(asked))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self.foreign(place) from error

    def of_split(self) -> list[tuple[str, dict]]:
        """What ships is all of the evaluation split."""
        found = list(self.rows())
        for place, row in found:
            if not isinstance(row, dict) or not isinstance(row.get("id"), str):
                raise self.foreign(place)
        if not self.path:
            return found if self.split == EVALUATION else []
        splits = factbook_splits(row["id"] for _, row in found)
        return [(place, row) for place, row in found if splits[row["id"]] == self.split]

    def metrics(self, question: Question, prediction: str) -> dict[str, float]:
        said = f" {normalised(prediction)} "
        return {"contained": float(any(f" {normalised(answer)} " in said for answer in question.answers))}

    def described(self) -> dict[str, object]:
        return {
            **super().described(), "metric": "token F1; beside it whether the answer contains the value",
            "questions": "machine-made", "split": self.split,
        }  # fmt: skip
