"""The full-cache teacher: its greedy answers and its logits on them (Eq. 7, left), computed once a context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache import RaggedCache
from restorekv.generate import answer_ids, stop_ids
from restorekv.models import decoder
from restorekv.prepared import Prepared
from restorekv.prompt import encode, question_ids
from restorekv.train.data import Example
from restorekv.train.distill import answer_rows


@dataclass(frozen=True)
class Lesson:
    """A question and the teacher's answer as ids, how many of them are the answer, and its logits (answer, V)."""

    ids: Tensor
    answer: int
    logits: Tensor


def answer_logits(model: PreTrainedModel, cache: RaggedCache, rows: list[Tensor], answers: list[int]) -> Tensor:
    """Logits that predict the answers, (sum of answers, V), for rows of question + answer ids over one shared cache."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows]).to(model.device)
    # Padding is to the right of every answer, so the causal mask alone keeps it unseen.
    hidden = decoder(model)(input_ids=ids, past_key_values=cache.fork(len(rows)), use_cache=True).last_hidden_state
    lengths = [(len(row) - answer, answer) for row, answer in zip(rows, answers, strict=True)]
    return model.lm_head(hidden[answer_rows(lengths, width).to(model.device)])


def teach(
    model: PreTrainedModel, tokenizer: Tokenizer, prepared: Prepared, example: Example, max_new_tokens: int
) -> list[Lesson]:
    """The teacher's lessons on every question of a context.

    A draft whose every id is the argmax of the teacher's logits *is* the greedy answer; the others are generated.
    """
    cache = prepared.at(1)
    asked = [question_ids(tokenizer, prepared.context, question)[0] for question in example.questions]
    answers = [None if draft is None else closed(model, tokenizer, encode(tokenizer, draft)[0].tolist(), max_new_tokens)
               for draft in example.drafts]  # fmt: skip
    drafted = [index for index, answer in enumerate(answers) if answer is not None]
    lessons = {
        index: lesson
        for index, lesson in zip(drafted, assess(model, cache, asked, answers, drafted), strict=True)
        if torch.equal(lesson.logits.argmax(-1).cpu(), answers[index])
    }
    others = [index for index in range(len(asked)) if index not in lessons]
    if others:
        written = answer_ids(model, tokenizer, cache, [asked[index] for index in others], max_new_tokens)
        for index, ids in zip(others, written, strict=True):
            answers[index] = ids
        lessons |= dict(zip(others, assess(model, cache, asked, answers, others), strict=True))
    return [lessons[index] for index in range(len(asked))]


def closed(model: PreTrainedModel, tokenizer: Tokenizer, ids: list[int], limit: int) -> Tensor:
    """A draft with the EOS id behind it, unless the limit cut it off."""
    return torch.tensor([*ids, min(stop_ids(model, tokenizer))][:limit])


def assess(
    model: PreTrainedModel, cache: RaggedCache, asked: list[Tensor], answers: list[Tensor | None], indices: list[int]
) -> list[Lesson]:
    """The teacher's logits on the answers of the questions named by `indices`."""
    if not indices:
        return []
    rows = [torch.cat([asked[index], answers[index]]) for index in indices]
    counts = [len(answers[index]) for index in indices]
    logits = answer_logits(model, cache, rows, counts).split(counts)
    return [Lesson(row, count, part.clone()) for row, count, part in zip(rows, counts, logits, strict=True)]
