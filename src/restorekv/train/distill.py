"""The distillation loss (Eq. 8) and its variants: how far the student's answer tokens are from the teacher's."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from restorekv.model.load import logits

Direction = Literal["symmetric", "forward", "reverse"]
Reduction = Literal["mean", "sum"]
DIRECTIONS: tuple[str, ...] = ("symmetric", "forward", "reverse")
REDUCTIONS: tuple[str, ...] = ("mean", "sum")
LOGITS = 2**24  # logits (rows x vocabulary) that are held at a time: 64 MiB in float32


def divergence(teacher: Tensor, student: Tensor, kl: Direction = "symmetric") -> Tensor:
    """Logits (M, V) of teacher p (detached) and student q -> (M,) float32, in nats.

    symmetric: ½ (KL(p‖q) + KL(q‖p)) = ½ Σ (p - q)(log p - log q), which needs no entropy and is exactly 0 for equal
    logits; forward: KL(p‖q); reverse: KL(q‖p).
    """
    log_p = teacher.detach().float().log_softmax(-1)
    log_q = student.float().log_softmax(-1)
    if kl == "forward":
        weight = log_p.exp()
    elif kl == "reverse":
        weight = -log_q.exp()
    else:
        weight = 0.5 * (log_p.exp() - log_q.exp())
    return (weight * (log_p - log_q)).sum(-1)


def from_hidden(model: PreTrainedModel, teacher: Tensor, student: Tensor, kl: Direction = "symmetric") -> Tensor:
    """`divergence` of the model's logits for hidden states (M, d) -> (M,), a block of rows at a time.

    The logits of a block are made again for the backward pass: of a vocabulary of 150,000 ids, those of one answer
    would otherwise take several times M x 600 kB.
    """
    rows = max(LOGITS // model.config.get_text_config().vocab_size, 1)

    def block(own: Tensor, other: Tensor) -> Tensor:
        return divergence(logits(model, own), logits(model, other), kl)

    if len(student) <= rows:
        return block(teacher, student)
    pairs = zip(teacher.split(rows), student.split(rows), strict=True)
    return torch.cat([checkpoint(block, own, other, use_reentrant=False) for own, other in pairs])


def matching(teacher: Tensor, student: Tensor) -> Tensor:
    """How far the student's states (layers, M, d) are from the teacher's: (M,) float32.

    The squared distance over the teacher's squared length, averaged over the layers.
    """
    teacher, student = teacher.detach().float(), student.float()
    return ((student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp(min=1e-12)).mean(0)


def reduced(losses: Tensor, questions: int, reduction: Reduction) -> Tensor:
    """(M,) -> scalar. mean: over the answer tokens (Eq. 8); sum: over the tokens, mean over the questions.

    RestoreKV's public code sums (github.com/cvsp-lab/RestoreKV): long answers then weigh more.
    """
    return losses.mean() if reduction == "mean" else losses.sum() / questions


def answer_rows(lengths: list[tuple[int, int]], width: int) -> Tensor:
    """Which positions of padded rows predict an answer token: (rows, width) bool.

    `lengths` holds (question, answer) lengths; the last question token predicts the first answer token.
    """
    rows = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (question, answer) in zip(rows, lengths, strict=True):
        row[question - 1 : question - 1 + answer] = True
    return rows
