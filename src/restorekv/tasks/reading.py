"""What is common to the benchmarks that ask for free answers about texts that ship: files, wording
and the passages of a text.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

from restorekv.data.files import identify_source
from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer, make_token_counter
from restorekv.tasks.metrics import contains_reference, normalize, token_f1
from restorekv.tasks.rows import check_form, load_rows
from restorekv.tasks.splits import EVALUATION, Split

TEXTS = Path(__file__).parent / "texts"
# The best of eleven wordings on training documents: recipes/smollm2/wording.py.
WORDING = "\n\nQuestion: {q}\nAnswer:"
MAX_NEW_TOKENS = 32  # the wording was chosen with this limit
# Between paragraphs, lines, words; the first that makes pieces small enough is used.
JOINTS = ("\n\n", "\n", " ")
# References that a sentence can contain without giving them as its answer; for these only the score
# decides.
VERDICTS = {"yes", "no"}
MIN_LENGTH = 64  # tokens of a passage; a single line may be longer than a smaller one
Item = TypeVar("Item")
Size = Callable[[str], int]


def names_reference(answer: Mapping[str, Any]) -> bool:
    """Return whether the first line of a stored answer names one of its references."""
    line = answer["prediction"].strip().partition("\n")[0]
    named = [each for each in answer["references"] if normalize(each) not in VERDICTS]
    return contains_reference(line, named)


@dataclass(frozen=True)
class Reading(Benchmark):
    """A benchmark of free answers about texts that ship.

    Args:
        path: A file of the same form as the one that ships; "" is that one.
        questions: How many questions of a context are asked, evenly spread over it; 0 asks all.
    """

    shipped: ClassVar[str]  # path below TEXTS
    source: ClassVar[str]
    # Name and function of what is reported in addition, best over the references.
    further_metric: ClassVar[tuple[str, Callable[[str, str], float]]]
    metric = "token F1, best over the references"
    correct_threshold = 0.5  # half of the words in common

    path: str = ""
    questions: int = 6

    def __post_init__(self) -> None:
        """Refuse an unknown split, and a length that is too small for passages; 0 means whole
        texts.
        """
        super().__post_init__()
        # Not every benchmark of this kind has these settings.
        split = getattr(self, "split", EVALUATION)
        length = getattr(self, "length", 0)
        if split not in (known := get_args(Split)):
            raise RestoreKVError(
                f"split must be one of {', '.join(known)}, not {split!r}; the default is "
                f"{EVALUATION}."
            )
        if 0 < length < MIN_LENGTH:
            raise RestoreKVError(
                f"The length of a passage must be at least {MIN_LENGTH} tokens, not {length}; 0 "
                "keeps texts whole."
            )

    @abstractmethod
    def parse_row(self, row: dict, size: Size) -> Iterable[Sample]:
        """Yield the samples of one row of the file; `size` counts the tokens of a text."""

    def is_right(self, answer: Mapping[str, Any]) -> bool:
        """Return whether an answer reaches `correct_threshold`, or names a reference in its first
        line.

        Small models answer in whole sentences, which have few words in common with a reference of
        one word.
        """
        return super().is_right(answer) or names_reference(answer)

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> list[Sample]:
        samples = []
        size = make_token_counter(tokenizer)
        for location, row in self.load_rows():
            with self.check_form(location):
                samples += self.parse_row(row, size)
        if not samples:
            # All rows of the file, which may be those of another split
            if not any(load_rows(self.locate_file())):
                raise RestoreKVError(
                    f"{self.locate_file()} holds no texts; name a file that has some."
                )
            raise RestoreKVError(
                f"{self.locate_file()} has no question for {self.spec}; choose other settings."
            )
        return samples

    def locate_file(self) -> Path:
        """Return the path of the file that is read."""
        return Path(self.path) if self.path else TEXTS / self.shipped

    def load_rows(self) -> Iterator[tuple[str, dict]]:
        """Yield (location for messages, row) of the file."""
        return load_rows(self.locate_file())

    def check_form(self, location: str) -> AbstractContextManager[None]:
        """Refuse rows of a different form."""
        return check_form(
            f"{location} is not in the form of {self.title}",
            f"compare it with {TEXTS / self.shipped}",
        )

    def make_question(self, name: str, task: str, text: str, answers: Sequence[str]) -> Question:
        """Return a question in the wording that all benchmarks of this kind share.

        The fact `bare` keeps KVzip's protocol from putting its own "Q: " before it, so that both
        protocols ask the same text.

        Args:
            name: The id of the question.
            task: Its task.
            text: What is asked, without the wording around it.
            answers: The references.
        """
        text = WORDING.format(q=text.strip())
        return Question(name, task, text, tuple(answers), MAX_NEW_TOKENS, facts={"bare": True})

    def score(self, question: Question, prediction: str) -> float:
        return max(token_f1(prediction, answer) for answer in question.answers)

    def compute_metrics(self, question: Question, prediction: str) -> Mapping[str, float]:
        name, compare = self.further_metric
        return {name: max(compare(prediction, answer) for answer in question.answers)}

    def describe_data(self) -> str:
        return self.path or f"{self.source}, as it ships"

    def to_json(self) -> dict[str, object]:
        files = []
        if self.locate_file().exists():
            files = identify_source(str(self.locate_file()))["files"]
        return {**super().to_json(), "files": files, "wording": WORDING}


def split_text(text: str, length: int, size: Size) -> list[str]:
    """Return the fewest passages of at most `length` tokens by `size`, as even as possible; 0 keeps
    the text whole.
    """
    if not length or size(text) <= length:
        return [text]
    # Cut the text into small parts first, and then join them again as evenly as possible.
    parts = _cut_text(text, length, size)
    groups = pack_neighbors([size(part) for part in parts], length)
    return ["".join(parts[group.start : group.stop]).strip() for group in groups]


def _cut_text(text: str, length: int, size: Size, joints: Sequence[str] = JOINTS) -> list[str]:
    """Return consecutive parts of the text: its paragraphs, the lines of those that are too long,
    or their words.
    """
    if not joints or size(text) <= length:
        return [text] if text else []
    first, *others = text.split(joints[0])
    pieces = _cut_text(first, length, size, joints[1:])
    for part in others:
        # A piece keeps the joint before it, so that the pieces join to the text again.
        pieces += _cut_text(joints[0] + part, length, size, joints[1:])
    return pieces


def pack_neighbors(sizes: Sequence[int], limit: int) -> list[range]:
    """Return the fewest groups of neighbors that sum to at most `limit` each, with the smallest
    largest group.

    A size above `limit` gets a separate group.
    """
    # The fewest groups that the limit allows; then the smallest limit that needs no more.
    count = len(_fill_groups(sizes, limit))
    low = 1
    high = limit
    while low < high:
        middle = (low + high) // 2
        if len(_fill_groups(sizes, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return _fill_groups(sizes, low)


def _fill_groups(sizes: Sequence[int], limit: int) -> list[range]:
    """Return groups of neighbors that fill each group before the next begins."""
    starts = [0]
    total = 0
    for index, size in enumerate(sizes):
        # An item that is too large alone still begins a group, which it fills.
        if total and total + size > limit:
            starts.append(index)
            total = 0
        total += size
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def choose_spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items in their order, evenly spaced; all of them if count is 0 or too
    large.
    """
    count = min(count, len(items)) or len(items)
    return [items[index * len(items) // count] for index in range(count)]
