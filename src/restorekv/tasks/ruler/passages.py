"""Generates documents and questions in place of SQuAD and HotpotQA.

`articles` are about made-up towns, three paragraphs each, one of which answers (as in SQuAD). `pairs` are a person and
the company that the person founded, whose documents must be read together (the bridge questions of HotpotQA). All names
are unique among a question's documents, so that a question has one answer.
"""

from collections.abc import Iterator
from random import Random

from restorekv.tasks import prose
from restorekv.tasks.ruler.documents import Asked, over_documents
from restorekv.tasks.ruler.draft import Task

STARTS = "Ald Bram Cor Dun Est Fal Gren Har Ing Kel Lor Mar Nor Ost Pel Quen Ros Stan Tor Ulm Ver Wes Yar Zel".split()
MIDDLES = "a e i o u ba di fo ga le mi no ra si tu va".split()
ENDS = "bury cliff dale feld ford gate ham haven low mere mouth ridge stead ton ville wick".split()
MONTHS = ("January February March April May June July August September October November December").split()
GOODS = "clocks|violins|boots|lanterns|carpets|bicycles|kettles|maps|ropes|tiles|gloves|bells|barrels|lenses".split("|")
PARAGRAPHS = (  # each with the questions that it answers
    (
        "{town} was founded in {year} by {founder}, a {trade} who had come up the {river} with two boats. The first "
        "houses stood on the {side} bank, and a wall was finished in {later}.",
        (("Who founded {town}?", "founder"), ("In which year was {town} founded?", "year")),
    ),
    (
        "Most families in {town} have long lived from making {goods}, which are sold as far away as {market}. The "
        "largest workshop employs {hands} people and belongs to {owner}.",
        (("What is made in {town}?", "goods"), ("Who owns the largest workshop in {town}?", "owner")),
    ),
    (
        "Every {month} the people of {town} hold a fair in honour of {patron}, who taught there as a young {trade}. "
        "A bronze figure by {artist} stands in the main square.",
        (("In which month is the fair of {town} held?", "month"), ("Who made the bronze figure in {town}?", "artist")),
    ),
)
PERSON = (
    "{person} is a {trade} who was born in {birthplace} in {year}. After some years abroad {person} founded the "
    "company {company}."
)
COMPANY = (
    "{company} is a company that makes {goods}. It has its seat in {town} and was founded in {later}. Its {hands} "
    "employees work in three shifts."
)
BRIDGES = (
    ("In which town does the company founded by {person} have its seat?", "town"),
    ("What does the company founded by {person} make?", "goods"),
    ("In which year was the company of {person} founded?", "later"),
)
WITH_A_PAIR = 8  # other documents that come with a question of HotpotQA


def articles(count: int, rng: Random) -> Task:
    """Asks about the town of the first of at least `count` paragraphs."""
    new_name, filler, documents = names(rng), prose.sentences(rng), []
    answering = rng.randrange(len(PARAGRAPHS))
    while len(documents) < count:
        facts = drawn(rng, new_name, "town founder river market owner patron artist")
        if not documents:
            query, key = rng.choice(PARAGRAPHS[answering][1])
            near = tuple(index for index in range(len(PARAGRAPHS)) if index != answering)
            asked = Asked(query.format(**facts), (facts[key],), (answering,), near)
        documents += [f"{text.format(**facts)} {next(filler)} {next(filler)}" for text, _ in PARAGRAPHS]
    return over_documents(tuple(documents), asked)


def pairs(count: int, rng: Random) -> Task:
    """Asks about the first two of at least `count` documents."""
    new_name, filler, documents = names(rng), prose.sentences(rng), []
    while len(documents) < max(count, WITH_A_PAIR + 2):
        facts = drawn(rng, new_name, "person birthplace company town")
        if not documents:
            query, key = rng.choice(BRIDGES)
            asked = Asked(query.format(**facts), (facts[key],), (0, 1), tuple(range(2, WITH_A_PAIR + 2)))
        for title, text in (("person", PERSON), ("company", COMPANY)):
            documents.append(f"{facts[title]}\n{text.format(**facts)} {next(filler)}")
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
