"""FairytaleQA (arXiv 2203.13947): questions by education experts about stories, explicit and implicit ones apart.

A question belongs to the sections of its story that hold its answer. The files give the sections' numbers but not where
they begin, so that in a passage of a story a question is asked only if two signs agree that it belongs there: the words
of question and answers, and where in the story the numbers lie. On 25 training stories whose sections are known 96 % of
what is asked was in its passage at 1,024 tokens, and 9 % of the questions were left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

from restorekv.tasks.base import Question, Sample
from restorekv.tasks.excerpts import check_length, passages, spread
from restorekv.tasks.metrics import longest_common_f1, normalised
from restorekv.tasks.reading import Reading, check_split
from restorekv.tasks.splits import EVALUATION, fairytale_split

POSITION = 3  # what a distance of the whole story costs, in shares of the words found
COMMON = frozenset(
    "what why how who where when which did does do is was were be been to of in on at for and or he she it his her "
    "they them their with that this as by from had has have not would could will about after before so because him i "
    "you".split()
)


@dataclass(frozen=True)
class FairytaleQA(Reading):
    """Passages of stories of at most `length` tokens, cut at paragraph ends; 0 keeps the stories whole.

    `split` takes the stories of one split of the file: val.jsonl is for evaluation, train.jsonl for the others.
    """

    name: ClassVar[str] = "fairytaleqa"
    title: ClassVar[str] = "FairytaleQA"
    shipped: ClassVar[str] = "fairytaleqa/val.jsonl.gz"
    source: ClassVar[str] = "FairytaleQA's validation set (uci-soe/FairytaleQAData at a24ddc17)"
    licence: ClassVar[str] = "Apache-2.0; the stories are in the public domain"

    length: int = 1024
    split: str = EVALUATION

    def __post_init__(self) -> None:
        check_length(self.length)
        check_split(self.split)

    def read(self, size: Callable[[str], int]) -> Iterator[Sample]:
        file = self.located().name.partition(".")[0]
        for index, (place, row) in enumerate(self.rows()):
            if fairytale_split(file, index) != self.split:
                continue
            try:
                yield from self.of_story(row, size)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self.foreign(place) from error

    def of_story(self, row: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        """Yields the passages that have questions."""
        texts = passages(row["context"], self.length, size)
        held: list[list[Question]] = [[] for _ in texts]
        for told, place in zip(row["questions"], belonging(row["questions"], texts), strict=True):
            if place is not None:
                task = "explicit" if told["explicit"] else "implicit"
                held[place].append(self.asked(told["id"], task, told["question"], told["answers"]))
        for number, (text, questions) in enumerate(zip(texts, held, strict=True), 1):
            if questions:
                name = f"{row['id']}/{number} of {len(texts)}" if len(texts) > 1 else row["id"]
                yield Sample(name, text, tuple(spread(questions, self.questions)))

    def metrics(self, question: Question, prediction: str) -> dict[str, float]:
        return {"rouge_l": max(longest_common_f1(prediction, answer) for answer in question.answers)}

    def described(self) -> dict[str, object]:
        told = super().described()
        return {**told, "metric": "token F1; beside it ROUGE-L; both best over two annotators", "split": self.split}


def belonging(questions: Sequence[dict], texts: Sequence[str]) -> list[int | None]:
    """Returns the passage that each question of a story is about; None where words and place disagree."""
    last = max((max(sections(each)) for each in questions), default=1)
    ends = list(accumulate(len(text) for text in texts))
    edges = [end / ends[-1] for end in (0, *ends)]
    vocabularies = [content(text) for text in texts]
    frequency = Counter(word for words in vocabularies for word in words)
    found = []
    for each in questions:
        wanted = {word: math.log((len(texts) + 1) / (frequency[word] + 0.5)) for word in evidence(each)}
        total = sum(wanted.values()) or 1.0
        shares = [sum(weight for word, weight in wanted.items() if word in words) / total for words in vocabularies]
        where = (sum(sections(each)) / len(sections(each)) - 0.5) / last
        away = [max(low - where, where - high, 0) for low, high in pairwise(edges)]
        likely = [share - POSITION * distance for share, distance in zip(shares, away, strict=True)]
        by_words, by_both = (max(range(len(texts)), key=values.__getitem__) for values in (shares, likely))
        found.append(by_both if by_words == by_both else None)
    return found


def sections(question: dict) -> list[int]:
    """Numbers from 1 of the sections that answer a question."""
    return [int(number) for number in question["sections"].split(",")]


def evidence(question: dict) -> set[str]:
    return content(" ".join([question["question"], *question["answers"]]))


def content(text: str) -> set[str]:
    """The words of a text that say what it is about."""
    return set(normalised(text).split()) - COMMON
