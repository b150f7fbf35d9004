"""Questions about encyclopedia text whose answers stand in it: XQuAD's English part and HotpotQA, both subsets.

XQuAD (arXiv 1910.11856) takes five paragraphs of an article of SQuAD 1.1's development set (arXiv 1606.05250); HotpotQA
(arXiv 1809.09600) gives ten paragraphs of which two answer. Exact match and F1 are those of the official evaluators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from restorekv.tasks.base import Question, Sample
from restorekv.tasks.excerpts import check_length, packed, spread
from restorekv.tasks.metrics import exact_match, normalised
from restorekv.tasks.reading import Reading

VERDICTS = ("yes", "no", "noanswer")


@dataclass(frozen=True)
class Extractive(Reading):
    """F1 is the score, exact match stands beside it."""

    licence: ClassVar[str] = "CC BY-SA 4.0"

    def metrics(self, question: Question, prediction: str) -> dict[str, float]:
        return {"exact_match": max(exact_match(prediction, answer) for answer in question.answers)}

    def described(self) -> dict[str, object]:
        return {**super().described(), "metric": "token F1; beside it exact match; both best over the references"}


@dataclass(frozen=True)
class XQuAD(Extractive):
    """Articles, their paragraphs joined up to `length` tokens (0: whole articles), and the questions of those."""

    name: ClassVar[str] = "xquad"
    title: ClassVar[str] = "XQuAD"
    shipped: ClassVar[str] = "share-alike/squad.json.gz"
    source: ClassVar[str] = "36 articles of XQuAD's English part, a subset of SQuAD v1.1 dev"

    length: int = 1024

    def __post_init__(self) -> None:
        check_length(self.length)

    def read(self, size: Callable[[str], int]) -> Iterator[Sample]:
        for place, row in self.rows():
            try:
                for article in row["data"]:
                    yield from self.of_article(article, size)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self.foreign(place) from error

    def of_article(self, article: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        """Yields groups of paragraphs; one that is longer than `length` stands alone."""
        paragraphs = article["paragraphs"]
        sizes = [size(each["context"] + "\n\n") for each in paragraphs]
        groups = packed(sizes, self.length) if self.length else [range(len(paragraphs))]
        for number, group in enumerate(groups, 1):
            chosen = [paragraphs[index] for index in group]
            asked = [
                self.asked(str(told["id"]), "xquad", told["question"], [answer["text"] for answer in told["answers"]])
                for paragraph in chosen
                for told in paragraph["qas"]
                if not told.get("is_impossible") and told["answers"]
            ]
            if asked:
                text = "\n\n".join(paragraph["context"].strip() for paragraph in chosen)
                yield Sample(f"{article['title']}/{number}", text, tuple(spread(asked, self.questions)))


@dataclass(frozen=True)
class HotpotQA(Extractive):
    """Every question over its own ten paragraphs."""

    name: ClassVar[str] = "hotpotqa"
    title: ClassVar[str] = "HotpotQA"
    shipped: ClassVar[str] = "share-alike/hotpotqa.json.gz"
    source: ClassVar[str] = "75 of the 100 development examples on HotpotQA's site"

    def read(self, size: Callable[[str], int]) -> Iterator[Sample]:
        for place, row in self.rows():
            try:
                paragraphs = [f"{title}\n{''.join(sentences).strip()}" for title, sentences in row["context"]]
                asked = self.asked(str(row["_id"]), "hotpotqa", row["question"], [row["answer"]])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise self.foreign(place) from error
            yield Sample(asked.id, "\n\n".join(paragraphs), (asked,))

    def score(self, question: Question, prediction: str) -> float:
        """Token F1, but of yes and no alike or nothing, as the official evaluator has it."""
        said, wanted = normalised(prediction), normalised(question.answers[0])
        if said != wanted and {said, wanted} & set(VERDICTS):
            return 0.0
        return super().score(question, prediction)
