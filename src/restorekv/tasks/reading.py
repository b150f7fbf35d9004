"""What the benchmarks share that ask for free answers about texts that ship."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

from restorekv.data.files import identity
from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer, token_counter
from restorekv.tasks.metrics import token_f1
from restorekv.tasks.rows import local_rows, well_formed
from restorekv.tasks.splits import EVALUATION, Split

TEXTS = Path(__file__).parent / "texts"
WORDING = "\n\nQuestion: {q}\nAnswer:"  # the best of eleven on training documents: recipes/smollm2/wording.py
MAX_NEW_TOKENS = 32  # the wording was chosen with this limit


@dataclass(frozen=True)
class Reading(Benchmark):
    """Asks up to `questions` questions of a context, evenly spread over it; 0 asks all.

    `path` is a file of the same form as the one that ships.
    """

    shipped: ClassVar[str]  # path below TEXTS
    source: ClassVar[str]
    metric = "token F1, best over the references"

    path: str = ""
    questions: int = 6

    @abstractmethod
    def read(self, row: dict, size: Callable[[str], int]) -> Iterable[Sample]:
        """Yields the samples of one row of the file; `size` counts the tokens of a text."""

    def samples(self, tokenizer: Tokenizer, protocol: str) -> list[Sample]:
        samples, size = [], token_counter(tokenizer)
        for place, row in self.rows():
            with self.well_formed(place):
                samples += self.read(row, size)
        if not samples:
            raise RestoreKVError(f"{self.located()} has no question for {self.spec}; choose other settings.")
        return samples

    def located(self) -> Path:
        """Returns the path of the file that is read."""
        return Path(self.path) if self.path else TEXTS / self.shipped

    def rows(self) -> Iterator[tuple[str, dict]]:
        """Yields (place for messages, row) of the file."""
        return local_rows(self.located())

    def well_formed(self, place: str) -> AbstractContextManager[None]:
        """Refuses rows of another form."""
        return well_formed(f"{place} is not in the form of {self.title}", f"compare it with {TEXTS / self.shipped}")

    def question(self, name: str, task: str, text: str, answers: Sequence[str]) -> Question:
        """Returns a question in the wording that all benchmarks of this kind share.

        The fact `bare` keeps KVzip's protocol from putting its own "Q: " before it, so that both protocols ask alike.
        """
        text = WORDING.format(q=text.strip())
        return Question(name, task, text, tuple(answers), MAX_NEW_TOKENS, facts={"bare": True})

    def score(self, question: Question, prediction: str) -> float:
        return max(token_f1(prediction, answer) for answer in question.answers)

    @property
    def data(self) -> str:
        return self.path or f"{self.source}, as it ships"

    def described(self) -> dict[str, object]:
        files = identity(str(self.located()))["files"] if self.located().exists() else []
        return {**super().described(), "files": files, "wording": WORDING}


def check_split(split: str) -> None:
    """Raises RestoreKVError for an unknown split."""
    if split not in get_args(Split):
        raise RestoreKVError(f"A split is one of {', '.join(get_args(Split))}, not {split!r}; default {EVALUATION}.")
