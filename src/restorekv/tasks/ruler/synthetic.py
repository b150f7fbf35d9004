"""Variable tracking and aggregation, RULER's vt, cwe and fwe (arXiv 2404.06654, section 3;
NVIDIA/RULER, variable_tracking.py, common_words_extraction.py and freq_words_extraction.py).

vt is one chain of four hops in noise, after a worked example with a chain of its own.
"""

import math
import string
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from restorekv.tasks.ruler.draft import Draft, Task, answer_tokens, most_units, word_pair, words
from restorekv.tasks.ruler.needles import NOISE

HOPS = 4
EXAMPLE_TOKENS = 500  # RULER's length of the example, its answer's 30 tokens included
EXAMPLE_NOISES = 10  # what RULER's search, in steps of five, returns with most tokenizers
ASKED = 10  # common words
SHORT = 2048  # RULER's lists do not fit into smaller lengths
ZETA = math.pi**2 / 6  # of alpha = 2, the exponent of the coded words' distribution
LETTERS = 6  # of a coded word
TOKENS_PER_CODED = 50  # tokens of length for each word of the coded vocabulary
# From here on the fourth word is more frequent than the fifth.
LEAST_CODED = math.ceil(ZETA / (1 / 16 - 1 / 25))


def chains(length: int, tokens: Callable[[str], int]) -> Task:
    """Units are noises. The example has at most 500 tokens, or a quarter of the length, and at
    least one noise.
    """

    def size(noises: int) -> int:
        return tokens(example(noises, Random("example"))) + answer_tokens("vt")

    limit = min(EXAMPLE_TOKENS, length // 4)
    noises = most_units(size, limit, 1, EXAMPLE_NOISES) if size(1) <= limit else 1

    def draft(units: int, rng: Random) -> Draft:
        solved = example(noises, rng)
        task = chain(5, units, rng)
        return task._replace(context=f"{solved}\n\n\n\n{task.context}")

    return Task(draft)


def example(noises: int, rng: Random) -> str:
    """Returns a solved task with names of three letters."""
    task = chain(3, noises, rng)
    return f"{task.text} {' '.join(task.answers)}"


def chain(letters: int, noises: int, rng: Random) -> Draft:
    """Returns one chain among noises; if the noises are few, their sentences are used one by one,
    as RULER does.
    """
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in {*names, "VAR"}:
            names.append(name)
    value = str(rng.randrange(10000, 99999))
    links = [
        f"VAR {names[0]} = {value}",
        *(f"VAR {new} = VAR {old} " for old, new in pairwise(names)),
    ]
    lines = [NOISE + "\n"] * noises
    if noises <= len(links):
        pieces = [piece for line in lines for piece in line.split(".")]
        lines = [f"{piece}." if piece.strip() else piece for piece in pieces]
    for inserted, place in enumerate(sorted(rng.sample(range(len(lines)), len(links)))):
        lines.insert(place + inserted, links[inserted])
    text = " ".join(lines).replace(". \n", ".\n")
    return Draft.fill("vt", names, text=text, value=value, count=len(names))


def common_words(length: int) -> Task:
    """Units are different words, ten of them common; RULER has two settings, ours fits lengths that
    hold neither.

    A setting is how often a common and another word stand in the list, and the same with a number
    of words for the example.
    """
    if length >= 4096:
        times = (30, 3)
        example = (40, 10, 3)
    else:
        times, example = ((6, 1), (20, 3, 1)) if length >= SHORT else ((3, 1), (15, 2, 1))

    def draft(units: int, rng: Random) -> Draft:
        solved = counted(*example, rng)
        task = counted(units, *times, rng)
        return task._replace(context=f"{solved.text}{numbered(solved.answers)}\n{task.context}")

    return Task(draft, ASKED + 1)


def counted(units: int, common: int, other: int, rng: Random) -> Draft:
    """Returns a shuffled list of `units` words, the first ten of them `common` times, the others
    `other` times.
    """
    drawn = distinct(units, rng)
    entries = drawn[:ASKED] * common + drawn[ASKED:] * other
    rng.shuffle(entries)
    return Draft.fill("cwe", drawn[:ASKED], text=numbered(entries))


def distinct(count: int, rng: Random) -> list[str]:
    """Returns different words in a random order: single words, then pairs of an adjective and a
    noun.
    """
    single = list(words("noun", "adjective", "verb"))
    rng.shuffle(single)
    drawn = dict.fromkeys(single)
    while len(drawn) < count:
        drawn[word_pair(rng)] = None
    return list(drawn)[:count]


def numbered(entries: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))


def frequent_words(length: int) -> Task:
    """Units are N: of the coded words the k-th stands floor(N k^-2 / zeta(2)) times, the first one
    as dots.

    The question asks for the three words after it.
    """

    def draft(units: int, rng: Random) -> Draft:
        coded: dict[str, None] = {}
        while len(coded) < max(length // TOKENS_PER_CODED, 5):
            coded["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
        ranked = ["...", *list(coded)[1:]]
        entries = [
            word for rank, word in enumerate(ranked, 1) for _ in range(int(units / rank**2 / ZETA))
        ]
        rng.shuffle(entries)
        return Draft.fill("fwe", ranked[1:4], text=" ".join(entries))

    return Task(draft, LEAST_CODED)
