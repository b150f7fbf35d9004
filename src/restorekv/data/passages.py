"""Passages of stories, novels and other texts, with questions from people or programs, and invented facts.

Rows are {context, id, questions: [{question}]} or {text}. A text with questions gives one passage, from its beginning,
with its first questions; a text without is cut into passages about which the teacher asks. Every passage is also to be
repeated in part or its facts listed.

Some passages get invented facts between their sentences: something that the text says once and nobody can guess. A
thing has one value (a number, a code, a word, a date) or several. The form "the X of Y" is one that small models answer
from the full cache; none of the sentences and questions is one of RULER's.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.documents import Document, Dropped, text_of

STORIES_LICENSE, NOVELS_LICENSE, SECTIONS_LICENSE = "apache-2.0", "public-domain", "cc0-1.0"
HUMAN, FACT, REPEAT, LISTED = "human", "fact", "repeat", "list"
REPEATS = ("Repeat the text above from its beginning.", "Repeat the previous context exactly.")
LISTS = (
    "List the names of the people in the text above.",
    "List all numbers and dates that the text above gives.",
    "List what happens in the text above, in order.",
    "Summarize the text above.",
)
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
DIGITS = "0123456789abcdef"
Reader = Callable[[Iterator[dict], BuildConfig, Tokenizer], Iterator[Document | Dropped]]
Draw = Callable[[random.Random], str]


def passage_reader(license: str, per_text: Callable[[BuildConfig], int]) -> Reader:
    """Returns a source's reader; `per_text` is how many passages one text may give."""

    def read(rows: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document | Dropped]:
        for index, row in enumerate(rows):
            text = text_of(row, "context") or text_of(row, "text")
            if isinstance(text, Dropped) or not text.strip():
                yield text if isinstance(text, Dropped) else Dropped("no text")
                continue
            name = str(row.get("id") or f"row {index}")
            asked = questions_of(row)
            count = 1 if asked else per_text(config)
            for number, (passage, share) in enumerate(passages(tokenizer, text, name, config, count)):
                first = asked[: max(round(share * len(asked)), config.questions)]
                yield with_questions(f"{name} passage {number}", passage, first, license, config)

    return read


def questions_of(row: dict) -> list[str]:
    """Returns the questions that come with a text."""
    rows = row.get("questions")
    rows = rows if isinstance(rows, list) else []
    asked = [each.get("question") if isinstance(each, dict) else each for each in rows]
    return [text for text in asked if isinstance(text, str) and text.strip()]


def passages(
    tokenizer: Tokenizer, text: str, name: str, config: BuildConfig, count: int
) -> Iterator[tuple[str, float]]:
    """Yields up to `count` passages, each with its share of the text; the first begins where the text does.

    Lengths are log-uniform between `config.passage_shortest` and `config.passage_longest` tokens.
    """
    rng = random.Random(f"{config.seed} passages {name}")
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    low, high = math.log(config.passage_shortest), math.log(config.passage_longest)
    spare = max(len(places) - count * config.passage_longest, 0)
    start = 0
    for _ in range(count):
        length = round(math.exp(rng.uniform(low, high)))
        end = min(start + length, len(places))
        if end - start < config.passage_shortest:
            return
        yield text[places[start][0] : places[end - 1][1]], (end - start) / len(places)
        start = end + (rng.randint(0, 2 * spare // count) if count > 1 else 0)


def with_questions(name: str, passage: str, asked: list[str], license: str, config: BuildConfig) -> Document:
    """Returns a passage with its questions; the teacher adds its own only where there are no others."""
    rng = random.Random(f"{config.seed} questions {name}")
    facts: list[str] = []
    if rng.random() < config.invented:
        passage, facts = invent(passage, rng)
    questions = [(HUMAN, worded(rng, text, config)) for text in sample_in_order(rng, asked, config.questions)]
    questions += [(FACT, worded(rng, text, config)) for text in sample_in_order(rng, facts, config.questions)]
    questions.append(repeat_or_list(rng))
    return Document(name, passage, license, asked=tuple(questions), studied=not asked and not facts)


def worded(rng: random.Random, question: str, config: BuildConfig) -> str:
    """Puts a question into `config.wording`; one question in four stays as it is."""
    return question if rng.random() < 0.25 else config.wording.format(question=question)


def sample_in_order(rng: random.Random, items: list[str], count: int) -> list[str]:
    chosen = sorted(rng.sample(range(len(items)), min(count, len(items))))
    return [items[index] for index in chosen]


def repeat_or_list(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.4:
        return LISTED, rng.choice(LISTS)
    return REPEAT, rng.choice(REPEATS)


def number(rng: random.Random) -> str:
    """Draws 3 to 8 digits."""
    digits = rng.randint(3, 8)
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def code(rng: random.Random) -> str:
    """Draws letters and digits in groups, as on labels or in a UUID."""
    lengths = rng.choice(((3, 4), (4, 4, 4), (2, 5), (8, 4, 4, 4, 12)))
    return "-".join("".join(rng.choice(DIGITS) for _ in range(length)) for length in lengths)


def secret(rng: random.Random) -> str:
    return " ".join(rng.sample(WORDS, rng.randint(1, 2)))


def date(rng: random.Random) -> str:
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}, {rng.randint(1700, 2090)}"


ATTRIBUTES: tuple[tuple[str, Draw], ...] = (
    ("number", number), ("telephone number", number), ("code", code), ("label", code), ("password", secret),
    ("secret word", secret), ("date", date), ("owner", lambda rng: rng.choice(NAMES)), ("price", number), ("key", code),
)  # fmt: skip
ONE, ONE_OF = "The {attribute} of {thing} is {value}.", "One {attribute} of {thing} is {value}."
SINGLE, SEVERAL = "What is the {attribute} of {thing}?", "What are all the {attribute}s of {thing}?"


def invent(passage: str, rng: random.Random) -> tuple[str, list[str]]:
    """Puts facts about 1 to 8 things, with 1 to 3 values each, into the passage; returns it with their questions."""
    facts: list[str] = []
    questions: list[str] = []
    for _ in range(rng.choice((1, 2, 3, 4, 6, 8))):
        attribute, draw = rng.choice(ATTRIBUTES)
        thing = rng.choice((rng.choice(PLACES), f"{rng.choice(NAMES)}'s {rng.choice(OWNED)}"))
        values = [draw(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        sentence, question = (ONE, SINGLE) if len(values) == 1 else (ONE_OF, SEVERAL)
        facts += [sentence.format(attribute=attribute, thing=thing, value=value) for value in values]
        questions.append(question.format(attribute=attribute, thing=thing))
    sentences = SENTENCE_END.split(passage)
    for fact in facts:
        sentences.insert(rng.randint(0, len(sentences)), fact)
    return " ".join(sentences), questions
