"""The tiny suite: held-out documents of the tiny world, of 512 to 2,048 tokens.

Splits share no document, because the seed of a document is the text `<split> <seed> <index>`.
Training uses only other splits ("pretrain ..." in recipes/tiny/examples.py, "restore" in
restorekv.train).
"""

import random
from collections.abc import Callable
from functools import lru_cache

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.model.tokenize import tokenize_text
from restorekv.tiny.world import KINDS, LONGEST, SHORTEST, WorldDocument, draw_document

SHARES = (12, 12, 12, 16)  # of every 52 documents, by kind
MOST_PER_FAMILY = 2  # questions of one family asked of one document


def draw_documents(
    tokenizer: Tokenizer,
    count: int = 52,
    split: str = "test",
    seed: int = 0,
    low: int = SHORTEST,
    high: int = LONGEST,
) -> list[WorldDocument]:
    """Return documents of kinds in the proportion `SHARES`.

    Lengths count the chat prefix of the tiny template, so that the longest still fits.

    Args:
        tokenizer: The tokenizer that counts ids.
        count: How many documents.
        split: The split; each has different documents.
        seed: The seed; each gives different documents of a split.
        low: The fewest ids of a document.
        high: The most ids of a document.
    """
    length = make_sentence_counter(tokenizer)
    kinds: list[str] = []
    # A fixed proportion of kinds in a fixed order: the first n documents are a mixture too.
    for kind, share in zip(KINDS, SHARES, strict=True):
        kinds += [kind] * share
    random.Random("order of kinds").shuffle(kinds)
    return [
        draw_held_out(f"{split} {seed} {index}", kinds[index % len(kinds)], low, high, length)
        for index in range(count)
    ]


def make_sentence_counter(tokenizer: Tokenizer) -> Callable[[str], int]:
    """Return a function that counts a sentence's ids in running text.

    It has a cache, because filler repeats itself.
    """
    return lru_cache(maxsize=20000)(lambda sentence: len(tokenize_text(tokenizer, " " + sentence)))


def draw_held_out(
    name: str, kind: str, low: int, high: int, length: Callable[[str], int]
) -> WorldDocument:
    """Return a document with at most MOST_PER_FAMILY questions of each family, but only one
    free-form question.

    Args:
        name: The seed of the document.
        kind: Its kind.
        low: The lower end of the range from which its length in ids is drawn.
        high: The upper end of that range.
        length: Counts the ids of a sentence.
    """
    rng = random.Random(name)
    whole = draw_document(rng, kind, rng.randint(low, high) - 3, length)
    asked = []
    counts = {}
    for question in rng.sample(whole.questions, len(whole.questions)):
        counts[question.family] = counts.get(question.family, 0) + 1
        if counts[question.family] <= (1 if question.family == "freeform" else MOST_PER_FAMILY):
            asked.append(question)
    return WorldDocument(whole.text, whole.kind, tuple(asked))
