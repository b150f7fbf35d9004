"""QuALITY (arXiv 2112.08608): stories and articles of some 5,000 words with questions of four options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.files import values
from restorekv.errors import RestoreKVError
from restorekv.tasks.base import Question, Sample
from restorekv.tasks.letter import Lettered


@dataclass(frozen=True)
class Quality(Lettered):
    """The first `articles` of the dev set (0: all 115), as RestoreKV's evaluation; `subset` is "all" or "hard".

    The file gives an article in two lines with a set of questions each; they are one context here. "hard" are the
    questions that the authors flag `difficult`: most people in a hurry got them wrong.
    """

    name: ClassVar[str] = "quality"
    title: ClassVar[str] = "QuALITY"
    file: ClassVar[str] = "QuALITY.v1.0.1.htmlstripped.dev"
    source: ClassVar[str] = "github.com/nyu-mll/quality (in data/v1.0.1/QuALITY.v1.0.1.zip)"

    articles: int = 100
    subset: str = "all"

    def __post_init__(self) -> None:
        if self.subset not in ("all", "hard"):
            raise RestoreKVError(f"The subset of QuALITY is all or hard, not {self.subset!r}.")

    def samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        """In the file's order; an article without a question of the subset is left out."""
        merged = list(self.merged().items())[: self.articles or None]
        if not merged:
            raise RestoreKVError(f"{self.located()} has no question with a gold_label; give the dev set.")
        for index, ((_, article), rows) in enumerate(merged):
            wanted = [(turn, row) for turn, row in enumerate(rows) if self.subset == "all" or row.get("difficult")]
            if wanted:
                asked = (self.made(f"{index}-{turn}", row, protocol) for turn, row in wanted)
                yield Sample(str(index), article, tuple(asked))

    def merged(self) -> dict[tuple[str, str], list[dict]]:
        """The labelled questions of each (article_id, article)."""
        path, found = self.located(), {}
        for place, row in values(path):
            if not is_article(row):
                raise RestoreKVError(f"{path}, {place} is no article of QuALITY with its questions; fetch it again.")
            questions = [question for question in row["questions"] if question.get("gold_label") is not None]
            if not all(map(is_question, questions)):
                raise RestoreKVError(f"{path}, {place} has a question without its four options; fetch it again.")
            found.setdefault((row["article_id"], row["article"].strip()), []).extend(questions)
        return {key: questions for key, questions in found.items() if questions}

    def made(self, name: str, row: dict, protocol: str) -> Question:
        """From a question of the file, whose labels count from 1."""
        return self.question(name, row["question"].strip(), row["options"], row["gold_label"] - 1, protocol)

    def described(self) -> dict[str, object]:
        asked = f"first {self.articles} articles" if self.articles else "all articles"
        return {
            "data": f"{self.file}, {asked}, {self.subset} questions",
            "licence": "CC BY 4.0",
            "metric": "accuracy of the first letter read",
        }


def is_article(row: object) -> bool:
    """Whether a line has what is read of it."""
    if not isinstance(row, dict) or not isinstance(row.get("questions"), list):
        return False
    texts = isinstance(row.get("article"), str) and isinstance(row.get("article_id"), str | int)
    return texts and bool(row["article"].strip()) and all(isinstance(question, dict) for question in row["questions"])


def is_question(row: dict) -> bool:
    """Whether a labelled question has a text, four options and a label among them."""
    options = row.get("options")
    four = isinstance(options, list) and len(options) == 4 and all(isinstance(option, str) for option in options)
    return four and isinstance(row.get("question"), str) and row["gold_label"] in (1, 2, 3, 4)
