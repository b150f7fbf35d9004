"""Generates documents and questions in place of SQuAD and HotpotQA.

`articles` are about made-up towns, three paragraphs each, one of which answers (as in SQuAD). `pairs` are a person and
the company that the person founded, whose documents must be read together (the bridge questions of HotpotQA). All names
are unique among a question's documents, so that a question has one answer.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from restorekv.tasks import prose
from restorekv.tasks.ruler.documents import Asked, over_documents
from restorekv.tasks.ruler.draft import Task

DATA = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
STARTS, MIDDLES, ENDS, MONTHS, GOODS = (DATA[key].split() for key in ("starts", "middles", "ends", "months", "goods"))
PARAGRAPHS = DATA["paragraphs"]  # each with questions that it answers, as (question, slot of the answer)
WITH_A_PAIR = 8  # other documents that come with a question of HotpotQA


def articles(count: int, rng: Random) -> Task:
    """Asks about the town of the first of at least `count` paragraphs."""
    new_name, filler, documents = names(rng), prose.sentences(rng), []
    answering = rng.randrange(len(PARAGRAPHS))
    while len(documents) < count:
        facts = drawn(rng, new_name, "town founder river market owner patron artist")
        if not documents:
            query, key = rng.choice(PARAGRAPHS[answering]["questions"])
            near = tuple(index for index in range(len(PARAGRAPHS)) if index != answering)
            asked = Asked(query.format(**facts), (facts[key],), (answering,), near)
        documents += [f"{each['text'].format(**facts)} {next(filler)} {next(filler)}" for each in PARAGRAPHS]
    return over_documents(tuple(documents), asked)


def pairs(count: int, rng: Random) -> Task:
    """Asks about the first two of at least `count` documents."""
    new_name, filler, documents = names(rng), prose.sentences(rng), []
    while len(documents) < max(count, WITH_A_PAIR + 2):
        facts = drawn(rng, new_name, "person birthplace company town")
        if not documents:
            query, key = rng.choice(DATA["bridges"])
            asked = Asked(query.format(**facts), (facts[key],), (0, 1), tuple(range(2, WITH_A_PAIR + 2)))
        for title in ("person", "company"):
            documents.append(f"{facts[title]}\n{DATA[title].format(**facts)} {next(filler)}")
    return over_documents(tuple(documents), asked)


def drawn(rng: Random, new_name: Iterator[str], named: str) -> dict[str, str]:
    """Returns values for every slot; those of `named` are names that stand nowhere else."""
    year = rng.randrange(1100, 1900)
    return {
        **{slot: next(new_name) for slot in named.split()},
        "year": str(year),
        "later": str(year + rng.randrange(20, 100)),
        "month": rng.choice(MONTHS),
        "goods": rng.choice(GOODS),
        "side": rng.choice(("northern", "southern", "eastern", "western")),
        "hands": str(rng.randrange(30, 900)),
        "trade": prose.phrase("trade", rng),
    }


def names(rng: Random) -> Iterator[str]:
    """Yields different names without end, with more and more middle parts."""
    known: set[str] = set()
    middles = 1
    while True:
        inner = "".join(rng.choices(MIDDLES, k=middles))
        name = f"{rng.choice(STARTS)}{inner}{rng.choice(ENDS)}"
        if name in known:
            middles += len(known) > (len(STARTS) * len(ENDS) * len(MIDDLES) ** middles) // 2
            continue
        known.add(name)
        yield name
