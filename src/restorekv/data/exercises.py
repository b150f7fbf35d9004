"""Questions about a text that need no model to write them: quotations to continue, blanks to fill,
things to list.

A small model writes poor questions about a text. These are drawn from the text itself, so they work
for prose, code, tables and logs alike, and they ask for every part of it: a cache that answers them
has lost little. None of their wordings is one of a benchmark's.
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
CHECKED = ("blank", "continue", "after", "before")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
QUOTED_WORDS = (6, 14)  # of a quotation that names a place of the text
GAP_WORDS = (1, 4)  # that a blank leaves out
BLANK = "____"
LEAST_WORDS = 4  # of a sentence or line that is worth asking about


def draw_exercises(text: str, rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Draw `count` exercises about a text, each of another kind.

    The first asks for a part of the text word for word, the second for something that takes all of
    it, and the others for single places. A text with too few sentences or lines gives fewer.

    Args:
        text: the context.
        rng: the source of every choice.
        count: how many exercises are wanted.

    Returns:
        Pairs of kind and question.
    """
    kinds = [rng.choice(VERBATIM), rng.choice(OPEN)]
    # More kinds than are wanted: a text may have no place for some.
    kinds += rng.sample(LOCAL, len(LOCAL))
    units = split_units(text)
    exercises = []
    for kind in kinds:
        question = _write_exercise(kind, units, rng)
        if question is not None:
            exercises.append((kind, question))
    return exercises[:count]


def draw_checked_exercises(text: str, rng: random.Random, count: int) -> list[tuple[str, str, str]]:
    """Draw exercises whose answer is in the text: what comes next, before or after, and what is
    left out.

    Args:
        text: the context.
        rng: the source of every choice.
        count: how many exercises are wanted; a text with too few sentences or lines gives none.

    Returns:
        Kind, question and answer of each.
    """
    units = split_units(text)
    if len(units) < 4:
        return []
    exercises = []
    for number in range(count):
        kind = CHECKED[number % len(CHECKED)]
        # Neither the first nor the last unit, since "before" and "after" need a neighbor.
        place = rng.randrange(1, len(units) - 1)
        quote = _quote_start(units[place], rng)
        gapped = _leave_gap(units[place], rng)
        answers = {
            "continue": units[place].removeprefix(quote).strip() or units[place + 1],
            "blank": _find_gap(units[place], gapped),
            "after": units[place + 1],
            "before": units[place - 1],
        }
        question = rng.choice(WORDINGS[kind]).format(quote=quote, gapped=gapped)
        exercises.append((kind, question, answers[kind]))
    return exercises


def split_units(text: str) -> list[str]:
    """Return the sentences of a text, or its lines where these are shorter, without the shortest of
    them.
    """
    units = (unit.strip() for unit in SENTENCE_END.split(text))
    return [unit for unit in units if len(unit.split()) >= LEAST_WORDS]


def _write_exercise(kind: str, units: list[str], rng: random.Random) -> str | None:
    """Return a question of that kind, or None if the text has no place for it."""
    if len(units) < 4:
        return None
    wording = rng.choice(WORDINGS[kind])
    # Two different places of the text, in their order.
    first, second = sorted(rng.sample(range(1, len(units) - 1), 2))
    fields = {
        "count": str(rng.choice((20, 40, 60))),
        "quote": _quote_start(units[first], rng),
        "other": _quote_start(units[second], rng),
        "gapped": _leave_gap(units[first], rng),
    }
    return wording.format(**fields)


def _quote_start(unit: str, rng: random.Random) -> str:
    """Return the first words of a sentence or line."""
    return " ".join(unit.split()[: rng.randint(*QUOTED_WORDS)])


def _leave_gap(unit: str, rng: random.Random) -> str:
    """Return a sentence or line, at most 30 words of it, with a blank instead of a few of its
    words.
    """
    words = unit.split()[:30]
    # At least two words stay around the blank.
    size = min(rng.randint(*GAP_WORDS), len(words) - 2)
    start = rng.randint(1, len(words) - size)
    return " ".join([*words[:start], BLANK, *words[start + size :]])


def _find_gap(unit: str, gapped: str) -> str:
    """Return the words that a blank stands for."""
    # The words before and after the blank, counted in words, frame what was left out.
    before, _, after = gapped.partition(BLANK)
    words = unit.split()[:30]
    return " ".join(words[len(before.split()) : len(words) - len(after.split())])
