"""The tiny suite as a benchmark: eleven families of questions about documents of the tiny world."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer
from restorekv.tiny import suite, world


@dataclass(frozen=True)
class TinySuite(Benchmark):
    """Contexts are generated documents of `low` to `high` ids; each `split` has different ones
    (those of "restore" are for training).
    """

    name = "tiny"
    title = "Tiny suite"
    data = "generated"
    license = "Apache-2.0"
    metric = "share found, letter or token F1 by family"

    count: int = 52
    low: int = world.SHORTEST
    high: int = world.LONGEST
    split: str = "test"

    def __post_init__(self) -> None:
        if self.split.startswith("restore"):
            raise RestoreKVError(
                f"The split {self.split!r} is for training; evaluate on a different one."
            )
        if not 0 < self.low <= self.high:
            raise RestoreKVError(
                f"low and high must be numbers of ids with 0 < low <= high, not {self.low} and "
                f"{self.high}."
            )
        if self.count < 1:
            raise RestoreKVError("The tiny suite has no end; give count=NUMBER of at least 1.")

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        documents = suite.draw_documents(
            tokenizer, self.count, self.split, self.seed, self.low, self.high
        )
        for index, document in enumerate(documents):
            questions = (
                convert_question(f"{index}-{turn}", asked)
                for turn, asked in enumerate(document.questions)
            )
            yield Sample(str(index), document.text, tuple(questions))

    def score(self, question: Question, prediction: str) -> float:
        """Return the metric of the question's family: the share of the answers found, whether the
        letter is right, or token F1.
        """
        target, metric = (str(question.facts[key]) for key in ("target", "metric"))
        asked = world.WorldQuestion(
            question.text, question.answers, target, question.task, metric, question.max_new_tokens
        )
        return asked.score(prediction)

    def group_tasks(self) -> Mapping[str, tuple[str, ...]]:
        return world.GROUPS


def convert_question(name: str, asked: world.WorldQuestion) -> Question:
    facts = {"metric": asked.metric, "target": asked.target}
    return Question(
        name, asked.family, asked.text, asked.answers, asked.max_new_tokens, facts=facts
    )
