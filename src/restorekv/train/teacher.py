"""The full-cache teacher: its greedy answers and what it thinks at them (Eq. 7, left), computed once a context.

Of its distributions the last hidden states are kept: the frozen LM head turns them into all logits again, exactly, and
they take a sixtieth of the place (width 2,560 against 151,936 ids). Of the 256 likeliest ids and the mass of the
others, the loss was 2 to 5 % too low on the bundled model (docs/LOG.md).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.generate import BATCH, answer_ids, stop_ids
from restorekv.compression.prepared import ScoredContext
from restorekv.model.load import logits
from restorekv.model.prompt import encode, question_ids
from restorekv.train.answers import States, answer_pass
from restorekv.train.example import Example


@dataclass(frozen=True)
class TeacherTarget:
    """A question and the teacher's answer as ids, how many of them are the answer (M), and the teacher's states there.

    hidden (M, d), from which the LM head makes its logits; states by name, (layers, M, d) each.
    """

    ids: Tensor
    answer: int
    hidden: Tensor
    states: States = field(default_factory=dict)


@dataclass(frozen=True)
class Teacher:
    """`watch` names the states of the layers that are kept."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    max_new_tokens: int
    watch: tuple[str, ...] = ()

    @torch.no_grad()
    def teach(self, prepared: ScoredContext, example: Example) -> list[TeacherTarget]:
        """A lesson on every question of a context.

        Answers that this teacher wrote before (`example.answer_ids`) are taken as they are. A draft whose every id is
        the argmax of the teacher's logits *is* the greedy answer; other answers are generated.
        """
        cache = prepared.evict(1)
        asked = [question_ids(self.tokenizer, prepared.context, text, empty=True)[0] for text in example.questions]
        if example.answer_ids is not None:
            answers = [torch.tensor(ids) for ids in example.answer_ids]
            return [lesson for lesson, _ in self.assess(cache, asked, answers, range(len(asked)))]
        stops = stop_ids(self.model, self.tokenizer)
        answers = [None if draft is None or not stops else self.closed(draft, min(stops)) for draft in example.drafts]
        drafted = [index for index, answer in enumerate(answers) if answer is not None]
        found = zip(drafted, self.assess(cache, asked, answers, drafted), strict=True)
        lessons = {index: lesson for index, (lesson, confirmed) in found if confirmed}
        others = [index for index in range(len(asked)) if index not in lessons]
        if others:
            prompts = [asked[index] for index in others]
            written = answer_ids(self.model, self.tokenizer, cache, prompts, self.max_new_tokens)
            for index, ids in zip(others, written, strict=True):
                answers[index] = ids
            lessons |= zip(others, (lesson for lesson, _ in self.assess(cache, asked, answers, others)), strict=True)
        return [lessons[index] for index in range(len(asked))]

    def closed(self, draft: str, stop: int) -> Tensor:
        """A draft's ids with an EOS id behind them, unless the limit cut it off."""
        return torch.tensor([*encode(self.tokenizer, draft)[0].tolist(), stop][: self.max_new_tokens])

    def assess(
        self, cache: RaggedCache, asked: list[Tensor], answers: list, indices
    ) -> list[tuple[TeacherTarget, bool]]:
        """The lessons on the questions named by `indices`, and whether the answer is the greedy one."""
        if len(indices) > BATCH:
            parts = [indices[start : start + BATCH] for start in range(0, len(indices), BATCH)]
            return [each for part in parts for each in self.assess(cache, asked, answers, part)]
        if not indices:
            return []
        rows = [torch.cat([asked[index], answers[index]]) for index in indices]
        counts = [len(answers[index]) for index in indices]
        seen = answer_pass(self.model, cache, rows, counts, self.watch)
        lessons, start, stops = [], 0, stop_ids(self.model, self.tokenizer)
        for row, count in zip(rows, counts, strict=True):
            part = slice(start, start := start + count)
            hidden = seen.hidden[part].clone()
            states = {name: value[:, part].clone() for name, value in seen.states.items()}
            found = logits(self.model, hidden).argmax(-1).cpu()
            if {int(found[-1]), int(row[-1])} <= stops:  # of several EOS ids the teacher's own
                row = torch.cat([row[:-1], found[-1:]])
            lessons.append((TeacherTarget(row, count, hidden, states), torch.equal(found, row[-count:])))
        return lessons
