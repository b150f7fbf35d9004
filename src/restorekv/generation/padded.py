"""Greedy answers over full caches, many at a time, for teachers on a GPU.

Starting the kernels of a small model's step takes much longer than running them, whether the step
writes one answer or a hundred. So the contexts are padded on the left and prefilled together
into transformers' own cache, and all answers are written in steps of the whole batch. Nothing is
evicted here, so no ragged cache is needed.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.generation.decoding import get_stop_ids
from restorekv.generation.sampling import refuse_not_finite
from restorekv.model.cache_argument import pass_cache
from restorekv.model.prompt import Context
from restorekv.model.shape import compute_logits, get_backbone

# Positions of all rows of a batch together. SmolLM2 holds 45 kB for each in float32: 3.7 GB.
MOST_POSITIONS = 80_000


class AnswerWatch(Protocol):
    """An observer of an answer's tokens that may end the answer before its limit."""

    def add(self, token: int) -> None:
        """Take the next token."""
        ...

    def ends(self) -> bool:
        """Return whether the answer ends with its latest token."""
        ...


@torch.no_grad()
def generate_padded(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    contexts: Sequence[Context],
    prompts: Sequence[Tensor],
    limits: Sequence[int],
    watches: Sequence[AnswerWatch] | None = None,
    most_positions: int = MOST_POSITIONS,
) -> list[Tensor]:
    """Return the ids of the greedy answer to each prompt, with the EOS that ended it, if any.

    Args:
        model: A model without sliding-window layers, and without layers that keep states.
        tokenizer: Its tokenizer.
        contexts: The context of each prompt. If prompts share one object, it is prefilled once.
        prompts: The ids (q,) or (1, q) of each question.
        limits: How many tokens each answer may have.
        watches: What may end each answer earlier.
        most_positions: The most positions that the rows of a batch may have together.

    Raises:
        RestoreKVError: The model's logits are not finite.
    """
    answers: list[Tensor] = [torch.empty(0, dtype=torch.long)] * len(prompts)
    for rows in _split_rows(contexts, limits, most_positions):
        written = _write_batch(
            model,
            get_stop_ids(model, tokenizer),
            [contexts[row] for row in rows],
            [prompts[row].flatten().cpu() for row in rows],
            [limits[row] for row in rows],
            [watches[row] for row in rows] if watches else None,
        )
        for row, ids in zip(rows, written, strict=True):
            answers[row] = torch.tensor(ids, dtype=torch.long)
    return answers


def _split_rows(
    contexts: Sequence[Context], limits: Sequence[int], most_positions: int
) -> list[list[int]]:
    """Return the rows of every batch, sorted so that rows with similar limits and context lengths
    are together.
    """
    lengths = [context.ids.shape[-1] for context in contexts]
    order = sorted(range(len(contexts)), key=lambda row: (limits[row], lengths[row]))
    batches: list[list[int]] = []
    longest = 0
    for row in order:
        longest = max(longest, lengths[row])
        if not batches or (len(batches[-1]) + 1) * longest > most_positions:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return batches


def _write_batch(
    model: PreTrainedModel,
    stop_ids: set[int],
    contexts: Sequence[Context],
    prompts: Sequence[Tensor],
    limits: Sequence[int],
    watches: Sequence[AnswerWatch] | None,
) -> list[list[int]]:
    """Return the ids of the answers of one batch."""
    device = model.device
    backbone = get_backbone(model)
    # Every text is prefilled once; then each of its prompts gets a row of the cache.
    texts = list({id(context): context for context in contexts}.values())
    numbers = {id(context): number for number, context in enumerate(texts)}
    row_texts = torch.tensor([numbers[id(context)] for context in contexts])
    ids, read = _pad_left([context.ids.flatten().cpu() for context in texts])
    positions = (read.cumsum(-1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    backbone(
        input_ids=ids.to(device),
        attention_mask=read.to(device),
        position_ids=positions.to(device),
        use_cache=True,
        **pass_cache(backbone, cache),
    )
    cache.batch_select_indices(row_texts.to(device))

    ids, asked = _pad_left(prompts)
    lengths = read.sum(-1)[row_texts]
    positions = (lengths[:, None] + asked.cumsum(-1) - 1).clamp(min=0).to(device)
    mask = torch.cat([read[row_texts], asked], -1).to(device)
    ids = ids.to(device)
    answers: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(prompts)))
    while running:
        output = backbone(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **pass_cache(backbone, cache),
        )
        best = compute_logits(model, output.last_hidden_state[:, -1]).max(-1)
        if not bool(best.values.isfinite().all()):
            refuse_not_finite()
        for row, token in enumerate(best.indices.tolist()):
            # A row that has ended continues with the others, and its tokens are dropped.
            if row not in running:
                continue
            answers[row].append(token)
            ended = token in stop_ids or len(answers[row]) == limits[row]
            if watches is not None and not ended:
                watches[row].add(token)
                ended = watches[row].ends()
            if ended:
                running.remove(row)
        ids = best.indices[:, None]
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], -1)
    return answers


def _pad_left(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids (B, longest), padded on the left with 0, and a mask that is 0 at padding, else
    1.
    """
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return ids, mask
