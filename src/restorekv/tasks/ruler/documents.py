"""Questions over documents, RULER's qa_1 and qa_2 (arXiv 2404.06654, section 3; NVIDIA/RULER, qa.py).

They come from SQuAD 2.0 (arXiv 1806.03822, `dev-v2.0.json`) and HotpotQA (arXiv 1809.09600,
`hotpot_dev_distractor_v1.json`).
"""

from collections.abc import Iterable
from random import Random
from typing import NamedTuple

from restorekv.errors import RestoreKVError
from restorekv.tasks.rows import local_rows, well_formed
from restorekv.tasks.ruler.draft import Draft, Task

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
)
CONTEXT = INSTRUCTION + "The following are given documents.\n\n{text}\n\n"
QUESTION = INSTRUCTION + "Question: {query} "
PREFIX = "Answer:"


class Asked(NamedTuple):
    """A question; the documents `own` answer it, and `near` are the first to add. Both are indices."""

    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...]


class Collection(NamedTuple):
    documents: tuple[str, ...]
    questions: tuple[Asked, ...]


def over_documents(documents: tuple[str, ...], asked: Asked) -> Task:
    """Asks one question over the documents that answer it among others. Units are documents."""

    def draft(units: int, rng: Random) -> Draft:
        near = list(asked.near)
        rng.shuffle(near)
        shown = [*asked.own, *near][:units]
        if units > len(shown):
            known = {*asked.own, *near}
            rest = [index for index in range(len(documents)) if index not in known]
            rng.shuffle(rest)
            shown += rest[: units - len(shown)]
        rng.shuffle(shown)
        text = "\n\n".join(f"Document {number}:\n{documents[index]}" for number, index in enumerate(shown, 1))
        return Draft(CONTEXT.format(text=text), QUESTION.format(query=asked.query), PREFIX, asked.answers)

    return Task(draft, len(asked.own), len(documents))


def squad(rows: list[dict]) -> Collection:
    """Reads every answerable question, in the file's order; near are the other paragraphs of its article."""
    articles = [article["paragraphs"] for row in rows for article in row["data"]]
    index = numbers(paragraph["context"] for paragraphs in articles for paragraph in paragraphs)
    questions = []
    for paragraphs in articles:
        article = dict.fromkeys(index[paragraph["context"]] for paragraph in paragraphs)
        for paragraph in paragraphs:
            own = index[paragraph["context"]]
            near = tuple(other for other in article if other != own)
            for row in paragraph["qas"]:
                if not row["is_impossible"]:
                    answers = tuple(answer["text"] for answer in row["answers"])
                    questions.append(Asked(row["question"], answers, (own,), near))
    return Collection(tuple(index), tuple(questions))


def hotpot(rows: list[dict]) -> Collection:
    """Reads every question; own are the supporting documents, near the distractors that come with it."""
    contexts = [[(title, f"{title}\n{''.join(text)}") for title, text in row["context"]] for row in rows]
    index = numbers(text for context in contexts for _, text in context)
    questions = []
    for row, context in zip(rows, contexts, strict=True):
        supporting = {title for title, _ in row["supporting_facts"]}
        own = tuple(dict.fromkeys(index[text] for title, text in context if title in supporting))
        every = dict.fromkeys(index[text] for _, text in context)
        near = tuple(other for other in every if other not in own)
        questions.append(Asked(row["question"], (row["answer"],), own, near))
    return Collection(tuple(index), tuple(questions))


def numbers(documents: Iterable[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(sorted(set(documents)))}


def read(kind: str, where: str) -> Collection:
    """Reads "squad" or "hotpot"; raises RestoreKVError for a file of another form."""
    name, reader = {"squad": ("dev-v2.0.json", squad), "hotpot": ("hotpot_dev_distractor_v1.json", hotpot)}[kind]
    with well_formed(f"{where} is not in the form of {name}", "give that file"):
        collection = reader([row for _, row in local_rows(where)])
    if not collection.questions:
        raise RestoreKVError(f"{where} has no question with an answer; give {name}.")
    return collection
