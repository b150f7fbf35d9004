"""What all tasks share: prompts of any length, the search for the longest that fits, and RULER's
words.

prompts.json has RULER's prompts, each in the three parts of a `PromptDraft`.
"""

import json
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple, Self

from restorekv.errors import import_extra

MAX_NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
UNLIMITED = sys.maxsize - 1
PROMPTS = json.loads(Path(__file__).with_name("prompts.json").read_text("utf-8"))


def get_answer_limit(task: str) -> int:
    """Return the limit of an answer in tokens; for "niah_single_1" it is that of "niah"."""
    return MAX_NEW_TOKENS[task.split("_")[0]]


class PromptDraft(NamedTuple):
    """A prompt in the three parts into which kvpress's data set splits it, and the references."""

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.context + self.question + self.answer_prefix

    @classmethod
    def fill(cls, prompt: str, answers: Iterable[str], **values: object) -> Self:
        """Put values into the fields of a prompt."""
        context, question, answer_prefix = (part.format(**values) for part in PROMPTS[prompt])
        return cls(context, question, answer_prefix, tuple(answers))


class DraftTask(NamedTuple):
    """A task that makes prompts of any length: `draft` makes one of `min_units` to `max_units`
    units (lines, words or documents), and more units never shorten it.

    A draft depends only on the units and the state of the random generator.
    """

    draft: Callable[[int, Random], PromptDraft]
    min_units: int = 1
    max_units: int = UNLIMITED


def find_most_units(size: Callable[[int], int], limit: int, min_units: int, max_units: int) -> int:
    """Return n with size(n) <= limit < size(n + 1), or `max_units`; assumes that size(min_units) <=
    limit.

    Each call of `size` is slow, so the search follows the slope between the last two sizes; every
    fourth step halves the interval instead.

    Args:
        size: Returns the size of a draft with that many units; it never falls.
        limit: The largest size.
        min_units: The fewest units.
        max_units: The most units.
    """
    # Invariant: size(low) <= limit, and size(high) is too large or high is beyond `max_units`.
    low = min_units
    high = max_units + 1
    sizes = {min_units: size(min_units)}
    last = min_units
    guess = min(2 * min_units + 8, max_units)
    step = 0
    while high - low > 1:
        sizes[guess] = size(guess)
        if sizes[guess] <= limit:
            low = guess
        else:
            high = guess
        slope = max((sizes[guess] - sizes[last]) / (guess - last), 0.01)
        last = guess
        step = step + 1
        guess = low + int((limit - sizes[low]) / slope)
        if step % 4 == 0 and high in sizes:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    return low


@cache
def load_words(*kinds: str) -> tuple[str, ...]:
    """Return the sorted words of the library wonderwords of these kinds: "noun", "adjective",
    "verb".
    """
    return tuple(
        sorted(
            set(
                import_extra("wonderwords", "eval")
                .RandomWord()
                .filter(include_categories=list(kinds))
            )
        )
    )


def draw_word_pair(rng: Random) -> str:
    return f"{rng.choice(load_words('adjective'))}-{rng.choice(load_words('noun'))}"
