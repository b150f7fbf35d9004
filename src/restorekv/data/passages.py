"""Passages of stories, novels and other texts, with the questions that people or programs asked about them.

Rows are {context, id, questions: [{question}]} or {text}. Of a text with questions one passage is taken, from its
beginning, with its first questions; a text without any is cut into passages, about which the teacher asks. Some
passages get made-up facts (`invented`), and every passage is to be repeated in part or its facts listed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped, text_of
from restorekv.data.invented import invent

STORIES, NOVELS, SECTIONS = "apache-2.0", "public-domain", "cc0-1.0"  # the licenses of the three sources
HUMAN, FACT, REPEAT, LISTED = "human", "fact", "repeat", "list"
REPEATS = ("Repeat the text above from its beginning.", "Repeat the previous context exactly.")
LISTS = (
    "List the names of the people in the text above.",
    "List all numbers and dates that the text above gives.",
    "List what happens in the text above, in order.",
    "Summarize the text above.",
)
Reader = Callable[[Iterator[dict], BuildConfig, Tokenizer], Iterator[Document | Dropped]]


def reader(license: str, limit: Callable[[BuildConfig], int]) -> Reader:
    """A source's reader; `limit` is how many passages one text may give."""

    def documents(found: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document | Dropped]:
        for index, row in enumerate(found):
            text = text_of(row, "context") or text_of(row, "text")
            if isinstance(text, Dropped) or not text.strip():
                yield text if isinstance(text, Dropped) else Dropped("no text")
                continue
            name = str(row.get("id") or f"row {index}")
            asked = questions_of(row)
            most = 1 if asked else limit(config)
            for number, (passage, share) in enumerate(passages(tokenizer, text, name, config, most)):
                own = asked[: max(round(share * len(asked)), config.questions)]
                yield made(f"{name} passage {number}", passage, own, license, config)

    return documents


def questions_of(row: dict) -> list[str]:
    """The questions that come with a text."""
    found = row.get("questions")
    rows = found if isinstance(found, list) else []
    asked = [each.get("question") if isinstance(each, dict) else each for each in rows]
    return [text for text in asked if isinstance(text, str) and text.strip()]


def passages(tokenizer: Tokenizer, text: str, name: str, config: BuildConfig, most: int) -> Iterator[tuple[str, float]]:
    """Up to `most` passages of drawn lengths with their share of the text; the first one begins where the text does.

    Lengths are uniform in the logarithm between `config.passage_shortest` and `config.passage_longest` tokens.
    """
    rng = random.Random(f"{config.seed} passages {name}")
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    low, high = math.log(config.passage_shortest), math.log(config.passage_longest)
    spare = max(len(places) - most * config.passage_longest, 0)
    start = 0
    for _ in range(most):
        length = round(math.exp(rng.uniform(low, high)))
        end = min(start + length, len(places))
        if end - start < config.passage_shortest:
            return
        yield text[places[start][0] : places[end - 1][1]], (end - start) / len(places)
        start = end + (rng.randint(0, 2 * spare // most) if most > 1 else 0)


def made(name: str, passage: str, asked: list[str], license: str, config: BuildConfig) -> Document:
    """A passage with what is asked about it; a passage without questions of its own keeps room for the teacher's."""
    rng = random.Random(f"{config.seed} questions {name}")
    facts: list[str] = []
    if rng.random() < config.invented:
        passage, facts = invent(passage, rng)
    own = [(HUMAN, worded(rng, text, config)) for text in drawn(rng, asked, config.questions)]
    own += [(FACT, worded(rng, text, config)) for text in drawn(rng, facts, config.questions)]
    own.append(about_the_words(rng))
    return Document(name, passage, license, asked=tuple(own), studied=not asked and not facts)


def worded(rng: random.Random, question: str, config: BuildConfig) -> str:
    """Mostly as `config.wording` puts it; one question in four stands as it is."""
    return question if rng.random() < 0.25 else config.wording.format(question=question)


def drawn(rng: random.Random, items: list[str], count: int) -> list[str]:
    """`count` of the items in their order, or all of them."""
    chosen = sorted(rng.sample(range(len(items)), min(count, len(items))))
    return [items[index] for index in chosen]


def about_the_words(rng: random.Random) -> tuple[str, str]:
    """A request to repeat or to list."""
    if rng.random() < 0.4:
        return LISTED, rng.choice(LISTS)
    return REPEAT, rng.choice(REPEATS)
