"""Made-up facts, put between the sentences of a passage: what a text says once and nobody can guess.

A thing has one value (a number, a code, a word, a date) or several. None of the sentences and questions is one of
RULER's; their form, "the X of Y", is one that small models answer from the full cache.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable

SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
NAMES = (
    "Amina Okoro|Boris Lindqvist|Carla Menotti|Daniel Arce|Eleni Papas|Farid Haddad|Grace Whitlock|Henrik Dahl|"
    "Ines Costa|Jonah Pike|Keiko Tanabe|Lars Ostberg|Mara Ivanova|Nils Becker|Oona Reilly|Pedro Salas|Quinn Harper|"
    "Rosa Delgado|Stefan Kruger|Tala Nasser|Ursula Brandt|Viktor Hale|Wanda Kowal|Yusuf Demir|Zelda Moreau"
).split("|")  # fmt: skip
OWNED = (
    "locker|library card|bank account|parcel|bicycle|train ticket|hotel room|membership|passport|garden plot|mailbox|"
    "safe|boat|file|order|telephone line|insurance policy|storage box|theater seat|invoice"
).split("|")
PLACES = (
    "the old harbor|the north tower|the blue warehouse|the museum cellar|the river mill|the botanical garden|"
    "the city archive|the lighthouse|the covered market|the railway depot|the observatory|the grain store|the chapel|"
    "the customs house|the boat yard|the school attic|the print shop|the water works|the town hall|the ferry office"
).split("|")  # fmt: skip
WORDS = (
    "amber|basil|cobalt|dahlia|ember|falcon|granite|heron|indigo|juniper|kestrel|lantern|marble|nutmeg|onyx|pebble|quartz|"
    "raven|saffron|thistle|umber|velvet|willow|yarrow|zephyr|cedar|copper|maple|otter|plum"
).split("|")  # fmt: skip
MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December".split("|")
Draw = Callable[[random.Random], str]


def number(rng: random.Random) -> str:
    """Of 3 to 8 digits."""
    digits = rng.randint(3, 8)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def code(rng: random.Random) -> str:
    """Letters and digits in groups, as on labels, or in the form of a UUID."""
    lengths = rng.choice(((3, 4), (4, 4, 4), (2, 5), (8, 4, 4, 4, 12)))
    return "-".join("".join(rng.choice("0123456789abcdef") for _ in range(length)) for length in lengths)


def word(rng: random.Random) -> str:
    """One word or two."""
    return " ".join(rng.sample(WORDS, rng.randint(1, 2)))


def date(rng: random.Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}, {rng.randint(1700, 2090)}"


def owner(rng: random.Random) -> str:
    return rng.choice(NAMES)


ATTRIBUTES: tuple[tuple[str, Draw], ...] = (
    ("number", number), ("telephone number", number), ("code", code), ("label", code), ("password", word),
    ("secret word", word), ("date", date), ("owner", owner), ("price", number), ("key", code),
)  # fmt: skip
ONE, ONE_OF = "The {attribute} of {thing} is {value}.", "One {attribute} of {thing} is {value}."
SINGLE, SEVERAL = "What is the {attribute} of {thing}?", "What are all the {attribute}s of {thing}?"


def invent(passage: str, rng: random.Random) -> tuple[str, list[str]]:
    """The passage with facts between its sentences, 1 to 8 things with 1 to 3 values each, and a question for each."""
    told: list[str] = []
    asked: list[str] = []
    for _ in range(rng.choice((1, 2, 3, 4, 6, 8))):
        attribute, draw = rng.choice(ATTRIBUTES)
        thing = rng.choice((rng.choice(PLACES), f"{rng.choice(NAMES)}'s {rng.choice(OWNED)}"))
        values = [draw(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        sentence, question = (ONE, SINGLE) if len(values) == 1 else (ONE_OF, SEVERAL)
        told += [sentence.format(attribute=attribute, thing=thing, value=value) for value in values]
        asked.append(question.format(attribute=attribute, thing=thing))
    sentences = SENTENCE_END.split(passage)
    for fact in told:
        sentences.insert(rng.randint(0, len(sentences)), fact)
    return " ".join(sentences), asked
