"""Defines what a benchmark is: contexts, each with its questions, and a score for every answer.

A benchmark is a frozen dataclass whose fields are its settings ("ruler:length=4096,seed=1"), as
evictors are. It brings its own prompts; `evaluation.protocols` adds templates, stops and lengths
around them.
"""

import hashlib
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import spec
from restorekv.errors import RestoreKVError
from restorekv.model.tokenize import tokenize_text

ROUNDING = 1e-6  # by which a sum of shares may be above 1


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Args:
        id: The name of the question, unique in the benchmark.
        task: The task that it belongs to; scores are averaged by task.
        text: What is asked.
        answers: The references.
        max_new_tokens: The limit of an answer, in tokens.
        answer_prefix: The beginning of the answer, which the model continues.
        facts: What else the metric needs, as plain JSON values (classes, options, a language).
    """

    id: str
    task: str
    text: str
    answers: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # ("4711") is a text, not a tuple of one text: its four digits would be four references.
        if isinstance(self.answers, str) or not all(isinstance(each, str) for each in self.answers):
            raise RestoreKVError(
                f"The answers of the question {self.id!r} are {self.answers!r}; give a tuple of "
                "texts, such as ('4711',)."
            )


@dataclass(frozen=True)
class Sample:
    """A context, which is compressed once, and all its questions; `id` is unique in the
    benchmark.
    """

    id: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Benchmark(ABC):
    """Base class of benchmarks, whose fields are their settings.

    Args:
        count: How many contexts to ask about, spread evenly over the tasks; 0 asks about all.
        seed: Decides which ones are drawn.
    """

    name: ClassVar[str]
    title: ClassVar[str]  # the name in papers: RULER, LongBench
    license: ClassVar[str]  # of the data
    metric: ClassVar[str]  # what `score` computes, in words
    data: ClassVar[str]  # where the samples come from
    correct_threshold: ClassVar[float] = 1.0  # the lowest score of an answer that counts as right
    # Whether a group of tasks has a mean only if each of them was asked.
    needs_whole_groups: ClassVar[bool] = False
    known_tasks: ClassVar[Sequence[str]] = ()  # tasks that the setting `tasks` may name, if any

    count: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        _ = self.chosen_tasks  # refuses unknown tasks

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """The tasks that the setting `tasks` names, joined by "+", in the benchmark's order; all if
        it is empty.

        Raises:
            RestoreKVError: A task is unknown, or named twice.
        """
        # Benchmarks without the setting ask all of their tasks.
        setting = getattr(self, "tasks", "")
        given = setting.split("+") if setting else self.known_tasks
        for task in given:
            if task not in self.known_tasks:
                known = ", ".join(self.known_tasks)
                raise RestoreKVError(
                    f"{self.title} has no task {task!r}; use some of {known}, joined by +."
                )
            if list(given).count(task) > 1:  # its questions would count twice
                raise RestoreKVError(f"{self.title} is given {task} twice; name each task once.")
        return tuple(task for task in self.known_tasks if task in given)

    @property
    def spec(self) -> str:
        """The shortest spec that makes this benchmark."""
        return spec.format_spec(self.name, self)

    @abstractmethod
    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> Iterable[Sample]:
        """Return all contexts in a fixed order; `protocol` ("kvpress", "kvzip") decides lengths and
        wording.

        Raises RestoreKVError if the data cannot be read, and says what to fetch and where to put
        it.
        """

    @abstractmethod
    def score(self, question: Question, prediction: str) -> float:
        """Return the benchmark's official metric, in [0, 1]."""

    def score_answer(self, question: Question, prediction: str) -> dict[str, Any]:
        """Return `score` of an answer and, if there are any, its further `metrics`.

        Refuse values outside [0, 1] now, because the run would otherwise fail only at its end.
        """
        scored: dict[str, Any] = {
            "score": _check_score(self.score(question, prediction), f"score() of {self.title}")
        }
        metrics = self.compute_metrics(question, prediction)
        if metrics:
            scored["metrics"] = {
                name: _check_score(value, f"The metric {name} of {self.title}")
                for name, value in metrics.items()
            }
        return scored

    def is_right(self, answer: Mapping[str, Any]) -> bool:
        """Return whether a stored answer counts as right, to count how many right answers a small
        cache keeps.

        Args:
            answer: A row of a result, with `score`, `prediction` and `references`.
        """
        return answer["score"] >= self.correct_threshold

    def compute_metrics(self, question: Question, prediction: str) -> Mapping[str, float]:
        """Return further metrics by name, in [0, 1] each, to report in addition to the score; none
        by default.
        """
        return {}

    def to_json(self) -> dict[str, object]:
        """Return what a result records: source and license of the data, and the metric.

        Benchmarks add what else decides their samples, such as replacements for official data.
        """
        return {
            "data": self.describe_data(),
            "license": self.describe_license(),
            "metric": self._get_description("metric"),
        }

    def describe_data(self) -> str:
        """Return where the samples come from: `data`, unless the settings decide."""
        return self._get_description("data")

    def describe_license(self) -> str:
        """Return the license of the samples: `license`, unless the settings decide."""
        return self._get_description("license")

    def describe_title(self) -> str:
        """Return the name that sentences and tables show."""
        return self._get_description("title")

    def _get_description(self, attribute: str) -> str:
        """Return an attribute of the class; refuse a class without it."""
        words = getattr(self, attribute, None)
        if not isinstance(words, str):
            raise RestoreKVError(
                f"The benchmark {type(self).__name__} does not say its {attribute}; give the class "
                f'a text {attribute} = "...".'
            )
        return words

    def choose_samples(self, tokenizer: Tokenizer, protocol: str) -> list[Sample]:
        """Return the samples that a run asks: `count` of those that `load_samples` gives, or all.

        Raise RestoreKVError if they are not samples with unique ids.
        """
        if self.count < 0:
            raise RestoreKVError(f"count must be at least 0 (0 asks all), not {self.count}.")
        title = self.describe_title()
        loaded = list(self.load_samples(tokenizer, protocol))
        for each in loaded:
            if not isinstance(each, Sample):
                raise RestoreKVError(
                    f"load_samples() of {title} gave an object of the type {type(each).__name__}; "
                    "let it give Samples, each with a tuple of Questions."
                )
        # A text without questions has nothing to score.
        samples = [each for each in loaded if each.questions]
        names = Counter(each.id for each in samples)
        for name, count in names.items():
            if count > 1:
                raise RestoreKVError(
                    f"{title} has {count} texts with the id {name!r}; give each its own."
                )
        # The id of a question pairs the answers of different caches to it.
        for sample in samples:
            if len({question.id for question in sample.questions}) < len(sample.questions):
                raise RestoreKVError(
                    f"{title} asks about {sample.id!r} two questions with one id; give each its "
                    "own."
                )
        return _draw_evenly(samples, self.count, self.seed)

    def averages_contexts(self, protocol: str) -> bool:
        """Return whether a task's score is the mean over its contexts' means, not over all its
        questions.
        """
        return False

    def group_tasks(self) -> Mapping[str, tuple[str, ...]]:
        """Return named groups of tasks that tables show (LongBench's categories); none by
        default.
        """
        return {}


