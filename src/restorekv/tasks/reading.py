"""What benchmarks of one file share: free answers about texts that ship (`Reading`), and lettered options."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, get_args

from restorekv.data.files import identity
from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer, token_counter
from restorekv.tasks.metrics import letter, token_f1
from restorekv.tasks.rows import local_rows, well_formed
from restorekv.tasks.splits import EVALUATION, Split
from restorekv.tasks.wording import LETTERS, WORDING, apart, with_options, worded

TEXTS = Path(__file__).parent / "texts"
MAX_NEW_TOKENS = 32  # the wording was chosen with this limit
LETTER_TOKENS = 128  # of RestoreKV's own evaluation


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
        """Returns a question in the wording that all benchmarks of this kind share."""
        text, facts = worded(text.strip())
        return Question(name, task, text, tuple(answers), MAX_NEW_TOKENS, facts=facts)

    def score(self, question: Question, prediction: str) -> float:
        return max(token_f1(prediction, answer) for answer in question.answers)

    @property
    def data(self) -> str:
        return self.path or f"{self.source}, as it ships"

    def described(self) -> dict[str, object]:
        files = identity(str(self.located()))["files"] if self.located().exists() else []
        return {**super().described(), "files": files, "wording": WORDING}


@dataclass(frozen=True)
class Lettered(Benchmark):
    """Asks questions with lettered options from one file; `path` is the file or the folder that holds it."""

    file: ClassVar[str]
    source: ClassVar[str]  # where to fetch the file
    metric = "accuracy of the first letter read"

    path: str = ""

    def located(self) -> Path:
        """Returns the path of the file, or raises RestoreKVError if there is none."""
        path = Path(self.path) / self.file if Path(self.path).is_dir() else Path(self.path)
        if not self.path or not path.is_file():
            missing = f"there is no file {path}" if self.path else "its data do not ship"
            raise RestoreKVError(
                f"{self.title} cannot be asked because {missing}; fetch {self.file} from {self.source} and give "
                f"{self.name}:path=FILE."
            )
        return path

    def question(self, name: str, text: str, options: Sequence[str], right: int, protocol: str) -> Question:
        """Returns the question whose right option is number `right`, counted from 0.

        RestoreKV's own evaluation puts no "Q: " before such a question; the fact `bare` tells protocols so.
        """
        facts = {"options": list(options), "bare": True}
        text = apart(with_options(text.strip(), options), protocol)
        return Question(name, self.name, text, (LETTERS[right],), LETTER_TOKENS, facts=facts)

    def by_context(self, protocol: str) -> bool:
        """RestoreKV's own evaluation averages over contexts, as KVzip's does."""
        return protocol == "kvzip"

    def score(self, question: Question, prediction: str) -> float:
        return float(letter(prediction) == question.answers[0])


def check_split(split: str) -> None:
    """Raises RestoreKVError for an unknown split."""
    if split not in get_args(Split):
        raise RestoreKVError(f"A split is one of {', '.join(get_args(Split))}, not {split!r}; default {EVALUATION}.")
