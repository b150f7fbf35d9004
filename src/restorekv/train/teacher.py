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
from restorekv.train.examples import TrainingContext
from restorekv.train.loss import States, run_answers


@dataclass(frozen=True)
class TeacherTarget:
    """What the student shall predict for one question.

    Args:
        ids: question and the teacher's answer.
        answer_length: how many of the ids are the answer (M).
        hidden: (M, d), the teacher's last hidden states, from which the LM head makes its logits.
        states: by name, (layers, M, d) each.
    """

    ids: Tensor
    answer_length: int
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
    def make_targets(
        self, prepared: ScoredContext, example: TrainingContext
    ) -> list[TeacherTarget]:
        """Return a target for every question of a context.

        Answers that this teacher wrote before (`example.answer_ids`) are taken as they are. A draft
        whose every id is the argmax of the teacher's logits *is* the greedy answer; other answers
        are generated.
        """
        cache = prepared.evict(1)
        asked = []
        for text in example.questions:
            asked.append(encode_question(self.tokenizer, prepared.context, text, empty=True)[0])
        if example.answer_ids is not None:
            answers = [torch.tensor(ids) for ids in example.answer_ids]
            return [target for target, _ in self._assess_answers(cache, asked, answers)]

        # Drafts that turn out to be the teacher's own greedy answers.
        drafts = self._close_drafts(example.drafts)
        drafted = sorted(drafts)
        assessed = self._assess_answers(
            cache, [asked[index] for index in drafted], [drafts[index] for index in drafted]
        )
        targets = {}
        for index, (target, is_greedy) in zip(drafted, assessed, strict=True):
            if is_greedy:
                targets[index] = target

        # The teacher writes the other answers itself.
        others = [index for index in range(len(asked)) if index not in targets]
        if others:
            prompts = [asked[index] for index in others]
            answers = generate_ids(self.model, self.tokenizer, cache, prompts, self.max_new_tokens)
            assessed = self._assess_answers(cache, prompts, answers)
            for index, (target, _) in zip(others, assessed, strict=True):
                targets[index] = target
        return [targets[index] for index in range(len(asked))]

    def _close_drafts(self, drafts: Sequence[str | None]) -> dict[int, Tensor]:
        """Return the ids of each draft and an EOS id, cut off at the limit, by the draft's index.

        A model without an EOS id ends no answer, so none of its drafts can be complete.
        """
        stops = get_stop_ids(self.model, self.tokenizer)
        closed: dict[int, Tensor] = {}
        if not stops:
            return closed
        for index, draft in enumerate(drafts):
            if draft is not None:
                ids = [*encode_text(self.tokenizer, draft)[0].tolist(), min(stops)]
                closed[index] = torch.tensor(ids[: self.max_new_tokens])
        return closed

    def _assess_answers(
        self, cache: RaggedCache, asked: Sequence[Tensor], answers: Sequence[Tensor]
    ) -> list[tuple[TeacherTarget, bool]]:
        """Return the target of each question, and whether its answer is the greedy one."""
        targets = []
        stops = get_stop_ids(self.model, self.tokenizer)
        for first in range(0, len(asked), BATCH):
            batch = range(first, min(first + BATCH, len(asked)))
            rows = [torch.cat([asked[index], answers[index]]) for index in batch]
            counts = [len(answers[index]) for index in batch]
            output = run_answers(self.model, cache, rows, counts, self.record)
            start = 0
            for row, count in zip(rows, counts, strict=True):
                part = slice(start, start + count)
                start += count
                hidden = output.hidden[part].clone()
                states = {name: value[:, part].clone() for name, value in output.states.items()}
                best = compute_logits(self.model, hidden).argmax(-1).cpu()
                if {int(best[-1]), int(row[-1])} <= stops:
                    # Of several EOS ids, the one that the teacher itself would take.
                    row = torch.cat([row[:-1], best[-1:]])
                is_greedy = torch.equal(best, row[-count:])
                targets.append((TeacherTarget(row, count, hidden, states), is_greedy))
        return targets
