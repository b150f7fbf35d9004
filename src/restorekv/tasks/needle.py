"""Needle in a haystack: one sentence hidden at every depth of contexts of several lengths, for a
heat map.

Needle, question, answer and lengths are those of KVzip's evaluation (snu-mllab/KVzip 5d84729,
data/needle/data.py).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

from restorekv.errors import RestoreKVError
from restorekv.model.tokenize import tokenize_text
from restorekv.tasks import prose
from restorekv.tasks.base import Benchmark, Question, Sample, Tokenizer, separate_question
from restorekv.tasks.metrics import contains_text
from restorekv.tasks.rows import load_texts

NEEDLE = (
    "\nThe best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny "
    "day.\n"
)
QUESTION = "Based on the content of the book, the best thing to do in San Francisco is: "
ANSWER = "Eat a sandwich and sit in Dolores Park on a sunny day."
MAX_NEW_TOKENS = 32
PARAGRAPH = 6  # sentences of generated prose


@dataclass(frozen=True)
class Needle(Benchmark):
    """A sentence to find at several depths of contexts of several lengths.

    `lengths` count ids of the model's tokenizer, needle included; `depths` is the number of depths,
    which are spread evenly from 0 to 100 percent. The haystack is the text files of the folder
    `path` in the order of their names, or prose generated from `seed`.
    """

    name = "needle"
    title = "Needle in a haystack"
    metric = "the prediction contains the normalized answer (KVzip's)"

    lengths: str = "500+2000+8000"
    depths: int = 11
    path: str = ""

    def __post_init__(self) -> None:
        if not all(length.isdecimal() and int(length) for length in self.lengths.split("+")):
            raise RestoreKVError(
                f"lengths must be numbers of ids such as 500+2000, not {self.lengths!r}."
            )
        if self.depths < 2:
            raise RestoreKVError(
                f"depths must be at least 2, the beginning and the end, not {self.depths}."
            )

    def load_samples(self, tokenizer: Tokenizer, protocol: str) -> Iterator[Sample]:
        """Yield a sample for every length and depth: the same haystack, with the needle after a
        full stop.
        """
        lengths = sorted({int(length) for length in self.lengths.split("+")})
        needle = tokenize_text(tokenizer, NEEDLE)
        if lengths[0] <= len(needle):
            raise RestoreKVError(
                f"A length of {lengths[0]} ids has no room for the needle, which has {len(needle)}."
            )
        haystack = _take_ids(self._draw_parts(), tokenizer, lengths[-1])
        for length in lengths:
            # The haystack is one text; each length takes its beginning and puts the needle into it.
            hay = haystack[: length - len(needle)]
            for step in range(self.depths):
                depth = 100 * step / (self.depths - 1)
                index = len(hay)
                if depth < 100:
                    index = find_sentence_end(tokenizer, hay, int(len(hay) * depth / 100))
                ids = hay[:index] + needle + hay[index:]
                text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False)).strip()
                name = f"{length}-{depth:g}"
                task = f"needle_{length}"
                facts = {"length": length, "depth": depth}
                question = Question(
                    name,
                    task,
                    separate_question(QUESTION, protocol),
                    (ANSWER,),
                    MAX_NEW_TOKENS,
                    facts=facts,
                )
                yield Sample(name, text, (question,))

    def _draw_parts(self) -> Iterator[str]:
        """Yield the haystack in parts, without end."""
        if self.path:
            yield from cycle(load_texts(self.path))
        for number, sentence in enumerate(
            prose.draw_sentences(random.Random(f"needle {self.seed}")), 1
        ):
            yield sentence + ("\n\n" if number % PARAGRAPH == 0 else " ")

    def score(self, question: Question, prediction: str) -> float:
        return contains_text(prediction, question.answers[0])

    def describe_data(self) -> str:
        generated = f"generated prose (restorekv.tasks.prose), seed {self.seed}"
        if self.path:
            return f"text files of {self.path}, by name"
        return generated

    def describe_license(self) -> str:
        return "as the files" if self.path else "Apache-2.0"


def _take_ids(parts: Iterator[str], tokenizer: Tokenizer, size: int) -> list[int]:
    """Return at least `size` ids of the first parts, as many as are needed."""
    # Tokenized as one text, since a token may span two parts.
    text = ""
    expected = 0
    ids = []
    while len(ids) < size:
        # Parts are added until their ids, counted one by one, should be enough; then the whole is
        # tokenized.
        text += (part := next(parts))
        expected += len(tokenize_text(tokenizer, part))
        if expected >= size:
            ids = tokenize_text(tokenizer, text)  # fewer than expected if ids merge across parts
            expected = len(ids)
    return ids


def find_sentence_end(tokenizer: Tokenizer, ids: list[int], index: int) -> int:
    """Return the last index up to `index` that comes right after an id of a full stop, with or
    without spaces; 0 if there is none.
    """
    while index and str(tokenizer.decode([ids[index - 1]])).strip() != ".":
        index -= 1
    return index
