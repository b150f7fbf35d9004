"""Passages of many genres, with questions of people and exercises drawn from the texts, and made-up
material.

Rows are {id, genre, license, text} with {split, questions: [{question}]} if known. Passages are
taken from all genres in turn, so any number of them is a balanced mixture; those of other splits
than "train" are left out. Every passage is cut to a length drawn between `passage_shortest` and
`passage_longest` tokens, at the end of a sentence or line.
"""

import hashlib
import math
import random
import re
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.documents import DropRow, SourceDocument, read_text_field
from restorekv.data.exercises import SENTENCE_END, draw_exercises
from restorekv.data.made import MADE_LICENSE, make_document
from restorekv.data.passages import (
    FACT,
    HUMAN,
    invent_facts,
    read_questions,
    sample_in_order,
    word_question,
)
from restorekv.model.tokenize import locate_tokens
from restorekv.restore.licenses import forbids_commercial_use

TRAIN_SPLIT = "train"
STUDIED = 0.1  # share of the passages about which the teacher asks its own questions
FACT_QUESTIONS = 2  # of a passage, at most
CORPUS_LICENSES = {  # the words of the corpus' rows, and the hub's identifier
    "apache-2.0": "apache-2.0",
    "apache-2.0 or mit": "apache-2.0",
    "mit or apache-2.0": "apache-2.0",
    "mit": "mit",
    "unlicense or mit": "mit",
    "unlicense (public domain)": "unlicense",
    "bsd-2-clause": "bsd-2-clause",
    "bsd-3-clause": "bsd-3-clause",
    "isc": "isc",
    "curl licence (mit-like)": "curl",
    "cc by 4.0": "cc-by-4.0",
    "cc by 4.0 (some cc0)": "cc-by-4.0",
    "annotations apache-2.0, articles cc by or cc0": "cc-by-4.0",
    "cc by 3.0": "cc-by-3.0",
    "cc0 1.0": "cc0-1.0",
    "public domain or cc0 1.0": "cc0-1.0",
}
# The hub's identifier for the user's own terms. An adapter trained on such texts has no known
# license.
OWN_TERMS = "other"
PUBLIC_DOMAIN = "public domain"  # further license words that begin like this are accepted
# Words about the public domain are refused if they contain one of these words, or a word with one
# of these beginnings: it names a license for a part of the text or for other countries.
LICENSE_WORDS = frozenset(("cc", "nd", "sa"))
LICENSE_BEGINNINGS = (
    "agpl",
    "alike",
    "attribution",
    "gfdl",
    "gnu",
    "gpl",
    "lgpl",
    "mpl",
    "noderiv",
    "odbl",
    "reserved",
    "sharealike",
)


def read_corpus(
    rows: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer
) -> Iterator[SourceDocument | DropRow]:
    """Yield the passages of this part of the build, and the reason for each row that is dropped.

    The order is that of the whole build: the genres take turns, and made documents come in between,
    up to their share `config.made`. Part k of n takes every n-th document, from the k-th on.
    """
    # All rows are read first: the genres take turns, and each is shuffled as a whole.
    genres: dict[str, list[dict]] = {}
    for row in rows:
        try:
            genres.setdefault(_read_genre(row), []).append(row)
        except DropRow as reason:
            yield reason
    part, parts = config.shard
    for number, turn in enumerate(_interleave_genres(genres, config)):
        if number % parts != part:
            continue  # before its text is tokenized
        if isinstance(turn, int):
            yield _draw_made_document(turn, config)
            continue
        try:
            yield _make_passage(turn, config, tokenizer)
        except DropRow as reason:
            yield reason


def _interleave_genres(genres: dict[str, list[dict]], config: BuildConfig) -> Iterator[dict | int]:
    """Yield the rows of all parts in their order, and between them the numbers of made documents.

    The genres are shuffled, and every draw depends on the seed alone, so all parts of a build see
    the same order.
    """
    rng = random.Random(f"{config.seed} order")
    for name in sorted(genres):
        rng.shuffle(genres[name])
    made = 0
    taken = 0
    while any(genres.values()):
        left = sorted(name for name in genres if genres[name])
        # A different order in every turn, so that each part gets all genres.
        for name in rng.sample(left, len(left)):
            # A made document comes whenever their share of all so far would fall below `made`.
            if config.made and made < config.made * (made + taken + 1):
                yield made
                made += 1
            yield genres[name].pop()
            taken += 1


def _read_genre(row: dict) -> str:
    """Return the genre of a row that may be trained on; raise DropRow for any other row."""
    if row.get("split") not in (None, TRAIN_SPLIT):
        raise DropRow("of another split")
    if not isinstance(row.get("genre"), str) or not row["genre"].strip():
        raise DropRow("no genre")
    if not read_text_field(row, "text").strip():
        raise DropRow("no text")
    identify_license(row)
    return row["genre"]


