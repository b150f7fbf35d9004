"""The distillation loss (Eq. 8): symmetric KL between teacher and student, averaged over the answer's tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def symmetric_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """½ (KL(p‖q) + KL(q‖p)) for logits (M, V) of teacher p (detached) and student q -> (M,) float32, in nats.

    Both directions together are ½ Σ (p - q)(log p - log q), so no entropy is computed and equal logits give exactly 0.
    """
    log_p = teacher.detach().float().log_softmax(-1)
    log_q = student.float().log_softmax(-1)
    return 0.5 * ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(-1)


def answer_rows(lengths: list[tuple[int, int]], width: int) -> Tensor:
    """Which positions of padded rows predict an answer token: (rows, width) bool.

    `lengths` holds (question, answer) lengths; the last question token predicts the first answer token.
    """
    rows = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (question, answer) in zip(rows, lengths, strict=True):
        row[question - 1 : question - 1 + answer] = True
    return rows
