"""Questions over documents, RULER's qa_1 and qa_2 (arXiv 2404.06654, section 3; NVIDIA/RULER,
qa.py).

They come from SQuAD 2.0 (arXiv 1806.03822, `dev-v2.0.json`) and HotpotQA (arXiv 1809.09600,
`hotpot_dev_distractor_v1.json`), or are generated instead.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

from restorekv.errors import RestoreKVError
from restorekv.tasks import prose
from restorekv.tasks.rows import check_form, load_rows
from restorekv.tasks.ruler.draft import DraftTask, PromptDraft

GRAMMAR = json.loads(Path(__file__).with_name("documents.json").read_text("utf-8"))
STARTS, MIDDLES, ENDS, MONTHS, GOODS = (
    GRAMMAR[key].split() for key in ("starts", "middles", "ends", "months", "goods")
)
# Templates of paragraphs, each with the questions that it answers: (question, slot of the answer).
PARAGRAPHS = GRAMMAR["paragraphs"]
WITH_A_PAIR = 8  # other documents that come with a question of HotpotQA


class DocumentQuestion(NamedTuple):
    """A question over numbered documents.

    Args:
        query: The question.
        answers: Its answers, any of which is right.
        own: Indices of the documents that answer it.
        near: Indices of the documents that are added first: the likeliest distractors.
    """

    query: str
    answers: tuple[str, ...]
    own: tuple[int, ...]
    near: tuple[int, ...]


class QuestionCollection(NamedTuple):
    """The distinct documents of a file, and its questions."""

    documents: tuple[str, ...]
    questions: tuple[DocumentQuestion, ...]


def ask_over_documents(documents: tuple[str, ...], asked: DocumentQuestion) -> DraftTask:
    """Return the task of one question over the documents that answer it and others. Units are
    documents.
    """

    def draft(units: int, rng: Random) -> PromptDraft:
        # A seed gives the same order for any number of documents, so that longer drafts only add.
        near = list(asked.near)
        rng.shuffle(near)
        # Documents that answer the question come first and are never left out.
        shown = [*asked.own, *near][:units]
        if units > len(shown):
            known = {*asked.own, *near}
            rest = [index for index in range(len(documents)) if index not in known]
            rng.shuffle(rest)
            shown += rest[: units - len(shown)]
        # The answer may be anywhere in the text.
        rng.shuffle(shown)
        text = "\n\n".join(
            f"Document {number}:\n{documents[index]}" for number, index in enumerate(shown, 1)
        )
        return PromptDraft.fill("qa", asked.answers, text=text, query=asked.query)

    return DraftTask(draft, len(asked.own), len(documents))


def load_questions(kind: str, where: str) -> QuestionCollection:
    """Read a file of the kind "squad" or "hotpot"; raise RestoreKVError if it has another form."""
    name, reader = {
        "squad": ("dev-v2.0.json", _parse_squad),
        "hotpot": ("hotpot_dev_distractor_v1.json", _parse_hotpot),
    }[kind]
    with check_form(f"{where} is not in the form of {name}", "give that file"):
        collection = reader([row for _, row in load_rows(where)])
    if not collection.questions:
        raise RestoreKVError(f"{where} has no question with an answer; give {name}.")
    return collection


def _parse_squad(rows: list[dict]) -> QuestionCollection:
    """Read every answerable question, in the file's order; `near` are the other paragraphs of its
    article.
    """
    articles = []
    contexts = []
    for row in rows:
        for article in row["data"]:
            articles.append(article["paragraphs"])
            contexts += [paragraph["context"] for paragraph in article["paragraphs"]]
    index = _number_texts(contexts)
    questions = []
    for paragraphs in articles:
        # A paragraph's neighbors of the same article are the likeliest distractors.
        article = dict.fromkeys(index[paragraph["context"]] for paragraph in paragraphs)
        for paragraph in paragraphs:
            own = index[paragraph["context"]]
            near = tuple(other for other in article if other != own)
            for row in paragraph["qas"]:
                # SQuAD 2.0 also has questions without an answer.
                if not row["is_impossible"]:
                    answers = tuple(answer["text"] for answer in row["answers"])
                    questions.append(DocumentQuestion(row["question"], answers, (own,), near))
    return QuestionCollection(tuple(index), tuple(questions))


def _parse_hotpot(rows: list[dict]) -> QuestionCollection:
    """Read every question; `own` are the supporting documents, `near` the distractors that come
    with it.
    """
    contexts = []
    texts = []
    for row in rows:
        # A document is its title and its sentences.
        context = [(title, f"{title}\n{''.join(text)}") for title, text in row["context"]]
        contexts.append(context)
        texts += [text for _, text in context]
    index = _number_texts(texts)
    questions = []
    for row, context in zip(rows, contexts, strict=True):
        supporting = {title for title, _ in row["supporting_facts"]}
        own = tuple(dict.fromkeys(index[text] for title, text in context if title in supporting))
        every = dict.fromkeys(index[text] for _, text in context)
        near = tuple(other for other in every if other not in own)
        questions.append(DocumentQuestion(row["question"], (row["answer"],), own, near))
    return QuestionCollection(tuple(index), tuple(questions))


def _number_texts(documents: Iterable[str]) -> dict[str, int]:
    """Return the number of every distinct text, in their sorted order."""
    return {text: number for number, text in enumerate(sorted(set(documents)))}


def generate_articles(count: int, rng: Random) -> DraftTask:
    """Return a generated task that replaces SQuAD: at least `count` paragraphs about towns, and a
    question about the first town.

    A town has three paragraphs, one of which answers. All names are unique among a question's
    documents, so that a question has one answer.
    """
    # Names of a question's documents are used nowhere else, so one answer is right.
    new_name = _draw_names(rng)
    filler = prose.draw_sentences(rng)
    documents = []
    answering = rng.randrange(len(PARAGRAPHS))
    asked = None  # set on the first pass, after the draws of its names
    while asked is None or len(documents) < count:
        values = _draw_values(rng, new_name, "town founder river market owner patron artist")
        if asked is None:
            query, key = rng.choice(PARAGRAPHS[answering]["questions"])
            near = tuple(index for index in range(len(PARAGRAPHS)) if index != answering)
            asked = DocumentQuestion(query.format(**values), (values[key],), (answering,), near)
        documents += [
            f"{each['text'].format(**values)} {next(filler)} {next(filler)}" for each in PARAGRAPHS
        ]
    return ask_over_documents(tuple(documents), asked)


def generate_pairs(count: int, rng: Random) -> DraftTask:
    """Return a generated task that replaces HotpotQA: at least `count` documents, and a question
    about the first two.

    These two describe a person and the company that the person founded; only both together answer.
    """
    new_name = _draw_names(rng)
    filler = prose.draw_sentences(rng)
    documents = []
    asked = None  # set on the first pass, after the draws of its names
    while asked is None or len(documents) < max(count, WITH_A_PAIR + 2):
        values = _draw_values(rng, new_name, "person birthplace company town")
        if asked is None:
            query, key = rng.choice(GRAMMAR["bridges"])
            asked = DocumentQuestion(
                query.format(**values), (values[key],), (0, 1), tuple(range(2, WITH_A_PAIR + 2))
            )
        for title in ("person", "company"):
            documents.append(f"{values[title]}\n{GRAMMAR[title].format(**values)} {next(filler)}")
    return ask_over_documents(tuple(documents), asked)


def _draw_values(rng: Random, new_name: Iterator[str], named: str) -> dict[str, str]:
    """Return values for every slot of a generated document; those of the slots in `named` are names
    that occur nowhere else.
    """
    year = rng.randrange(1100, 1900)
    return {
        **{slot: next(new_name) for slot in named.split()},
        "year": str(year),
        "later": str(year + rng.randrange(20, 100)),
        "month": rng.choice(MONTHS),
        "goods": rng.choice(GOODS),
        "side": rng.choice(("northern", "southern", "eastern", "western")),
        "hands": str(rng.randrange(30, 900)),
        "trade": prose.draw_phrase("trade", rng),
    }


def _draw_names(rng: Random) -> Iterator[str]:
    """Yield different names without end, with more and more middle parts."""
    known: set[str] = set()
    middles = 1
    while True:
        inner = "".join(rng.choices(MIDDLES, k=middles))
        name = f"{rng.choice(STARTS)}{inner}{rng.choice(ENDS)}"
        if name in known:
            # When half of the names of this length are used, names get one more middle part.
            middles += len(known) > (len(STARTS) * len(ENDS) * len(MIDDLES) ** middles) // 2
            continue
        known.add(name)
        yield name
