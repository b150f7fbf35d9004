"""The bundled world: English-like documents, what can be asked about them, and how an answer is scored.

A document is predictable filler (stories that never change) with a few facts strewn in, in the families of RULER
(arXiv 2404.06654): needles (one key, several keys, several values, several queries), variable tracking, common and
frequent words, questions over several passages; and free-form, 4-option and 5-option questions. Everything is drawn
from one `random.Random`, so a seed names a document.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from restorekv.bundled.words import (
    BOTTLES,
    CODED,
    DEEDS,
    ITEMS,
    JOBS,
    NAMES,
    PEOPLE,
    PETS,
    PLACES,
    TIMES,
    TOWNS,
)  # fmt: skip

FAMILIES = (
    "single", "multikey", "multivalue", "multiquery", "vt", "cwe", "fwe", "qa", "freeform", "choice4", "choice5",
)  # fmt: skip
KINDS = ("needles", "people", "bottles", "words")
STORIES, SENTENCES_PER_STORY = 24, 8
NUMBERS = range(100, 500)  # of three digits: one id each in the bundled tokenizer


@dataclass(frozen=True)
class Question:
    """A question, the reference `answers`, its `family`, and the reply a perfect model writes (`target`)."""

    text: str
    answers: tuple[str, ...]
    target: str
    family: str
    metric: str  # "all": share of the answers found; "letter": the option's letter; "f1": token F1 with the target
    max_new_tokens: int = 32

    def score(self, prediction: str) -> float:
        """Score `prediction` in [0, 1]."""
        if self.metric == "letter":
            letters = re.findall(r"\(([A-E])\)", prediction)
            return float(letters[-1:] == [self.answers[0]])
        if self.metric == "f1":
            return token_f1(prediction, self.target)
        return sum(bool(re.search(rf"\b{re.escape(a)}\b", prediction)) for a in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Document:
    """A generated text of a `kind`, and its questions."""

    text: str
    kind: str
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class Facts:
    """Sentences that carry facts, in reading order, and the questions they answer."""

    sentences: tuple[str, ...]
    questions: tuple[Question, ...]


def token_f1(prediction: str, reference: str) -> float:
    """Token-level F1 of two texts, lower-cased, punctuation dropped (the SQuAD measure)."""
    ours, theirs = (Counter(re.findall(r"\w+", text.lower())) for text in (prediction, reference))
    common = sum((ours & theirs).values())
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def _stories() -> list[list[str]]:
    """The stories: the same in every process, since their seed never changes."""
    rng = random.Random(20261121)
    lines = [f"{who} {deed} {place} {when}." for who in PEOPLE for deed in DEEDS for place in PLACES for when in TIMES]
    return [rng.sample(lines, SENTENCES_PER_STORY) for _ in range(STORIES)]


STORY = _stories()


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def _code(rng: random.Random) -> str:
    return str(rng.choice(NUMBERS))


def needles(rng: random.Random, size: int) -> Facts:
    """`size` keys with a code each, one of them with two or three codes."""
    keys = rng.sample(ITEMS, size)
    codes = {key: [_code(rng)] for key in keys}
    many = keys[0]
    codes[many] = rng.sample(NUMBERS, rng.choice((2, 3)))
    codes[many] = [str(code) for code in codes[many]]
    sentences = [f"The secret code of the {key} is {code}." for key in keys for code in codes[key]]
    rng.shuffle(sentences)
    codes[many].sort(key=lambda code: sentences.index(f"The secret code of the {many} is {code}."))
    asked = []
    for key in keys[1:]:
        asked.append(
            _plain(f"What is the secret code of the {key}?", codes[key], "multikey", f"{key} is {codes[key][0]}.")
        )
    told = ", ".join(f"{many} is {code}" for code in codes[many]) + "."
    asked.append(_plain(f"What are all the secret codes of the {many}?", codes[many], "multivalue", told))
    if size > 2:
        some = rng.sample(keys[1:], min(size - 1, rng.choice((2, 3))))
        text = f"What are the secret codes of the {_join(['the ' + k for k in some])[4:]}?"
        told = ", ".join(f"{key} is {codes[key][0]}" for key in some) + "."
        asked.append(_plain(text, [codes[key][0] for key in some], "multiquery", told))
    listing = ", ".join(sentence.removeprefix("The secret code of the ")[:-1] for sentence in sentences) + "."
    asked.append(Question("List every secret code in the text.", (), listing, "freeform", "f1", 64))
    return Facts(tuple(sentences), tuple(asked))


def needle(rng: random.Random) -> Facts:
    """One key with one code."""
    key, code = rng.choice(ITEMS), _code(rng)
    asked = _plain(f"What is the secret code of the {key}?", [code], "single", f"{key} is {code}.")
    return Facts((f"The secret code of the {key} is {code}.",), (asked,))


def _plain(text: str, answers: list[str], family: str, target: str) -> Question:
    return Question(text, tuple(answers), target, family, "all")


RELATIONS: dict[str, tuple[str, str, list[str]]] = {
    "town": ("{name} was born in {value}.", "Where was {name} born?", TOWNS),
    "job": ("{name} works as a {value}.", "What does {name} work as?", JOBS),
    "pet": ("{name} keeps a {value}.", "Which animal does {name} keep?", PETS),
}


def people(rng: random.Random, size: int) -> Facts:
    """`size` short passages, each about one person, with three facts apiece."""
    names = rng.sample(NAMES, size)
    values = {relation: rng.sample(pool, max(size, 5)) for relation, (_, _, pool) in RELATIONS.items()}
    sentences, asked = [], []
    for index, name in enumerate(names):
        about = []
        for relation, (statement, question, _) in RELATIONS.items():
            value = values[relation][index]
            about.append(statement.format(name=name, value=value))
            text = question.format(name=name)
            asked.append(_plain(text, [value], "qa", about[-1]))
            for options in (4, 5):
                asked.append(_choice(rng, text, about[-1], value, values[relation], options))
        asked.append(Question(f"Tell me about {name}.", (), " ".join(about), "freeform", "f1", 64))
        rng.shuffle(about)
        sentences += about
    return Facts(tuple(sentences), tuple(asked))


def _choice(rng: random.Random, text: str, fact: str, value: str, pool: list[str], options: int) -> Question:
    others = rng.sample([other for other in pool if other != value], options - 1)
    shown = rng.sample([value, *others], options)
    letter = "ABCDE"[shown.index(value)]
    listed = ", ".join(f"{option} ({'ABCDE'[i]})" for i, option in enumerate(shown))
    return Question(f"{text} {listed}.", (letter,), f"{fact[:-1]} ({letter}).", f"choice{options}", "letter")


def bottles(rng: random.Random, size: int) -> Facts:
    """`size` chains: a number is poured into a bottle and from bottle to bottle (variable tracking)."""
    names = rng.sample(BOTTLES, 4 * size)
    numbers = rng.sample(NUMBERS, size)
    chains, asked = [], []
    for index, number in enumerate(numbers):
        chain = names[4 * index : 4 * index + rng.choice((3, 4))]
        steps = [f"Pour {source} into {target}." for source, target in pairwise([number, *chain])]
        chains.append(steps)
        told = " into ".join(map(str, [number, *chain])) + "."
        asked.append(_plain(f"Into which bottles was {number} poured?", chain, "vt", told))
    sentences = []
    while any(chains):
        sentences.append(rng.choice([chain for chain in chains if chain]).pop(0))
    return Facts(tuple(sentences), tuple(asked))


def counted_words(rng: random.Random, family: str, length: int) -> tuple[str, Question]:
    """A list of `length` words, three of which are frequent, and the question for those three."""
    pool, name, shares = {
        "cwe": (ITEMS, "most common words in the word", (0.14, 0.11, 0.08)),
        "fwe": (CODED, "most frequent words in the coded", (0.30, 0.20, 0.13)),
    }[family]
    words = rng.sample(pool, 24)
    drawn = [word for word, share in zip(words, shares, strict=False) for _ in range(max(round(share * length), 3))]
    drawn += (words[3:] * (length // 21 + 1))[: max(length - len(drawn), 0)]
    rng.shuffle(drawn)
    title = {"cwe": "Word list: ", "fwe": "Coded list: "}[family]
    return title + " ".join(drawn) + ".", _plain(
        f"What are the three {name} list?", words[:3], family, ", ".join(words[:3]) + "."
    )


Measure = Callable[[str], int]


def filler(rng: random.Random, tokens: int, measure: Measure, noise: float = 0.0) -> list[str]:
    """Sentences of whole stories up to `tokens` by `measure`; a share `noise` of them drawn at random instead."""
    lines: list[str] = []
    used = 0
    while True:
        for line in STORY[rng.randrange(STORIES)]:
            if rng.random() < noise:
                line = f"{rng.choice(PEOPLE)} {rng.choice(DEEDS)} {rng.choice(PLACES)} {rng.choice(TIMES)}."
            used += measure(line)
            if used > tokens:
                return lines
            lines.append(line)


def strew(rng: random.Random, facts: list[list[str]], lines: list[str]) -> str:
    """Insert the `facts` at random places between `lines`, each of its lists in order."""
    placed = [[] for _ in range(len(lines) + 1)]
    for ordered in facts:
        for fact, place in zip(ordered, sorted(rng.randrange(len(placed)) for _ in ordered), strict=True):
            placed[place].append(fact)
    text = list(placed[0])
    for line, after in zip(lines, placed[1:], strict=True):
        text += [line, *after]
    return " ".join(text)


def document(rng: random.Random, kind: str, tokens: int, measure: Measure, noise: float = 0.0) -> Document:
    """A document of at most `tokens` by `measure` (which is told one sentence at a time) and its questions."""
    if kind == "words":
        return _lists(rng, tokens, measure, noise)
    large = tokens >= 200
    parts = []
    if kind in ("needles", "mixed"):
        parts.append(needles(rng, rng.choice((3, 4, 5, 6)) if large else rng.randint(2, max(tokens // 20, 2))))
    if kind in ("people", "mixed"):
        parts.append(people(rng, rng.choice((2, 3)) if large else rng.randint(1, max(tokens // 40, 1))))
    if kind in ("bottles", "mixed"):
        parts.append(bottles(rng, 2 if large else 1))
    if kind == "bottles":
        parts.append(needle(rng))
    facts = [list(part.sentences) for part in parts]
    used = sum(measure(sentence) for part in facts for sentence in part)
    text = strew(rng, facts, filler(rng, max(tokens - used - 4, 0), measure, noise))
    return Document(text + "\n", kind, tuple(question for part in parts for question in part.questions))


def _lists(rng: random.Random, tokens: int, measure: Measure, noise: float) -> Document:
    """A document of two word lists with filler around them."""
    length = max(int(tokens * rng.choice((0.2, 0.3, 0.4))) - 8, 12)
    made = [counted_words(rng, family, length) for family in rng.sample(("cwe", "fwe"), 2)]
    lines = filler(rng, tokens - sum(measure(listing) for listing, _ in made) - 4, measure, noise)
    text = strew(rng, [[listing] for listing, _ in made], lines)
    return Document(text + "\n", "words", tuple(question for _, question in made))
