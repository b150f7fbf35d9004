"""Questions about a text that need no model to write them: quotations to continue, blanks to fill,
things to list.

A small model writes poor questions about a text. These are drawn from the text itself, so they work
for prose, code, tables and logs, and they ask for every part of it: a cache that answers them
has lost little. None of their wordings is taken from a benchmark.
"""

import json
import random
import re
from pathlib import Path

WORDINGS: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
EXERCISE_KINDS = tuple(WORDINGS)
VERBATIM = ("repeat_start", "repeat_end", "repeat_part", "continue")
OPEN = ("extract", "list")
LOCAL = ("after", "before", "blank", "compare")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
QUOTED_WORDS = (6, 14)  # fewest and most in a quotation that points to a place of the text
GAP_WORDS = (1, 4)  # fewest and most that a blank replaces
BLANK = "____"
MIN_WORDS = 4  # of a sentence or line that is worth asking about


def draw_exercises(text: str, rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Draw `count` exercises about a text, each of a different kind.

    The first asks for a part of the text word for word, the second for something that takes the
    whole text, and the others for single places. A text with too few sentences or lines gives none.

    Args:
        text: The context.
        rng: The source of every choice.
        count: How many exercises are wanted.

    Returns:
        Pairs of kind and question.
    """
    kinds = [rng.choice(VERBATIM), rng.choice(OPEN)]
    # All kinds of this group, in random order; the first `count` exercises are returned.
    kinds += rng.sample(LOCAL, len(LOCAL))
    units = split_units(text)
    exercises = []
    for kind in kinds:
        question = _write_exercise(kind, units, rng)
        if question is not None:
            exercises.append((kind, question))
    return exercises[:count]


def split_pieces(text: str) -> list[str]:
    """Split a text after every sentence and every line, and return the pieces."""
    return [piece.strip() for piece in SENTENCE_END.split(text) if piece.strip()]


def split_units(text: str) -> list[str]:
    """Return the pieces of a text, sentences or lines, that have at least MIN_WORDS words."""
    return [unit for unit in split_pieces(text) if len(unit.split()) >= MIN_WORDS]


def _write_exercise(kind: str, units: list[str], rng: random.Random) -> str | None:
    """Return a question of that kind, or None if the text is too short for it."""
    if len(units) < 4:
        return None
    wording = rng.choice(WORDINGS[kind])
    # Two different places of the text, in their order. Not its first or last unit, since some kinds
    # ask what comes before or after.
    first, second = sorted(rng.sample(range(1, len(units) - 1), 2))
    count = str(rng.choice((20, 40, 60)))
    quote = quote_words(units[first], rng.randint(*QUOTED_WORDS))
    other = quote_words(units[second], rng.randint(*QUOTED_WORDS))
    gapped, _ = leave_gap(units[first], rng)
    # In half of the cases, since otherwise the answer to "Which comes first" would never change.
    if kind == "compare" and (first + second) % 2:
        quote, other = other, quote
    return wording.format(count=count, quote=quote, other=other, gapped=gapped)


def quote_words(unit: str, count: int) -> str:
    """Return the first `count` words of a sentence or line."""
    return " ".join(unit.split()[:count])


def leave_gap(unit: str, rng: random.Random) -> tuple[str, str]:
    """Return a sentence or line, at most 30 words of it, with a blank instead of a few of its
    words, and these words.
    """
    words = unit.split()[:30]
    # At least two words stay around the blank.
    size = min(rng.randint(*GAP_WORDS), len(words) - 2)
    start = rng.randint(1, len(words) - size)
    gapped = " ".join([*words[:start], BLANK, *words[start + size :]])
    return gapped, " ".join(words[start : start + size])
