"""The distillation loss (Eq. 8), its variants, and the pass over given answers that it compares."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from restorekv.cache.ragged import RaggedCache
from restorekv.model.cache_argument import pass_cache
from restorekv.model.shape import compute_logits, get_backbone, list_attention_modules
from restorekv.train.config import HIDDEN, Direction, Reduction

# Logits (rows x vocabulary) that are held at a time: 64 MiB in float32.
LOGITS_AT_ONCE = 2**24
States = dict[str, Tensor]  # (layers, M, d) each


def compute_divergence(teacher: Tensor, student: Tensor, kl: Direction = "symmetric") -> Tensor:
    """Return the divergence of student q from teacher p, (M,) float32 in nats, by their logits
    (M, V).

    symmetric: ½ (KL(p‖q) + KL(q‖p)) = ½ Σ (p - q)(log p - log q), which needs no entropy and is
    exactly 0 for equal logits; forward: KL(p‖q); reverse: KL(q‖p).
    """
    # The teacher is fixed: no gradient goes into it.
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
    """Return the divergence (M,) of the model's logits for hidden states (M, d), a block of rows at
    a time.

    The backward pass recomputes the logits of a block: with a vocabulary of 150,000 ids, those of
    one answer would otherwise take several times M x 600 kB.
    """
    # As many rows of logits as fit into 64 MiB.
    rows = max(LOGITS_AT_ONCE // model.config.get_text_config().vocab_size, 1)

    def compute_block(teacher_rows: Tensor, student_rows: Tensor) -> Tensor:
        teacher_logits = compute_logits(model, teacher_rows)
        return compute_divergence(teacher_logits, compute_logits(model, student_rows), kl)

    # Short answers need no second computation of their logits.
    if len(student) <= rows:
        return compute_block(teacher, student)
    blocks = []
    for pair in zip(teacher.split(rows), student.split(rows), strict=True):
        blocks.append(checkpoint(compute_block, *pair, use_reentrant=False))
    return torch.cat(blocks)


def compute_state_distance(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the squared distance of states (layers, M, d) over the teacher's squared length, mean
    over layers: (M,) float32.
    """
    teacher = teacher.detach().float()
    student = student.float()
    distance = (student - teacher).square().sum(-1)
    # A teacher's state of length zero has no direction; the bound keeps the quotient finite.
    length = teacher.square().sum(-1).clamp(min=1e-12)
    return (distance / length).mean(0)


def weigh_answer_tokens(lengths: Sequence[int], decay: float) -> Tensor:
    """Return a weight for every answer token, (M,) float32 with mean 1, answer after answer.

    Token t of an answer weighs exp(-t / decay); if `decay` is 0, all tokens weigh the same. The
    first tokens decide what an answer is about; later ones are predicted after the teacher's own
    first tokens.
    """
    if not decay:
        return torch.ones(sum(lengths))
    weights = torch.cat([torch.exp(-torch.arange(length) / decay) for length in lengths])
    return weights / weights.mean()


def reduce_losses(losses: Tensor, questions: int, reduction: Reduction) -> Tensor:
    """Reduce losses (M,) to a scalar. mean: over the answer tokens (Eq. 8); sum: over the tokens of
    an answer, mean over the questions.

    RestoreKV's public code sums (github.com/cvsp-lab/RestoreKV): long answers then weigh more.
    """
    if reduction == "mean":
        return losses.mean()
    return losses.sum() / questions


def mark_answer_positions(lengths: list[tuple[int, int]], width: int) -> Tensor:
    """Return which positions of padded rows predict an answer token: (rows, width) bool.

    `lengths` holds (question, answer) lengths; the last question token predicts the first answer
    token.
    """
    rows = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (question, answer) in zip(rows, lengths, strict=True):
        # Position i predicts token i + 1: the last token of the question predicts the first one of
        # the answer.
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
    answer_lengths: list[int],
    record: tuple[str, ...] = (),
) -> AnswerPass:
    """Run questions with their answers over a shared cache, with gradients to it.

    Args:
        model: Teacher or student, which are the same model.
        cache: The cache that every row is read after; it is not changed.
        rows: Ids of question and answer.
        answer_lengths: How many of a row's ids are the answer.
        record: Names of the layers' states to record: HIDDEN, ATTENTION.
    """
    width = max(len(row) for row in rows)
    padded = [torch.nn.functional.pad(row, (0, width - len(row))) for row in rows]
    ids = torch.stack(padded).to(model.device)
    lengths = [
        # (question, answer) lengths of each row.
        (len(row) - answer, answer)
        for row, answer in zip(rows, answer_lengths, strict=True)
    ]
    chosen = mark_answer_positions(lengths, width).to(model.device)
    with record_states(model, chosen, record) as states:
        # Padding is to the right of every answer, so the causal mask alone hides it.
        backbone = get_backbone(model)
        output = backbone(
            input_ids=ids, **pass_cache(backbone, cache.fork(len(rows))), use_cache=True
        )
        hidden = output.last_hidden_state
    recorded = {name: torch.stack(layers) for name, layers in states.items()}
    return AnswerPass(hidden[chosen], recorded)


def compute_answer_logits(
    model: PreTrainedModel, cache: RaggedCache, rows: list[Tensor], answer_lengths: list[int]
) -> Tensor:
    """Return the logits (M, V) that predict the answers."""
    return compute_logits(model, run_answers(model, cache, rows, answer_lengths).hidden)


@contextmanager
def record_states(
    model: PreTrainedModel, chosen: Tensor, names: tuple[str, ...]
) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the rows `chosen` (B, Q) of every layer's states `names`."""
    states: dict[str, list[Tensor]] = {name: [] for name in names}

    def make_hook(name: str) -> Callable[..., None]:
        def record_output(module: torch.nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
            # An attention module returns its output with its weights, a layer may return a tuple.
            state = output if isinstance(output, Tensor) else output[0]
            # Gemma 3n's layers return several versions of a state (versions, B, Q, d), of which
            # their attention reads one.
            if state.ndim == 4:
                state = state[model.config.get_text_config().altup_active_idx]
            states[name].append(state[chosen])

        return record_output

    handles = []
    layers: Any = get_backbone(model).layers
    for name in names:
        for module in layers if name == HIDDEN else list_attention_modules(model):
            handles.append(module.register_forward_hook(make_hook(name)))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
