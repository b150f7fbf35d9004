"""Questions over documents, RULER's qa_1 and qa_2 (arXiv 2404.06654, section 3; NVIDIA/RULER, qa.py).

Of SQuAD 2.0 (arXiv 1806.03822, `dev-v2.0.json`) and HotpotQA (arXiv 1809.09600, `hotpot_dev_distractor_v1.json`).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from restorekv.data.files import local_files, values
from restorekv.errors import RestoreKVError
from restorekv.tasks.ruler.dataset import existing
from restorekv.tasks.ruler.draft import Draft

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
CONTEXT = INSTRUCTION + "The following are given documents.\n\n{text}\n\n"
QUESTION = INSTRUCTION + "Question: {query} "
PREFIX = "Answer:"


class Asked(NamedTuple):
    """A question; `own` are the documents that answer it, `near` those to add first."""

    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...]


class Collection(NamedTuple):
    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


@dataclass(frozen=True)
class Documents:
    """One question over the documents that answer it among others. Units: documents."""

    documents: tuple[str, ...]
    asked: Asked

    @property
    def least(self) -> int:
        return len(self.asked.own)

    @property
    def most(self) -> int:
        return len(self.documents)

    def draft(self, units: int, rng: Random) -> Draft:
        own, near = self.asked.own, list(self.asked.near)
        rng.shuffle(near)
        shown = [*own, *near][:units]
        if units > len(shown):
            known = {*own, *near}
            rest = [index for index in range(self.most) if index not in known]
            rng.shuffle(rest)
            shown += rest[: units - len(shown)]
        rng.shuffle(shown)
        told = [f"Document {number}:\n{self.documents[index]}" for number, index in enumerate(shown, 1)]
        context, question = CONTEXT.format(text="\n\n".join(told)), QUESTION.format(query=self.asked.query)
        return Draft(context, question, PREFIX, self.asked.answers)


def squad(where: str) -> Collection:
    """Every answerable question, in the file's order; near are the other paragraphs of its article."""
    articles = [article for row in one_file(where) for article in row["data"]]
    places = numbers({paragraph["context"] for article in articles for paragraph in article["paragraphs"]})
    questions = []
    for article in articles:
        of_article = tuple(dict.fromkeys(places[paragraph["context"]] for paragraph in article["paragraphs"]))
        for paragraph in article["paragraphs"]:
            own = places[paragraph["context"]]
            near = tuple(index for index in of_article if index != own)
            for asked in paragraph["qas"]:
                if not asked["is_impossible"]:
                    answers = tuple(answer["text"] for answer in asked["answers"])
                    questions.append(Asked(asked["question"], answers, (own,), near))
    return Collection(tuple(places), tuple(questions))


def hotpot(where: str) -> Collection:
    """Every question; own are the supporting documents, near the distractors that come with it."""
    rows = list(one_file(where))
    places = numbers({document(*titled) for row in rows for titled in row["context"]})
    questions = []
    for row in rows:
        supporting = {title for title, _ in row["supporting_facts"]}
        own = tuple(dict.fromkeys(places[document(*titled)] for titled in row["context"] if titled[0] in supporting))
        every = dict.fromkeys(places[document(*titled)] for titled in row["context"])
        questions.append(Asked(row["question"], (row["answer"],), own, tuple(i for i in every if i not in own)))
    return Collection(tuple(places), tuple(questions))


def numbers(documents: set[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(sorted(documents))}


def document(title: str, sentences: list[str]) -> str:
    return f"{title}\n{''.join(sentences)}"


def one_file(where: str) -> list[dict]:
    """The JSON objects of a file."""
    return [row for file in local_files(existing(where)) for _, row in values(file)]


def read(kind: str, where: str) -> Collection:
    """Either of them; refuses a file of another form."""
    name, reader = {"squad": ("dev-v2.0.json", squad), "hotpot": ("hotpot_dev_distractor_v1.json", hotpot)}[kind]
    try:
        found = reader(where)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, RestoreKVError):
            raise
        raise RestoreKVError(f"{where} is not in the form of {name}; give that file.") from error
    if not found.questions:
        raise RestoreKVError(f"{where} has no question with an answer; give {name}.")
    return found
