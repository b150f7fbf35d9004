"""The full-cache teacher: its greedy answers and what it predicts at them (Eq. 7, left), computed
once per context.

Its distributions are kept as last hidden states: the frozen LM head turns them into all logits
again, exactly, and they are sixty times smaller (2,560 numbers instead of 151,936). With the 256
likeliest ids and the mass of the others, the loss was 2 to 5 % too low on the tiny model
(paper/log.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.full_cache import ScoredContext
from restorekv.generation.decoding import BATCH, generate_ids, get_stop_ids
from restorekv.model.prompt import encode_question, encode_text
from restorekv.model.shape import compute_logits
from restorekv.train.examples import Example
from restorekv.train.loss import States, run_answers


@dataclass(frozen=True)
class TeacherTarget:
    """What the student shall predict for one question.

    ids: question and the teacher's answer; answer: how many of them are the answer (M); hidden (M,
    d): the teacher's last hidden states, from which the LM head makes its logits; states by name,
    (layers, M, d) each.
    """

    ids: Tensor
    answer: int
    hidden: Tensor
    states: States = field(default_factory=dict)


@dataclass(frozen=True)
class Teacher:
    """`record` names the states of the layers that are kept."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    max_new_tokens: int
    record: tuple[str, ...] = ()

    @torch.no_grad()
    def make_targets(self, prepared: ScoredContext, example: Example) -> list[TeacherTarget]:
        """Return a target for every question of a context.

        Answers that this teacher wrote before (`example.answer_ids`) are taken as they are. A draft
        whose every id is the argmax of the teacher's logits *is* the greedy answer; other answers
        are generated.
        """
        cache = prepared.evict(1)
        asked = [
            encode_question(self.tokenizer, prepared.context, text, empty=True)[0]
            for text in example.questions
        ]
        if example.answer_ids is not None:
            answers = [torch.tensor(ids) for ids in example.answer_ids]
            return [
                target
                for target, _ in self._assess_answers(cache, asked, answers, range(len(asked)))
            ]
        stops = get_stop_ids(self.model, self.tokenizer)
        answers = [
            None if draft is None or not stops else self._close_draft(draft, min(stops))
            for draft in example.drafts
        ]
        drafted = [index for index, answer in enumerate(answers) if answer is not None]
        assessed = zip(drafted, self._assess_answers(cache, asked, answers, drafted), strict=True)
        targets = {index: target for index, (target, greedy) in assessed if greedy}
        others = [index for index in range(len(asked)) if index not in targets]
        if others:
            prompts = [asked[index] for index in others]
            written = generate_ids(self.model, self.tokenizer, cache, prompts, self.max_new_tokens)
            for index, ids in zip(others, written, strict=True):
                answers[index] = ids
            targets |= zip(
                others,
                (target for target, _ in self._assess_answers(cache, asked, answers, others)),
                strict=True,
            )
        return [targets[index] for index in range(len(asked))]

    def _close_draft(self, draft: str, stop: int) -> Tensor:
        """Return a draft's ids and an EOS id, cut off at the limit."""
        return torch.tensor(
            [*encode_text(self.tokenizer, draft)[0].tolist(), stop][: self.max_new_tokens]
        )

    def _assess_answers(
        self,
        cache: RaggedCache,
        asked: list[Tensor],
        answers: list[Tensor | None],
        indices: Sequence[int],
    ) -> list[tuple[TeacherTarget, bool]]:
        """Return the targets of the questions `indices`, and whether each answer is the greedy
        one.
        """
        targets = []
        stops = get_stop_ids(self.model, self.tokenizer)
        for first in range(0, len(indices), BATCH):
            batch = indices[first : first + BATCH]
            rows = [torch.cat([asked[index], answers[index]]) for index in batch]
            counts = [len(answers[index]) for index in batch]
            output = run_answers(self.model, cache, rows, counts, self.record)
            start = 0
            for row, count in zip(rows, counts, strict=True):
                part = slice(start, start := start + count)
                hidden = output.hidden[part].clone()
                states = {name: value[:, part].clone() for name, value in output.states.items()}
                best = compute_logits(self.model, hidden).argmax(-1).cpu()
                if {int(best[-1]), int(row[-1])} <= stops:  # of several EOS ids the teacher's own
                    row = torch.cat([row[:-1], best[-1:]])
                targets.append(
                    (TeacherTarget(row, count, hidden, states), torch.equal(best, row[-count:]))
                )
        return targets
