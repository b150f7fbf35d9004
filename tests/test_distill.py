"""Eq. 8 against torch's own KL in float64."""

import torch
import torch.nn.functional as F

from restorekv.train.distill import answer_rows, symmetric_kl


def test_symmetric_kl_is_half_of_both_directions():
    torch.manual_seed(0)
    teacher, student = torch.randn(7, 50, dtype=torch.float64), torch.randn(7, 50, dtype=torch.float64)
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    both = F.kl_div(q, p, log_target=True, reduction="none") + F.kl_div(p, q, log_target=True, reduction="none")
    torch.testing.assert_close(symmetric_kl(teacher, student).double(), both.sum(-1) / 2, rtol=1e-5, atol=1e-6)


def test_equal_logits_cost_nothing_and_the_teacher_gets_no_gradient():
    logits = torch.randn(3, 20, requires_grad=True)
    assert torch.equal(symmetric_kl(logits, logits.detach()), torch.zeros(3))
    student = torch.randn(3, 20, requires_grad=True)
    symmetric_kl(logits, student).sum().backward()
    assert logits.grad is None and student.grad is not None


def test_the_last_question_token_predicts_the_first_answer_token():
    rows = answer_rows([(3, 2), (1, 4)], 6)
    assert rows.tolist() == [[False, False, True, True, False, False], [True, True, True, True, False, False]]