def _check_score(value: Any, what: str) -> float:
    """Return a number as a float in [0, 1], also one of NumPy or PyTorch; refuse anything else."""
    if not isinstance(value, str | bytes):
        try:
            figure = float(value)
        except (TypeError, ValueError):
            figure = math.nan
        if -ROUNDING <= figure <= 1 + ROUNDING:
            return min(max(figure, 0.0), 1.0)
    raise RestoreKVError(f"{what} gave {repr(value)[:80]}; let it return a number from 0 to 1.")


def separate_question(question: str, protocol: str) -> str:
    """Put a blank line before the question, except under KVzip's protocol, which separates it from
    the context.
    """
    return question if protocol == "kvzip" else f"\n\n{question}"


def make_token_counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text, without special tokens.

    The tokenizer's warning about long texts is left out.
    """
    return lambda text: len(tokenize_text(tokenizer, text))


def digest_samples(samples: Iterable[Sample]) -> str:
    """Return 16 hex digits of all contexts and questions."""
    sha256 = hashlib.sha256()
    for sample in samples:
        sha256.update(repr((sample.id, sample.context, sample.questions)).encode())
    return sha256.hexdigest()[:16]


def _draw_evenly(samples: Iterable[Sample], count: int, seed: int) -> list[Sample]:
    """Return `count` samples in their order, each task's share drawn by `seed`; all if count is 0
    or too large.
    """
    samples = list(samples)
    # All of them, in the order of the data.
    if count == 0 or count >= len(samples):
        return samples
    by_task: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        # A sample belongs to the task of its first question.
        by_task.setdefault(sample.questions[0].task, []).append(index)
    for task, indices in by_task.items():
        random.Random(f"{seed} {task}").shuffle(indices)
    # One sample of each task after the other; a task that has no more is skipped.
    rounds = zip_longest(*by_task.values())
    drawn = [index for indices in rounds for index in indices if index is not None]
    return [samples[index] for index in sorted(drawn[:count])]
