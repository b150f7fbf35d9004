"""Passages of stories, novels and other texts, with questions from people or programs, and invented
facts.

Rows are {context, id, questions: [{question}]} or {text}. A text with questions gives one passage,
from its beginning, with its first questions; a text without is cut into passages about which the
teacher asks. Every passage also gets a request to repeat a part of it or to list its facts.

Some passages get invented facts between their sentences, which the text says once and nobody can
guess. A thing has one value (a number, a code, a word, a date) or several. Facts have the form "the
X of Y", since small models can answer questions of this form from the full cache. None of the
sentences and questions is one of RULER's.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.documents import DropRow, Reader, SourceDocument, read_each_row, read_text_field
from restorekv.model.tokenize import locate_tokens

STORIES_LICENSE = "apache-2.0"
NOVELS_LICENSE = "public-domain"
SECTIONS_LICENSE = "cc0-1.0"
HUMAN = "human"
FACT = "fact"
REPEAT = "repeat"
LISTED = "list"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
PHRASES: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
REPEATS, LISTS, NAMES, OWNED, PLACES, WORDS, MONTHS = PHRASES.values()
DIGITS = "0123456789abcdef"
Draw = Callable[[random.Random], str]
Item = TypeVar("Item")


def make_passage_reader(
    license: str,
    per_text: Callable[[BuildConfig], int],
    check_row: Callable[[dict, str], None] | None = None,
) -> Reader:
    """Return a source's reader.

    Args:
        license: The license of all texts of the source.
        per_text: How many passages one text may give.
        check_row: Raises DropRow for a row, given with its text, that must not be trained on.
    """

    @read_each_row
    def read(
        index: int, row: dict, config: BuildConfig, tokenizer: Tokenizer
    ) -> Iterator[SourceDocument]:
        text = read_text_field(row, "context") or read_text_field(row, "text")
        if not text.strip():
            raise DropRow("no text")
        if check_row is not None:
            check_row(row, text)
        name = str(row.get("id") or f"row {index}")
        asked = read_questions(row)
        # A text with questions gives one passage, since they were asked about its beginning.
        count = 1 if asked else per_text(config)
        for number, (passage, share) in enumerate(
            cut_passages(tokenizer, text, name, config, count)
        ):
            # The text's first questions are about its beginning, which is what the passage has.
            first = asked[: max(round(share * len(asked)), config.questions)]
            yield add_questions(f"{name} passage {number}", passage, first, license, config)

    return read


def read_questions(row: dict) -> list[str]:
    """Return the questions that come with a text."""
    rows = row.get("questions")
    if not isinstance(rows, list):
        return []
    questions = []
    for each in rows:
        text = each.get("question") if isinstance(each, dict) else each
        if isinstance(text, str) and text.strip():
            questions.append(text)
    return questions


def cut_passages(
    tokenizer: Tokenizer, text: str, name: str, config: BuildConfig, count: int
) -> Iterator[tuple[str, float]]:
    """Yield up to `count` passages, each with its share of the text; the first begins where the
    text does.

    Lengths are log-uniform between `config.passage_shortest` and `config.passage_longest` tokens.
    """
    rng = random.Random(f"{config.seed} passages {name}")
    spans = locate_tokens(tokenizer, text)
    low = math.log(config.passage_shortest)
    high = math.log(config.passage_longest)
    spare = max(len(spans) - count * config.passage_longest, 0)
    start = 0
    for _ in range(count):
        length = round(math.exp(rng.uniform(low, high)))
        end = min(start + length, len(spans))
        if end - start < config.passage_shortest:
            return
        yield text[spans[start][0] : spans[end - 1][1]], (end - start) / len(spans)
        # A random gap before the next passage, spare / count on average, spreads the passages over
        # the whole text.
        start = end + (rng.randint(0, 2 * spare // count) if count > 1 else 0)


def add_questions(
    name: str, passage: str, asked: list[str], license: str, config: BuildConfig
) -> SourceDocument:
    """Return a passage with its questions; the teacher adds its own only if the text came without
    questions and no facts were invented.
    """
    rng = random.Random(f"{config.seed} questions {name}")
    facts: list[str] = []
    if rng.random() < config.invented:
        passage, facts = invent_facts(passage, rng)
    # At most `config.questions` of the text's own, and at most as many about invented facts.
    questions = []
    for text in sample_in_order(rng, asked, config.questions):
        questions.append((HUMAN, word_question(rng, text, config)))
    for text in sample_in_order(rng, facts, config.questions):
        questions.append((FACT, word_question(rng, text, config)))
    if rng.random() < 0.4:
        questions.append((LISTED, rng.choice(LISTS)))
    else:
        questions.append((REPEAT, rng.choice(REPEATS)))
    return SourceDocument(
        name, passage, license, asked=tuple(questions), studied=not asked and not facts
    )


def word_question(rng: random.Random, question: str, config: BuildConfig) -> str:
    """Put a question into `config.wording`; one question in four stays unchanged."""
    if rng.random() < 0.25:
        return question
    return config.wording.replace("{question}", question)


def sample_in_order(rng: random.Random, items: list[Item], count: int) -> list[Item]:
    """Draw at most `count` items and return them in their order."""
    chosen = sorted(rng.sample(range(len(items)), min(count, len(items))))
    return [items[index] for index in chosen]


def _draw_number(rng: random.Random) -> str:
    """Draw 3 to 6 digits or 8: RULER's numbers have 7."""
    digits = rng.choice((3, 4, 5, 6, 8))
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _draw_code(rng: random.Random) -> str:
    """Draw letters and digits in groups, as on labels; RULER has UUIDs."""
    groups = []
    for length in rng.choice(((3, 4), (4, 4, 4), (2, 5), (6, 3, 6))):
        groups.append("".join(rng.choice(DIGITS) for _ in range(length)))
    return "-".join(groups)


