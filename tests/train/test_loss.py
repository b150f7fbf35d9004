"""Eq. 8 and its variants against torch's own KL in float64."""

import pytest
import torch
import torch.nn.functional as F

from restorekv.train import loss as loss_module
from restorekv.train.loss import (
    compute_divergence,
    compute_hidden_divergence,
    compute_state_distance,
    mark_answer_positions,
    reduce_losses,
    weigh_answer_tokens,
)
from tests.helpers.models import build_model


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) of log-probabilities, by rows."""
    return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)


@pytest.mark.parametrize("direction", ["symmetric", "forward", "reverse"])
def test_divergences_are_torchs(direction):
    torch.manual_seed(0)
    teacher, student = (
        torch.randn(7, 50, dtype=torch.float64),
        torch.randn(7, 50, dtype=torch.float64),
    )
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    expected = {"forward": kl(p, q), "reverse": kl(q, p), "symmetric": (kl(p, q) + kl(q, p)) / 2}[
        direction
    ]
    torch.testing.assert_close(
        compute_divergence(teacher, student, direction).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_equal_logits_cost_nothing_and_the_teacher_gets_no_gradient():
    logits = torch.randn(3, 20, requires_grad=True)
    assert torch.equal(compute_divergence(logits, logits.detach()), torch.zeros(3))
    student = torch.randn(3, 20, requires_grad=True)
    compute_divergence(logits, student).sum().backward()
    assert logits.grad is None and student.grad is not None


def test_blocks_of_rows_give_the_same_loss_and_gradient(monkeypatch):
    torch.manual_seed(3)
    model = build_model("llama")
    head, width = model.lm_head, model.config.hidden_size
    teacher, hidden = torch.randn(11, width), torch.randn(11, width)
    expected = compute_divergence(head(teacher), head(hidden))
    found = []
    for logits in (2**24, model.config.vocab_size * 4):
        monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", logits)
        leaf = hidden.clone().requires_grad_(True)
        loss = compute_hidden_divergence(model, teacher, leaf)
        loss.sum().backward()
        torch.testing.assert_close(loss, expected)
        found.append(leaf.grad)
    torch.testing.assert_close(*found)


def test_matching_is_the_relative_squared_distance():
    teacher, student = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    student[1, 0] = 0.0
    assert compute_state_distance(teacher, student).tolist() == [0.5, 0.0, 0.0]


def test_sums_weigh_long_answers_more():
    losses = torch.tensor([1.0, 2.0, 3.0])
    assert reduce_losses(losses, 2, "mean") == 2.0 and reduce_losses(losses, 2, "sum") == 3.0


def test_the_last_question_token_predicts_the_first_answer_token():
    rows = mark_answer_positions([(3, 2), (1, 4)], 6)
    assert rows.tolist() == [
        [False, False, True, True, False, False],
        [True, True, True, True, False, False],
    ]


def test_the_first_tokens_of_every_answer_weigh_most():
    assert weigh_answer_tokens([2, 3], 0).equal(torch.ones(5))
    weights = weigh_answer_tokens([2, 3], 2.0)
    expected = torch.tensor([0, 1, 0, 1, 2]).div(-2.0).exp()
    torch.testing.assert_close(weights, expected * 5 / expected.sum())
