"""RULER's eight needle-in-a-haystack tasks (arXiv 2404.06654, section 3; NVIDIA/RULER, niah.py and
synthetic.yaml).
"""

import uuid
from bisect import bisect_left
from collections.abc import Iterator
from random import Random
from typing import Literal, TypedDict

from restorekv.tasks.ruler.draft import DraftTask, PromptDraft, draw_word_pair

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
NEEDLE = "One of the special magic {kind} for {key} is: {value}."
NeedleKind = Literal["words", "numbers", "uuids"]


class NeedleSettings(TypedDict, total=False):
    """Arguments of `hide_needles` after the haystack."""

    key: NeedleKind
    value: NeedleKind
    keys: int
    values: int
    queries: int


NEEDLES: dict[str, NeedleSettings] = {
    "niah_single_1": {},
    "niah_single_2": {},
    "niah_single_3": {"value": "uuids"},
    "niah_multikey_1": {"keys": 4},
    "niah_multikey_2": {},
    "niah_multikey_3": {"key": "uuids", "value": "uuids"},
    "niah_multivalue": {"values": 4},
    "niah_multiquery": {"keys": 4, "queries": 4},
}
# What surrounds the needles, for tasks that hide them in lines; the others hide them in essays.
HAYSTACKS = {"niah_single_1": "noise", "niah_multikey_2": "needle", "niah_multikey_3": "needle"}
DEPTHS = [round(100 * step / 39) for step in range(40)]  # per cent, evenly spaced


class Essays:
    """A long text as sentences, which are read only as far as needed."""

    def __init__(self, sentences: Iterator[str]) -> None:
        self.source = sentences
        self.sentences: list[str] = []
        self.ends: list[int] = []  # words up to the end of each sentence

    def take_first(self, words: int) -> list[str]:
        """Return the sentences of the first `words` words; the last one may be cut."""
        while not self.ends or self.ends[-1] < words:
            self.sentences.append(next(self.source))
            self.ends.append((self.ends[-1] if self.ends else 0) + len(self.sentences[-1].split()))
        last = bisect_left(self.ends, words)
        cut = self.sentences[last].split()[: words - self.ends[last] or None]
        return [*self.sentences[:last], " ".join(cut)]


def hide_needles(
    haystack: str | Essays,
    key: NeedleKind = "words",
    value: NeedleKind = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> DraftTask:
    """Return a task that hides keys with values and asks for some of the keys.

    Units are lines, or words of essays.

    Args:
        haystack: Essays, "noise" for lines of noise, or "needle" for lines like the needle.
        key: The kind of keys.
        value: The kind of values.
        keys: How many keys are hidden.
        values: How many values each of them has.
        queries: How many of the keys are asked for.
    """

    def draft(units: int, rng: Random) -> PromptDraft:
        taken: set[str] = set()
        by_key: dict[str, list[str]] = {}
        for _ in range(keys):
            # The values are drawn before their key: the order of the draws decides the sample.
            found = [_draw_unused(value, rng, taken) for _ in range(values)]
            by_key[_draw_unused(key, rng, taken)] = found
        asked = rng.sample(list(by_key), queries)
        lines = []
        for name, group in by_key.items():
            lines += [NEEDLE.format(kind=value, key=name, value=each) for each in group]
        rng.shuffle(lines)
        if isinstance(haystack, Essays):
            text = _insert_into_essays(haystack.take_first(units), lines, rng)
        else:
            hay = [NOISE] * units
            if haystack == "needle":
                for line in range(units):
                    name = _draw_unused(key, rng, taken)
                    each = _draw_unused(value, rng, taken)
                    hay[line] = NEEDLE.format(kind=value, key=name, value=each)
            text = _insert_into_lines(hay, lines, rng)
        single = queries * values == 1
        names = asked[0]
        if queries > 1:
            names = ", ".join(asked[:-1]) + ", and " + asked[-1]
        answers: list[str] = []
        for name in asked:
            answers += by_key[name]
        return PromptDraft.fill(
            "one needle" if single else "needles",
            answers,
            kind=value[:-1] if single else value,
            query=names,
            haystack=text,
        )

    return DraftTask(draft, 40 if isinstance(haystack, Essays) else 2)


def _insert_into_essays(sentences: list[str], needles: list[str], rng: Random) -> str:
    """Put the needles between sentences at depths of RULER's grid."""
    indices = sorted(
        int(len(sentences) * (depth / 100)) for depth in rng.sample(DEPTHS, len(needles))
    )
    parts = []
    start = 0
    for index, needle in zip(indices, needles, strict=True):
        parts += [" ".join(sentences[start:index]), needle]
        start = index
    return " ".join([*parts, " ".join(sentences[start:])])


def _insert_into_lines(lines: list[str], needles: list[str], rng: Random) -> str:
    """Put the needles before random lines."""
    indices = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for index, needle in zip(indices, needles, strict=True):
        lines.insert(index, needle)
    return "\n".join(lines)


def _draw_unused(kind: NeedleKind, rng: Random, taken: set[str]) -> str:
    """Return a word pair, number or uuid that is not yet in `taken`, and add it there."""
    while True:
        match kind:
            case "words":
                drawn = draw_word_pair(rng)
            case "numbers":
                drawn = str(rng.randint(10**6, 10**7 - 1))
            case "uuids":
                drawn = str(uuid.UUID(int=rng.getrandbits(128), version=4))
        if drawn not in taken:
            taken.add(drawn)
            return drawn
