"""Reading comprehension over texts that ship with the package: what FairytaleQA, XQuAD, HotpotQA and Factbook share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import identity, local_files, values
from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Benchmark, Question, Sample
from restorekv.tasks.metrics import token_f1
from restorekv.tasks.splits import EVALUATION, Split
from restorekv.tasks.wording import WORDING, worded

TEXTS = Path(__file__).parent / "texts"
MAX_NEW_TOKENS = 32  # as the wording was chosen under


@dataclass(frozen=True)
class Reading(Benchmark):
    """Up to `questions` questions of a context, evenly spread over it; 0 asks all.

    `path` is a file of the same form as the one that ships.
    """

    shipped: ClassVar[str]  # below TEXTS
    source: ClassVar[str]
    licence: ClassVar[str]

    path: str = ""
    questions: int = 6

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterable[Sample]:
        """Both protocols ask alike."""
        samples = list(self.read(lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)))
        if not samples:
            raise RestoreKVError(
                f"{self.located()} has no text with a question for {self.spec}; choose other settings."
            )
        return samples

    @abstractmethod
    def read(self, size: Callable[[str], int]) -> Iterator[Sample]:
        """Yields the samples of the file; `size` counts the tokens of a text."""

    def located(self) -> Path:
        """The file that is read."""
        return Path(self.path) if self.path else TEXTS / self.shipped

    def rows(self) -> Iterator[tuple[str, object]]:
        """Yields (place for messages, JSON value) of the file."""
        if not self.located().exists():
            raise RestoreKVError(f"There is no file {self.located()} for {self.title}; check the path.")
        for file in local_files(self.located()):
            yield from ((f"{file}, {place}", value) for place, value in values(file))

    def foreign(self, place: str) -> RestoreKVError:
        """Says that what stands there is something else."""
        return RestoreKVError(f"{place} is not in the form of {self.title}; compare it with {TEXTS / self.shipped}.")

    def asked(self, name: str, task: str, question: str, answers: Sequence[str]) -> Question:
        """A question in the benchmarks' wording."""
        if not isinstance(question, str) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(name)
        text, facts = worded(question.strip())
        return Question(name, task, text, tuple(answers), MAX_NEW_TOKENS, facts=facts)

    def score(self, question: Question, prediction: str) -> float:
        """The best token F1 over the references."""
        return max(token_f1(prediction, answer) for answer in question.answers)

    def described(self) -> dict[str, object]:
        return {
            "data": self.path or f"{self.source}, as it ships", "licence": self.licence,
            "files": identity(str(self.located()))["files"] if self.located().exists() else [],
            "metric": "token F1, best over the references", "wording": WORDING,
        }  # fmt: skip


def check_split(split: str) -> Split:
    """Returns the split, or refuses an unknown one."""
    if split not in get_args(Split):
        raise RestoreKVError(f"A split is one of {', '.join(get_args(Split))}, not {split!r}; default {EVALUATION}.")
    return split