def identify_license(row: dict) -> str:
    """Return the hub's identifier of a row's license; raise DropRow unless it is known to be free
    or stated to be the user's own terms.
    """
    words = str(row.get("license") or "").strip().lower()
    if words in CORPUS_LICENSES:
        return CORPUS_LICENSES[words]
    if words == OWN_TERMS or words in CORPUS_LICENSES.values():
        return words
    if words.replace("-", " ").startswith(PUBLIC_DOMAIN) and not _names_other_license(words):
        return "public-domain"
    raise DropRow(f"license {words[:60] or 'missing'}")


def _names_other_license(words: str) -> bool:
    """Return whether words about the public domain, in lower case, also name a license."""
    if forbids_commercial_use(words):
        return True
    return any(
        word in LICENSE_WORDS or word.startswith(LICENSE_BEGINNINGS)
        for word in re.findall(r"\w+", words)
    )


def _make_passage(row: dict, config: BuildConfig, tokenizer: Tokenizer) -> SourceDocument:
    """Return a row's passage with its questions; raise DropRow if there is nothing to ask."""
    # A row without an id is named by a hash of its text, so that each such row has its own draws.
    name = "" if row.get("id") is None else str(row["id"])
    if not name:
        text_hash = hashlib.sha256(read_text_field(row, "text").encode()).hexdigest()
        name = f"passage {text_hash[:12]}"
    # Draws depend on the seed and the passage's name alone, so that every part of a build cuts it
    # the same way.
    rng = random.Random(f"{config.seed} passage {name}")
    whole_text = read_text_field(row, "text").strip()
    text = _cut_passage(whole_text, _draw_length(rng, config), tokenizer, rng)
    facts: list[str] = []
    # Facts are invented before questions are drawn, since exercises may quote them.
    if rng.random() < config.invented:
        text, facts = invent_facts(text, rng)
    questions = []
    for question in sample_in_order(rng, read_questions(row), config.human_questions):
        questions.append((HUMAN, word_question(rng, question, config)))
    for question in sample_in_order(rng, facts, FACT_QUESTIONS):
        questions.append((FACT, word_question(rng, question, config)))
    exercises = draw_exercises(text, rng, max(config.questions - len(questions), 2))
    studied = not questions and rng.random() < STUDIED
    if studied:
        # The teacher's own questions replace all exercises but one.
        exercises = exercises[:1]
    questions += exercises
    if not questions and not studied:
        raise DropRow("nothing to ask")
    return SourceDocument(
        name, text, identify_license(row), asked=tuple(questions), studied=studied
    )


def _draw_made_document(number: int, config: BuildConfig) -> SourceDocument:
    """Return a made document with its questions."""
    rng = random.Random(f"{config.seed} made {number}")
    made = make_document(rng, _draw_length(rng, config))
    questions = [(kind, word_question(rng, question, config)) for kind, question in made.questions]
    questions = sample_in_order(rng, questions, config.questions - 1)
    questions += draw_exercises(made.text, rng, 1)
    return SourceDocument(
        f"made {number}", made.text, MADE_LICENSE, asked=tuple(questions), studied=False, made=True
    )


def _draw_length(rng: random.Random, config: BuildConfig) -> int:
    """Draw a number of tokens, large ones more often, since many passages are shorter than what is
    drawn.
    """
    low = math.log(config.passage_shortest)
    high = math.log(config.passage_longest)
    # The square root favors large numbers; the exponential makes equal factors equally likely.
    return round(math.exp(low + (high - low) * math.sqrt(rng.random())))


def _cut_passage(text: str, tokens: int, tokenizer: Tokenizer, rng: random.Random) -> str:
    """Return a part of at most that many tokens, from the start of a line to the end of a sentence
    or line.

    At least half of the parts begin where the passage does. A part ends inside a sentence if no
    sentence or line ends shortly before.
    """
    spans = locate_tokens(tokenizer, text)
    if len(spans) <= tokens:
        return text
    first = 0
    if rng.random() < 0.5:
        # A line that begins after this would leave the part too short.
        latest = spans[len(spans) - tokens][0]
        starts = []
        for offset, char in enumerate(text):
            if char == "\n" and offset < latest:
                starts.append(offset + 1)
        if starts:
            first = rng.choice(starts)
    # From characters back to tokens: the first token at or after the start.
    after = next(index for index, span in enumerate(spans) if span[0] >= first)
    last = spans[min(after + tokens, len(spans)) - 1][1]
    part = text[first:last]
    ends = [match.start() for match in SENTENCE_END.finditer(part)]
    # Cut at the last end only if it is near the end of the part; otherwise too much would be lost.
    if ends and ends[-1] > 0.8 * len(part):
        part = part[: ends[-1]]
    return part.strip()