def _draw_words(rng: random.Random) -> str:
    """Draw one word or two."""
    return " ".join(rng.sample(WORDS, rng.randint(1, 2)))


def _draw_date(rng: random.Random) -> str:
    """Draw a date as people write it."""
    return f"{rng.choice(MONTHS)} {rng.randint(1, 28)}, {rng.randint(1700, 2090)}"


ATTRIBUTES: tuple[tuple[str, Draw], ...] = (
    ("number", _draw_number),
    ("telephone number", _draw_number),
    ("code", _draw_code),
    ("label", _draw_code),
    ("password", _draw_words),
    ("secret word", _draw_words),
    ("date", _draw_date),
    ("owner", lambda rng: rng.choice(NAMES)),
    ("price", _draw_number),
    ("key", _draw_code),
)
ONE = "The {attribute} of {thing} is {value}."
ONE_OF = "One {attribute} of {thing} is {value}."
SINGLE = "What is the {attribute} of {thing}?"
SEVERAL = "What are all the {attribute}s of {thing}?"


def invent_facts(passage: str, rng: random.Random) -> tuple[str, list[str]]:
    """Put facts about 1 to 8 things, with 1 to 3 values each, into the passage; return it with
    their questions.
    """
    facts: list[str] = []
    questions: list[str] = []
    for _ in range(rng.choice((1, 2, 3, 4, 6, 8))):
        attribute, draw = rng.choice(ATTRIBUTES)
        thing = rng.choice((rng.choice(PLACES), f"{rng.choice(NAMES)}'s {rng.choice(OWNED)}"))
        values = [draw(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        sentence = ONE
        question = SINGLE
        if len(values) > 1:
            sentence = ONE_OF
            question = SEVERAL
        for value in values:
            facts.append(sentence.format(attribute=attribute, thing=thing, value=value))
        questions.append(question.format(attribute=attribute, thing=thing))
    sentences = SENTENCE_END.split(passage)
    # Each at a random index, so that the place of a fact cannot be guessed.
    for fact in facts:
        sentences.insert(rng.randint(0, len(sentences)), fact)
    return " ".join(sentences), questions
