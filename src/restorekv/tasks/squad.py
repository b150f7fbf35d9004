"""Subsets of XQuAD's English part and of HotpotQA: questions with answers in encyclopedia text.

XQuAD (arXiv 1910.11856) takes five paragraphs of an article of SQuAD 1.1's development set (arXiv
1606.05250); HotpotQA (arXiv 1809.09600) gives ten paragraphs, two of which are needed for the
answer. Exact match and F1 are those of the official evaluators.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from restorekv.tasks.base import Question, Sample
from restorekv.tasks.metrics import match_exactly, normalize
from restorekv.tasks.reading import Reading, choose_spread, pack_neighbors
from restorekv.tasks.rows import get_field

VERDICTS = ("yes", "no", "noanswer")


@dataclass(frozen=True)
class Extractive(Reading):
    """Base of the two benchmarks, which score token F1 and also report exact match."""

    license = "CC BY-SA 4.0"
    metric = "token F1; in addition exact match; both best over the references"
    further_metric = ("exact_match", match_exactly)


@dataclass(frozen=True)
class XQuAD(Extractive):
    """Contexts are paragraphs of an article, joined up to `length` tokens (0: whole articles)."""

    name = "xquad"
    title = "XQuAD"
    shipped = "share-alike/squad.json.gz"
    source = "36 articles of XQuAD's English part, a subset of SQuAD v1.1 dev"

    length: int = 1024

    def parse_row(self, row: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        for article in row["data"]:
            yield from self.read_article(article, size)

    def read_article(self, article: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        """Yield the groups of paragraphs that have questions; a paragraph longer than `length` is a
        group alone.
        """
        paragraphs = article["paragraphs"]
        sizes = [size(paragraph["context"] + "\n\n") for paragraph in paragraphs]
        groups = pack_neighbors(sizes, self.length) if self.length else [range(len(paragraphs))]
        for number, group in enumerate(groups, 1):
            members = [paragraphs[index] for index in group]
            questions = [
                self.make_question(
                    str(row["id"]),
                    "xquad",
                    row["question"],
                    [get_field(each, "text") for each in row["answers"]],
                )
                for paragraph in members
                for row in paragraph["qas"]
                if not row.get("is_impossible") and row["answers"]
            ]
            if questions:
                text = "\n\n".join(paragraph["context"].strip() for paragraph in members)
                yield Sample(
                    f"{article['title']}/{number}",
                    text,
                    tuple(choose_spread(questions, self.questions)),
                )


@dataclass(frozen=True)
class HotpotQA(Extractive):
    """Every context is the ten paragraphs that come with a question, and has only that question."""

    name = "hotpotqa"
    title = "HotpotQA"
    shipped = "share-alike/hotpotqa.json.gz"
    source = "75 of the 100 development examples on HotpotQA's site"

    def parse_row(self, row: dict, size: Callable[[str], int]) -> Iterator[Sample]:
        paragraphs = [
            f"{title}\n{''.join(sentences).strip()}" for title, sentences in row["context"]
        ]
        question = self.make_question(
            str(row["_id"]), "hotpotqa", row["question"], [get_field(row, "answer")]
        )
        yield Sample(question.id, "\n\n".join(paragraphs), (question,))

    def score(self, question: Question, prediction: str) -> float:
        """Return token F1, but 0 if prediction and answer differ and one of them is "yes", "no" or
        "noanswer", as in the official evaluator.
        """
        answer = normalize(prediction)
        reference = normalize(question.answers[0])
        if answer != reference and {answer, reference} & set(VERDICTS):
            return 0.0
        return super().score(question, prediction)
