"""Eq. 8 and its variants against torch's own KL in float64."""

import pytest
import torch
import torch.nn.functional as F

from restorekv.train import loss as loss_module
from restorekv.train.config import ATTENTION, HIDDEN
from restorekv.train.loss import (
    compute_divergence,
    compute_hidden_divergence,
    compute_state_distance,
    mark_answer_positions,
    record_states,
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


def test_a_distance_in_16_bits_is_that_of_float32_and_teaches_the_student_alone():
    generator = torch.Generator().manual_seed(0)
    teacher, student = (
        torch.randn(2, 3, 64, generator=generator).bfloat16().requires_grad_() for _ in range(2)
    )
    found = compute_state_distance(teacher, student)
    distance = (student.double() - teacher.double()).square().sum(-1)
    exact = (distance / teacher.double().square().sum(-1)).mean(0)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
    found.sum().backward()
    assert teacher.grad is None and student.grad is not None
    # A state without length costs a finite number.
    assert compute_state_distance(torch.zeros(1, 1, 2), torch.ones(1, 1, 2)).isfinite().all()


def test_recorded_states_are_those_of_layers_and_their_attention(tiny_model):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 290, (2, 9), generator=generator)
    chosen = mark_answer_positions([(5, 4), (3, 2)], 9)
    outputs = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda _m, _a, output: outputs.append(output[0]))
        for layer in tiny_model.model.layers
    ]
    with torch.no_grad(), record_states(tiny_model, chosen, (HIDDEN, ATTENTION)) as states:
        whole = tiny_model(ids, output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    assert len(states[HIDDEN]) == len(states[ATTENTION]) == len(outputs) == len(whole) - 1
    # The last of transformers' is after the final norm.
    for found, wanted in zip(states[HIDDEN][:-1], whole[1:-1], strict=True):
        assert found.equal(wanted[chosen])
    assert tiny_model.model.norm(states[HIDDEN][-1]).equal(whole[-1][chosen])
    for found, wanted in zip(states[ATTENTION], outputs, strict=True):
        assert found.equal(wanted[chosen])


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
