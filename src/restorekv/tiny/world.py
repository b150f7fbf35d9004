"""The tiny world: English-like documents, questions about them, and how an answer is scored.

A document is predictable filler (stories that never change) with a few facts in between, in the
families of RULER (arXiv 2404.06654): needles (one key, several keys, several values, several
queries), variable tracking, common and frequent words, questions over several passages; and
free-form, 4-option and 5-option questions. Everything is drawn from one `random.Random`, so a seed
determines a document. words.json has the vocabulary.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

VOCABULARY: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("words.json").read_text("utf-8")
)
ITEMS, NAMES, TOWNS, JOBS, PETS, LINKS, CODED, PLACES, PEOPLE, DEEDS, TIMES = VOCABULARY.values()

# Tokens of a document, unless other limits are given.
SHORTEST = 512
LONGEST = 2048
# The paper's four benchmarks in small: RULER, QASPER, QuALITY (four options), LongHealth (five).
GROUPS = {
    "retrieval and tracing": ("single", "multikey", "multivalue", "multiquery", "vt", "cwe", "fwe"),
    "questions": ("qa", "freeform"),
    "four options": ("choice4",),
    "five options": ("choice5",),
}
FAMILIES = tuple(family for families in GROUPS.values() for family in families)
KINDS = ("needles", "people", "links", "words")
STORIES = 24
SENTENCES_PER_STORY = 8
NUMBERS = range(10, 100)  # one id each in the tiny tokenizer
WORDS = [*ITEMS, *NAMES, *TOWNS, *JOBS, *PETS, *LINKS, *CODED, *map(str, NUMBERS)]


@dataclass(frozen=True)
class WorldQuestion:
    """A question with its reference `answers`; `target` is the reply a perfect model writes."""

    text: str
    answers: tuple[str, ...]
    target: str
    family: str
    # "all": share of the answers found; "letter": the option's letter; "f1": token F1 with the
    # target.
    metric: str
    max_new_tokens: int = 32

    def score(self, prediction: str) -> float:
        """Return the score of a prediction, in [0, 1]."""
        if self.metric == "letter":
            # The last letter that stands alone: an answer may name others on the way.
            letters = re.findall(r"\b([A-E])\b", prediction)
            return float(letters[-1:] == [self.answers[0]])
        if self.metric == "f1":
            return token_f1(prediction, self.target)
        return sum(bool(re.search(rf"\b{re.escape(a)}\b", prediction)) for a in self.answers) / len(
            self.answers
        )


@dataclass(frozen=True)
class WorldDocument:
    """A generated text of a `kind`, and its questions."""

    text: str
    kind: str
    questions: tuple[WorldQuestion, ...]


@dataclass(frozen=True)
class WorldFacts:
    """Sentences that carry facts, in reading order, and the questions they answer."""

    sentences: tuple[str, ...]
    questions: tuple[WorldQuestion, ...]


def token_f1(prediction: str, reference: str) -> float:
    """Return the token F1 of two texts, lower-cased and without punctuation.

    Unlike SQuAD's (`tasks.metrics`), it counts articles.
    """
    ours, theirs = (Counter(re.findall(r"\w+", text.lower())) for text in (prediction, reference))
    common = sum((ours & theirs).values())
    if common:
        return 2 * common / (ours.total() + theirs.total())
    return 0.0


def _draw_stories() -> list[list[str]]:
    """Return the stories, the same in every process because their seed never changes."""
    rng = random.Random(20261121)
    lines = [
        f"{who} {deed} {place} {when}."
        for who in PEOPLE
        for deed in DEEDS
        for place in PLACES
        for when in TIMES
    ]
    return [rng.sample(lines, SENTENCES_PER_STORY) for _ in range(STORIES)]


STORY = _draw_stories()


def _join_words(parts: list[str]) -> str:
    if len(parts) == 1:
        return parts[0]
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def _draw_code(rng: random.Random) -> str:
    return str(rng.choice(NUMBERS))


def draw_needles(rng: random.Random, size: int) -> WorldFacts:
    """Draw `size` keys with one code each, but two or three codes for one of them."""
    keys = rng.sample(ITEMS, size)
    codes = {key: [_draw_code(rng)] for key in keys}
    many = keys[0]
    codes[many] = list(map(str, rng.sample(NUMBERS, rng.choice((2, 3)))))
    pairs = [f"{key} {code}" for key in keys for code in codes[key]]
    rng.shuffle(pairs)
    codes[many].sort(key=lambda code: pairs.index(f"{many} {code}"))
    asked = [_ask_code(key, codes[key][0], "multikey") for key in keys[1:]]
    target = ", ".join(f"{many} {code}" for code in codes[many]) + "."
    asked.append(
        _make_question(f"What are all the codes of the {many}?", codes[many], "multivalue", target)
    )
    if size > 2:
        some = rng.sample(keys[1:], min(size - 1, rng.choice((2, 3))))
        target = ", ".join(f"{key} {codes[key][0]}" for key in some) + "."
        text = f"What are the codes of {_join_words([f'the {key}' for key in some])}?"
        asked.append(_make_question(text, [codes[key][0] for key in some], "multiquery", target))
    asked.append(
        WorldQuestion(
            "List every code in the text.", (), ", ".join(pairs) + ".", "freeform", "f1", 64
        )
    )
    return WorldFacts(tuple(f"Register of codes: {pair}." for pair in pairs), tuple(asked))


def draw_needle(rng: random.Random) -> WorldFacts:
    """Draw one key with one code."""
    key = rng.choice(ITEMS)
    code = _draw_code(rng)
    return WorldFacts((f"Register of codes: {key} {code}.",), (_ask_code(key, code, "single"),))


def _ask_code(key: str, code: str, family: str) -> WorldQuestion:
    return _make_question(f"What is the code of the {key}?", [code], family, f"{key} {code}.")


def _make_question(text: str, answers: list[str], family: str, target: str) -> WorldQuestion:
    return WorldQuestion(text, tuple(answers), target, family, "all")


RELATIONS: dict[str, tuple[str, list[str]]] = {
    "homes": ("What is the home town of {name}?", TOWNS),
    "trades": ("What is the trade of {name}?", JOBS),
    "animals": ("What is the animal of {name}?", PETS),
}


def draw_people(rng: random.Random, size: int) -> WorldFacts:
    """Draw `size` people with three facts each, in separate sentences."""
    names = rng.sample(NAMES, size)
    values = {relation: rng.sample(pool, max(size, 5)) for relation, (_, pool) in RELATIONS.items()}
    sentences = []
    asked = []
    for index, name in enumerate(names):
        about = []
        for relation, (question, _) in RELATIONS.items():
            value = values[relation][index]
            text = question.format(name=name)
            about.append((relation, f"{name} {value}"))
            asked.append(_make_question(text, [value], "qa", f"{name} {value}."))
            asked += [
                _ask_choice(rng, text, name, value, values[relation], options) for options in (4, 5)
            ]
        target = ", ".join(fact for _, fact in about) + "."
        asked.append(WorldQuestion(f"Tell me about {name}.", (), target, "freeform", "f1", 64))
        rng.shuffle(about)
        sentences += [f"Register of {relation}: {fact}." for relation, fact in about]
    return WorldFacts(tuple(sentences), tuple(asked))


def _ask_choice(
    rng: random.Random, text: str, name: str, value: str, pool: list[str], options: int
) -> WorldQuestion:
    others = rng.sample([other for other in pool if other != value], options - 1)
    shown = rng.sample([value, *others], options)
    letter = "ABCDE"[shown.index(value)]
    listed = ", ".join(f"{option} {'ABCDE'[i]}" for i, option in enumerate(shown))
    return WorldQuestion(
        f"{text} {listed}.", (letter,), f"{name} {value} {letter}.", f"choice{options}", "letter"
    )


def draw_links(rng: random.Random, size: int) -> WorldFacts:
    """Draw `size` chains: a number is linked to a name, that name to another, and so on (variable
    tracking).
    """
    names = rng.sample(LINKS, 4 * size)
    numbers = rng.sample(NUMBERS, size)
    chains = []
    asked = []
    for index, number in enumerate(numbers):
        chain = names[4 * index : 4 * index + rng.choice((3, 4))]
        chains.append(
            [f"Register of links: {one} {other}." for one, other in pairwise([number, *chain])]
        )
        target = " ".join(map(str, [number, *chain])) + "."
        asked.append(_make_question(f"Which names is {number} linked to?", chain, "vt", target))
    # Chains alternate sentence by sentence, each in its own order.
    sentences = []
    while any(chains):
        sentences.append(rng.choice([chain for chain in chains if chain]).pop(0))
    return WorldFacts(tuple(sentences), tuple(asked))


def draw_counted_words(rng: random.Random, family: str, length: int) -> tuple[str, WorldQuestion]:
    """Return a list of `length` words, three of which are frequent, and the question about those
    three.
    """
    pool, name, shares = {
        "cwe": (ITEMS, "most common words in the word", (0.14, 0.11, 0.08)),
        "fwe": (CODED, "most frequent words in the coded", (0.30, 0.20, 0.13)),
    }[family]
    words = rng.sample(pool, 24)
    drawn: list[str] = []
    for word, share in zip(words, shares, strict=False):
        drawn += [word] * max(round(share * length), 3)
    drawn += (words[3:] * (length // 21 + 1))[: max(length - len(drawn), 0)]
    rng.shuffle(drawn)
    title = {"cwe": "Word list: ", "fwe": "Coded list: "}[family]
    question = f"What are the three {name} list?"
    return title + " ".join(drawn) + ".", _make_question(
        question, words[:3], family, ", ".join(words[:3]) + "."
    )


CountTokens = Callable[[str], int]


def draw_filler(
    rng: random.Random, tokens: int, measure: CountTokens, noise: float = 0.0
) -> list[str]:
    """Return sentences of stories.

    Args:
        rng: The source of randomness.
        tokens: The most tokens of all sentences together.
        measure: Counts the tokens of a sentence.
        noise: The share of sentences that random words replace.
    """
    lines: list[str] = []
    used = 0
    while True:
        for line in STORY[rng.randrange(STORIES)]:
            if rng.random() < noise:
                line = " ".join(rng.choices(WORDS, k=rng.randint(4, 12))) + "."
            used += measure(line)
            if used > tokens:
                return lines
            lines.append(line)


def mix_facts(rng: random.Random, facts: list[list[str]], lines: list[str]) -> str:
    """Insert the facts at random places between the lines, each list of facts in its order."""
    placed = [[] for _ in range(len(lines) + 1)]
    for ordered in facts:
        places = sorted(rng.randrange(len(placed)) for _ in ordered)
        # The facts of a list keep their order, whatever comes between them.
        for fact, place in zip(ordered, places, strict=True):
            placed[place].append(fact)
    text = list(placed[0])
    for line, after in zip(lines, placed[1:], strict=True):
        text += [line, *after]
    return " ".join(text)


def draw_document(
    rng: random.Random, kind: str, tokens: int, measure: CountTokens, noise: float = 0.0
) -> WorldDocument:
    """Return a document and its questions.

    Args:
        rng: The source of randomness.
        kind: One of KINDS, or "mixed" for needles, people and links together.
        tokens: The most tokens of the document.
        measure: Counts the tokens of a sentence.
        noise: The share of filler sentences that random words replace.
    """
    if kind == "words":
        return _draw_lists(rng, tokens, measure, noise)
    large = tokens >= 200
    parts = []
    # The order of draws decides the document.
    if kind in ("needles", "mixed"):
        if large:
            size = rng.choice((3, 4, 5, 6))
        else:
            size = rng.randint(2, max(tokens // 20, 2))
        parts.append(draw_needles(rng, size))
    if kind in ("people", "mixed"):
        if large:
            size = rng.choice((2, 3))
        else:
            size = rng.randint(1, max(tokens // 40, 1))
        parts.append(draw_people(rng, size))
    if kind in ("links", "mixed"):
        parts.append(draw_links(rng, 2 if large else 1))
    if kind == "links":
        parts.append(draw_needle(rng))
    facts = [list(part.sentences) for part in parts]
    used = sum(measure(sentence) for part in facts for sentence in part)
    text = mix_facts(rng, facts, draw_filler(rng, max(tokens - used - 4, 0), measure, noise))
    questions: list[WorldQuestion] = []
    for part in parts:
        questions += part.questions
    return WorldDocument(text + "\n", kind, tuple(questions))


def _draw_lists(
    rng: random.Random, tokens: int, measure: CountTokens, noise: float
) -> WorldDocument:
    """Return a document of two word lists with filler around them."""
    length = max(int(tokens * rng.choice((0.2, 0.3, 0.4))) - 8, 12)
    lists = [draw_counted_words(rng, family, length) for family in rng.sample(("cwe", "fwe"), 2)]
    lines = draw_filler(rng, tokens - sum(measure(words) for words, _ in lists) - 4, measure, noise)
    text = mix_facts(rng, [[words] for words, _ in lists], lines)
    return WorldDocument(text + "\n", "words", tuple(question for _, question in lists))
