"""What a benchmark is: contexts, each with its questions, and a score for every answer.

A benchmark is a frozen dataclass whose fields are its settings ("ruler:length=4096,seed=1"), as evictors are. Its own
prompt texts are here; what a protocol puts around them (templates, stops, lengths of its own) is in `protocols`.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import spec
from restorekv.errors import RestoreKVError


@dataclass(frozen=True)
class Question:
    """One question about a context; `id` is unique in the benchmark, `task` is what scores are averaged by.

    `answers` are the references, `answer_prefix` opens the answer, `facts` is what the metric needs besides (plain JSON
    values: classes, options, a language).
    """

    id: str
    task: str
    text: str
    answers: tuple[str, ...]
    max_new_tokens: int
    answer_prefix: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A context, compressed once, and all that is asked of it; `id` is unique in the benchmark."""

    id: str
    context: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Benchmark(ABC):
    """`count` is how many contexts are asked, spread evenly over the tasks by `seed`; 0 is all of them."""

    name: ClassVar[str]
    title: ClassVar[str]  # as the field writes it: RULER, LongBench

    count: int = 0
    seed: int = 0

    @property
    def spec(self) -> str:
        """The shortest spec that makes this benchmark."""
        return spec.write(self.name, self)

    @abstractmethod
    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterable[Sample]:
        """Every context in a fixed order, before `count`; `protocol` ("kvpress", "kvzip") decides lengths and wording.

        Raises RestoreKVError where the data is not at hand, with what to fetch and where to put it.
        """

    @abstractmethod
    def score(self, question: Question, prediction: str) -> float:
        """In [0, 1], by the benchmark's official metric."""

    def metrics(self, question: Question, prediction: str) -> Mapping[str, float]:
        """Returns further metrics by name, in [0, 1] each, that are reported beside the score; none by default."""
        return {}

    @abstractmethod
    def described(self) -> dict[str, object]:
        """For results: source and licence of the data, metric, and whatever stands in for something official."""

    def chosen(self, tokenizer: Tokenizer, protocol: str) -> list[Sample]:
        """The samples that a run asks."""
        if self.count < 0:
            raise RestoreKVError(f"count is a number of contexts, at least 0, not {self.count}.")
        return evenly(self.samples(tokenizer, protocol), self.count, self.seed)

    def by_context(self, protocol: str) -> bool:
        """Whether a task's score is the mean of its contexts' means, not of all its questions."""
        return False

    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Named groups of tasks that tables show (LongBench's categories); none by default."""
        return {}


def digest(samples: Iterable[Sample]) -> str:
    """16 hex digits of all that is asked."""
    told = hashlib.sha256()
    for sample in samples:
        told.update(repr((sample.id, sample.context, sample.questions)).encode())
    return told.hexdigest()[:16]


def evenly(samples: Iterable[Sample], count: int, seed: int) -> list[Sample]:
    """`count` samples in their order, each task's share drawn by `seed`; all of them where count is 0 or too large."""
    every = list(samples)
    if count == 0 or count >= len(every):
        return every
    by_task: dict[str, list[int]] = {}
    for index, sample in enumerate(every):
        by_task.setdefault(sample.questions[0].task, []).append(index)
    for task, indices in by_task.items():
        random.Random(f"{seed} {task}").shuffle(indices)
    return [every[index] for index in sorted(dealt(list(by_task.values()), count))]


def dealt(piles: list[list[int]], count: int) -> Iterator[int]:
    """`count` items, one from each pile in turn."""
    for height in range(max(map(len, piles))):
        for pile in piles:
            if height < len(pile) and count:
                count -= 1
                yield pile[height]
