"""Generates prose: plain sentences about ordinary life, as filler if no essays are given.

prose.txt is a grammar of our own words: a rule is a list of phrases, in which {rule} is replaced by
a phrase of that rule. It has no digits, no names of towns and no questions, so that nothing reads
like a needle.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path

RULES = re.split(r"\n(?! )", Path(__file__).with_suffix(".txt").read_text("utf-8").strip())
PHRASES = {
    name: [" ".join(phrase.split()) for phrase in phrases.split("|")]
    for name, phrases in (rule.split(":") for rule in RULES)
}


def draw_sentences(rng: random.Random) -> Iterator[str]:
    """Yield sentences without end, each different from all before; the same for the same `rng`
    state.
    """
    seen: set[str] = set()
    while True:
        sentence = draw_phrase("sentence", rng)
        if sentence not in seen:
            seen.add(sentence)
            yield sentence[0].upper() + sentence[1:]


def draw_phrase(rule: str, rng: random.Random) -> str:
    """Return a phrase of that rule, without any {rule} left in it."""
    start, *rest = rng.choice(PHRASES[rule]).split("{")
    return start + "".join(
        draw_phrase(name, rng) + after for name, after in (part.split("}") for part in rest)
    )
