"""Training sequences of the tiny model: one document, then blocks that attend only to the document
and to themselves.

Every block has the positions that it would have after compression, right after the document. So one
row of a batch teaches several questions and a reconstruction that do not see each other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from restorekv.tiny.suite import make_sentence_counter
from restorekv.tiny.world import WorldDocument, draw_document

# The parts of the loss.
ANSWER = 0
REPEAT = 1
CONTEXT = 2
KINDS = ("needles", "people", "links", "words", "mixed")


Mix = tuple[float, ...]  # how often each of KINDS is drawn


@dataclass
class Row:
    """One training sequence: for each id its position, its block (0: the document), and the part of
    the loss that predicting the *next* id counts for.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    part: list[int] = field(default_factory=list)  # part of predicting the next id; -1: none
    # Index of the question within the row; -1: none.
    family: list[int] = field(default_factory=list)
    families: list[str] = field(default_factory=list)

    def add(
        self, ids: list[int], start: int, block: int, part: list[int], family: int = -1
    ) -> None:
        """Append a run of ids at consecutive positions from `start`."""
        self.ids += ids
        self.positions += range(start, start + len(ids))
        self.block += [block] * len(ids)
        self.part += part
        self.family += [family] * len(ids)


class Sampler:
    """Draws rows from a seed: the same seed and step give the same batch."""

    def __init__(self, tokenizer, seed: str = "train"):
        self.tokenizer = tokenizer
        self.seed = seed
        self.prefix = self.encode("<|im_start|>user\n")
        self.suffix = self.encode("<|im_end|>\n<|im_start|>assistant\n")
        self.stop = self.encode("<|im_end|>")
        self.measure = make_sentence_counter(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def row(
        self, rng: random.Random, tokens: int, questions: int, noise: float, longest: int, mix: Mix
    ) -> Row:
        """Return a document of at most `tokens` ids with blocks at positions up to `longest`."""
        kind = rng.choices(KINDS, mix)[0]
        made = draw_document(rng, kind, tokens - len(self.prefix), self.measure, noise)
        ids = self.prefix + self.encode(made.text)
        row = Row()
        row.add(ids, 0, 0, [CONTEXT] * (len(ids) - 1) + [-1])
        if rng.random() < 0.5:
            self.spread(rng, row, max(longest - len(ids), 0))
        end = row.positions[-1] + 1 + rng.choice((0, 0, rng.randrange(17)))
        for number, question in enumerate(self.choose(rng, made, questions)):
            glue = rng.choice(("", "", "\n"))
            asked = self.encode(glue + question.text) + self.suffix
            answer = self.encode(" " + question.target) + self.stop
            part = [-1] * (len(asked) - 1) + [ANSWER] * len(answer) + [-1]
            row.add(asked + answer, end, number + 1, part, number)
            row.families.append(question.family)
        if rng.random() < 0.5:
            self.repeat(rng, row, ids[len(self.prefix) :], end, questions + 1, longest)
        return row

    def spread(self, rng: random.Random, row: Row, room: int) -> None:
        """Leave up to three gaps in the document's positions, so that short rows teach long
        distances.
        """
        shift = [0] * len(row.ids)
        for _ in range(rng.choice((1, 2, 3))):
            gap = rng.randrange(room // 3 + 1)
            place = rng.randrange(len(shift))
            shift = [value + gap * (index >= place) for index, value in enumerate(shift)]
        row.positions = [
            position + value for position, value in zip(row.positions, shift, strict=True)
        ]

    def repeat(
        self, rng: random.Random, row: Row, ids: list[int], end: int, block: int, longest: int
    ) -> None:
        """Append a reconstruction block, with one of the prompts that KVzip scores with."""
        length = min(len(ids), rng.choice((48, 96, 192)))
        if rng.random() < 0.7 or len(ids) < length + 16:
            start = 0
            asked = self.encode("\n\nRepeat the previous context exactly.")
        else:
            start = rng.randrange(8, len(ids) - length)
            asked = self.encode(
                "\n\nRepeat the part of the previous context exactly, starting with "
            )
            asked += ids[start - 8 : start]
        asked += self.suffix
        copied = ids[start : start + length]
        gap = rng.randrange(longest) if rng.random() < 0.3 else 0
        row.add(
            asked + copied,
            end + gap,
            block,
            [-1] * (len(asked) - 1) + [REPEAT] * len(copied) + [-1],
        )

    def choose(self, rng: random.Random, made: WorldDocument, count: int) -> list:
        """Return `count` questions about a document, with families drawn evenly."""
        by_family: dict[str, list] = {}
        for question in made.questions:
            by_family.setdefault(question.family, []).append(question)
        for questions in by_family.values():
            rng.shuffle(questions)
        chosen = []
        while by_family and len(chosen) < count:
            family = rng.choice(list(by_family))
            chosen.append(by_family[family].pop())
            if not by_family[family]:
                del by_family[family]
        return chosen

    def batch(
        self,
        step: int,
        rows: int,
        low: int,
        high: int,
        questions: int,
        noise: float,
        longest: int,
        mix: Mix,
    ) -> Batch:
        """Return the batch of `step`: `rows` rows of one length between `low` and `high`."""
        rng = random.Random(f"{self.seed} {step}")
        tokens = rng.randint(low, high)
        return collate_rows(
            [self.row(rng, tokens, questions, noise, longest, mix) for _ in range(rows)]
        )


@dataclass
class Batch:
    """Padded rows: ids, positions (B, N), mask (B, 1, N, N) bool, part and question number (B, N),
    family names.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    part: Tensor
    question: Tensor
    families: list[list[str]]


def collate_rows(rows: list[Row]) -> Batch:
    """Pad rows to the longest; each position attends to the document and its own block up
    to itself.
    """
    longest = max(len(row.ids) for row in rows)

    def padded(name: str, value: int) -> Tensor:
        return torch.tensor(
            [getattr(row, name) + [value] * (longest - len(row.ids)) for row in rows]
        )

    block = padded("block", -1)
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    same = block[:, :, None] == block[:, None, :]
    mask = causal & (same | (block[:, None, :] == 0))
    return Batch(
        padded("ids", 0),
        padded("positions", 0),
        mask[:, None],
        padded("part", -1),
        padded("family", -1),
        [row.families for row in rows],
    )
