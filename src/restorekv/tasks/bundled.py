"""The bundled suite as a benchmark: eleven families of questions about documents of the bundled world."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Benchmark, Question, Sample
from restorekv.tiny import suite, world


@dataclass(frozen=True)
class Bundled(Benchmark):
    """`low` to `high` ids a document; `split` names other documents (those of "restore" are for training)."""

    name: ClassVar[str] = "bundled"
    title: ClassVar[str] = "Bundled suite"

    count: int = 52
    low: int = suite.SHORTEST
    high: int = suite.LONGEST
    split: str = "test"

    def __post_init__(self) -> None:
        if self.split.startswith("restore"):
            raise RestoreKVError(f"The split {self.split!r} is for training; evaluate on another one.")
        if not 0 < self.low <= self.high:
            raise RestoreKVError(f"Documents have low to high ids, 0 < low <= high, not {self.low} to {self.high}.")
        if self.count < 1:
            raise RestoreKVError("The bundled suite has no end; give count=NUMBER of at least 1.")

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterable[Sample]:
        """Documents are drawn, so `count` of them are made."""
        made = suite.documents(tokenizer, self.count, self.split, self.seed, self.low, self.high)
        for index, document in enumerate(made):
            asked = tuple(question_of(f"{index}-{turn}", asked) for turn, asked in enumerate(document.questions))
            yield Sample(str(index), document.text, asked)

    def score(self, question: Question, prediction: str) -> float:
        """Share of the answers found, the letter, or token F1, by the family."""
        return world_question(question).score(prediction)

    def described(self) -> dict[str, object]:
        return {"data": "generated", "licence": "Apache-2.0", "metric": "share found, letter or token F1 by family"}

    def groups(self) -> Mapping[str, tuple[str, ...]]:
        return world.GROUPS


def question_of(name: str, asked: world.Question) -> Question:
    facts = {"metric": asked.metric, "target": asked.target}
    return Question(name, asked.family, asked.text, asked.answers, asked.max_new_tokens, facts=facts)


def world_question(question: Question) -> world.Question:
    """The inverse."""
    target, metric = (str(question.facts[key]) for key in ("target", "metric"))
    return world.Question(question.text, question.answers, target, question.task, metric, question.max_new_tokens)
