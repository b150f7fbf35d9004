"""Variable tracking and aggregation, RULER's vt, cwe and fwe (arXiv 2404.06654, section 3;
NVIDIA/RULER, variable_tracking.py, common_words_extraction.py and freq_words_extraction.py).

vt is one chain of four hops in noise, after a worked example with its own chain.
"""

import math
import string
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random

from restorekv.tasks.ruler.draft import (
    DraftTask,
    PromptDraft,
    draw_word_pair,
    find_most_units,
    get_answer_limit,
    load_words,
)
from restorekv.tasks.ruler.needles import NOISE

HOPS = 4
EXAMPLE_TOKENS = 500  # RULER's length of the example, its answer's 30 tokens included
EXAMPLE_NOISES = 10  # what RULER's search, in steps of five, returns with most tokenizers
ASKED = 10  # common words
SHORT = 2048  # RULER's lists do not fit into smaller lengths
ZETA = math.pi**2 / 6  # of alpha = 2, the exponent of the coded words' distribution
LETTERS = 6  # of a coded word
TOKENS_PER_CODED = 50  # tokens of length for each word of the coded vocabulary
# The least N from which on the fourth word is more frequent than the fifth.
MIN_CODED_WORDS = math.ceil(ZETA / (1 / 16 - 1 / 25))


def track_variables(length: int, tokens: Callable[[str], int]) -> DraftTask:
    """Return the task vt. Units are repetitions of the noise.

    The worked example has at most 500 tokens, or a quarter of `length` if that is less, but at
    least one noise.
    """

    def size(noises: int) -> int:
        return tokens(_draft_example(noises, Random("example"))) + get_answer_limit("vt")

    limit = min(EXAMPLE_TOKENS, length // 4)
    noises = 1
    if size(1) <= limit:
        noises = find_most_units(size, limit, 1, EXAMPLE_NOISES)

    def draft(units: int, rng: Random) -> PromptDraft:
        # A new worked example is drawn for every sample.
        solved = _draft_example(noises, rng)
        task = _draft_chain(5, units, rng)
        return task._replace(context=f"{solved}\n\n\n\n{task.context}")

    return DraftTask(draft)


def _draft_example(noises: int, rng: Random) -> str:
    """Return a solved task with names of three letters."""
    task = _draft_chain(3, noises, rng)
    return f"{task.text} {' '.join(task.answers)}"


def _draft_chain(letters: int, noises: int, rng: Random) -> PromptDraft:
    """Return one chain among noises; if there are few noises, the links go between their sentences,
    as in RULER.
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
    # A few noises have too few gaps for the links between them.
    if noises <= len(links):
        pieces: list[str] = []
        for line in lines:
            pieces += line.split(".")
        lines = [f"{piece}." if piece.strip() else piece for piece in pieces]
    for inserted, index in enumerate(sorted(rng.sample(range(len(lines)), len(links)))):
        lines.insert(index + inserted, links[inserted])
    text = " ".join(lines).replace(". \n", ".\n")
    return PromptDraft.fill("vt", names, text=text, value=value, count=len(names))


def find_common_words(length: int) -> DraftTask:
    """Return the task cwe. Units are different words, ten of them common.

    RULER has two settings; a third one is for lengths that are too small for both. A setting says
    how often a common word and any other word occur in the list and, for the worked example, also
    how many words there are.
    """
    if length >= 4096:
        times = (30, 3)
        example = (40, 10, 3)
    else:
        times, example = ((6, 1), (20, 3, 1)) if length >= SHORT else ((3, 1), (15, 2, 1))

    def draft(units: int, rng: Random) -> PromptDraft:
        solved = _draft_counted_list(*example, rng)
        task = _draft_counted_list(units, *times, rng)
        return task._replace(
            context=f"{solved.text}{_number_entries(solved.answers)}\n{task.context}"
        )

    return DraftTask(draft, ASKED + 1)


def _draft_counted_list(units: int, common: int, other: int, rng: Random) -> PromptDraft:
    """Return a shuffled list of `units` words, the first ten of them `common` times, the others
    `other` times.
    """
    drawn = _draw_distinct(units, rng)
    entries = drawn[:ASKED] * common + drawn[ASKED:] * other
    rng.shuffle(entries)
    return PromptDraft.fill("cwe", drawn[:ASKED], text=_number_entries(entries))


def _draw_distinct(count: int, rng: Random) -> list[str]:
    """Return different words in a random order: single words, then pairs of an adjective and a
    noun.
    """
    single = list(load_words("noun", "adjective", "verb"))
    rng.shuffle(single)
    # A dictionary keeps the order and drops repeated words.
    drawn = dict.fromkeys(single)
    while len(drawn) < count:
        drawn[draw_word_pair(rng)] = None
    return list(drawn)[:count]


def _number_entries(entries: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(entries, 1))


def find_frequent_words(length: int) -> DraftTask:
    """Return the task fwe. Units are N: the k-th coded word occurs floor(N k^-2 / zeta(2)) times.

    The first word is written as dots; the question asks for the three words after it.
    """

    def draft(units: int, rng: Random) -> PromptDraft:
        coded: dict[str, None] = {}
        while len(coded) < max(length // TOKENS_PER_CODED, 5):
            coded["".join(rng.choices(string.ascii_lowercase, k=LETTERS))] = None
        ranked = ["...", *list(coded)[1:]]
        entries: list[str] = []
        for rank, word in enumerate(ranked, 1):
            entries += [word] * int(units / rank**2 / ZETA)
        rng.shuffle(entries)
        return PromptDraft.fill("fwe", ranked[1:4], text=" ".join(entries))

    return DraftTask(draft, MIN_CODED_WORDS)
