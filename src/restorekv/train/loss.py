"""The distillation loss (Eq. 8) and its variants, and the pass over given answers that it compares."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from restorekv.cache.ragged import RaggedCache
from restorekv.model.shape import compute_logits, get_backbone

Direction = Literal["symmetric", "forward", "reverse"]
Reduction = Literal["mean", "sum"]
DIRECTIONS = get_args(Direction)
REDUCTIONS = get_args(Reduction)
LOGITS_AT_ONCE = 2**24  # logits (rows x vocabulary) that are held at a time: 64 MiB in float32
# the output of a layer; of its attention
HIDDEN = "hidden"
ATTENTION = "attention"
States = dict[str, Tensor]  # (layers, M, d) each


def compute_divergence(teacher: Tensor, student: Tensor, kl: Direction = "symmetric") -> Tensor:
    """Logits (M, V) of teacher p (detached) and student q -> (M,) float32, in nats.

    symmetric: ½ (KL(p‖q) + KL(q‖p)) = ½ Σ (p - q)(log p - log q), which needs no entropy and is
    exactly 0 for equal logits; forward: KL(p‖q); reverse: KL(q‖p).
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


def compute_hidden_divergence(
    model: PreTrainedModel, teacher: Tensor, student: Tensor, kl: Direction = "symmetric"
) -> Tensor:
    """Return the `compute_divergence` of the model's logits for hidden states (M, d): (M,), a block of
    rows at a time.

    The backward pass recomputes the logits of a block: with a vocabulary of 150,000 ids, those of
    one answer would otherwise take several times M x 600 kB.
    """
    rows = max(LOGITS_AT_ONCE // model.config.get_text_config().vocab_size, 1)

    def block(own: Tensor, other: Tensor) -> Tensor:
        return compute_divergence(compute_logits(model, own), compute_logits(model, other), kl)

    if len(student) <= rows:
        return block(teacher, student)
    pairs = zip(teacher.split(rows), student.split(rows), strict=True)
    return torch.cat([checkpoint(block, own, other, use_reentrant=False) for own, other in pairs])


def compute_state_distance(teacher: Tensor, student: Tensor) -> Tensor:
    """States (layers, M, d) -> (M,) float32: squared distance over the teacher's squared length,
    mean over layers.
    """
    teacher = teacher.detach().float()
    student = student.float()
    return ((student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp(min=1e-12)).mean(
        0
    )


def reduce_losses(losses: Tensor, questions: int, reduction: Reduction) -> Tensor:
    """(M,) -> scalar. mean: over the answer tokens (Eq. 8); sum: over the tokens, mean over the
    questions.

    RestoreKV's public code sums (github.com/cvsp-lab/RestoreKV): long answers then weigh more.
    """
    return losses.mean() if reduction == "mean" else losses.sum() / questions


def mark_answer_positions(lengths: list[tuple[int, int]], width: int) -> Tensor:
    """Return which positions of padded rows predict an answer token: (rows, width) bool.

    `lengths` holds (question, answer) lengths; the last question token predicts the first answer
    token.
    """
    rows = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (question, answer) in zip(rows, lengths, strict=True):
        row[question - 1 : question - 1 + answer] = True
    return rows


@dataclass(frozen=True)
class AnswerPass:
    """The last hidden states (M, d) at the M positions that predict an answer token, and the
    recorded states.
    """

    hidden: Tensor
    states: States


def run_answers(
    model: PreTrainedModel,
    cache: RaggedCache,
    rows: list[Tensor],
    answers: list[int],
    record: tuple[str, ...] = (),
) -> AnswerPass:
    """Run ids of question + answer, `answers` of which are the answer, over a shared cache, with
    gradients to it.
    """
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows]).to(
        model.device
    )
    lengths = [(len(row) - answer, answer) for row, answer in zip(rows, answers, strict=True)]
    chosen = mark_answer_positions(lengths, width).to(model.device)
    with record_states(model, chosen, record) as states:
        # Padding is to the right of every answer, so the causal mask alone hides it.
        hidden = get_backbone(model)(
            input_ids=ids, past_key_values=cache.fork(len(rows)), use_cache=True
        ).last_hidden_state
    return AnswerPass(
        hidden[chosen], {name: torch.stack(layers) for name, layers in states.items()}
    )


def compute_answer_logits(
    model: PreTrainedModel, cache: RaggedCache, rows: list[Tensor], answers: list[int]
) -> Tensor:
    """Return the logits (M, V) that predict the answers."""
    return compute_logits(model, run_answers(model, cache, rows, answers).hidden)


@contextmanager
def record_states(
    model: PreTrainedModel, chosen: Tensor, names: tuple[str, ...]
) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the rows `chosen` (B, Q) of every layer's states `names`."""
    states: dict[str, list[Tensor]] = {name: [] for name in names}

    def collect(name: str):
        def hook(module: torch.nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
            states[name].append((output if isinstance(output, Tensor) else output[0])[chosen])

        return hook

    handles = [
        (layer if name == HIDDEN else layer.self_attn).register_forward_hook(collect(name))
        for layer in get_backbone(model).layers
        for name in names
    ]
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
