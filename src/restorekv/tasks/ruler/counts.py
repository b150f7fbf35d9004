"""Aggregation, RULER's cwe and fwe (arXiv 2404.06654, section 3; NVIDIA/RULER, common_words_extraction.py and
freq_words_extraction.py).
"""

import math
import string
from collections.abc import Sequence
from random import Random

from restorekv.tasks.ruler.draft import Draft, Task, word_pair, words

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{text}\n",
    "Question: What are the 10 most common words in the above list? ",
    "Answer: The top 10 words that appear most often in the list are:",
)
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {text}\n",
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text? ",
    "Answer: According to the coded text above, the three most frequently appeared words are:",
)
ASKED = 10  # common words
SHORT = 2048  # RULER's lists do not fit into smaller lengths
ZETA = math.pi**2 / 6  # of alpha = 2, the exponent of the coded words' distribution
LETTERS = 6  # of a coded word
TOKENS_PER_CODED = 50  # tokens of length for each word of the coded vocabulary
LEAST_CODED = math.ceil(ZETA / (1 / 16 - 1 / 25))  # from here on the fourth word is more frequent than the fifth


def common_words(length: int) -> Task:
    """Units are different words, ten of them common; RULER has two settings, ours fits lengths that hold neither.

    A setting is how often a common and another word stand in the list, and the same with a number of words for the
    example.
    """
    if length >= 4096:
        times, example = (30, 3), (40, 10, 3)
    else:
        times, example = ((6, 1), (20, 3, 1)) if length >= SHORT else ((3, 1), (15, 2, 1))

    def draft(units: int, rng: Random) -> Draft:
        solved = counted(*example, rng)
        task = counted(units, *times, rng)
        return task._replace(context=f"{solved.text}{numbered(solved.answers)}\n{task.context}")

    return Task(draft, ASKED + 1)


def counted(units: int, common: int, other: int, rng: Random) -> Draft:
    """Returns a shuffled list of `units` words, the first ten of them `common` times, the others `other` times."""
    drawn = distinct(units, rng)
    entries = drawn[:ASKED] * common + drawn[ASKED:] * other
    rng.shuffle(entries)
    return Draft(*(part.format(text=numbered(entries)) for part in COMMON), tuple(drawn[:ASKED]))


def distinct(count: int, rng: Random) -> list[str]:
    """Returns different words in a random order: single words, then pairs of an adjective and a noun."""
    single = list(words("noun", "adjective", "verb"))
    rng.shuffle(single)
    drawn = dict.fromkeys(single)
    while len(drawn) < count:
        drawn[word_pair(rng)] = None
    return list(drawn)[:count]


def numbered(entries: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))


def frequent_words(length: int) -> Task:
    """Units are N: of the coded words the k-th stands floor(N k^-2 / zeta(2)) times, the first one as dots.

    The question asks for the three words after it.
    """

    def draft(units: int, rng: Random) -> Draft:
        coded: dict[str, None] = {}
        while len(coded) < max(length // TOKENS_PER_CODED, 5):
            coded["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
        ranked = ["...", *list(coded)[1:]]
        entries = [word for rank, word in enumerate(ranked, 1) for _ in range(int(units / rank**2 / ZETA))]
        rng.shuffle(entries)
        return Draft(*(part.format(text=" ".join(entries)) for part in FREQUENT), tuple(ranked[1:4]))

    return Task(draft, LEAST_CODED)
