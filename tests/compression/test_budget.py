"""The budget is exact: its integers compared with a definition in fractions, and refused values."""

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from restorekv.compression.budget import Budget, parse_ratio
from restorekv.errors import BudgetError, RestoreKVWarning


def test_a_tenth_of_thirty_is_three():
    assert Budget.of_ratio(0.1, 30, 1, 1).total == 3
    assert Budget.of_ratio(0.1, 30, 4, 2).total == 24


@given(
    st.decimals(min_value="0.001", max_value=1, places=3),
    st.integers(1, 5000),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(0, 16),
)
def test_counts_are_exact(ratio, tokens, layers, heads, n):
    """total <= r*T*L*H < total + 1 in exact arithmetic, and the parts add up."""
    wanted = Fraction(ratio) * tokens * layers * heads
    try:
        budget = Budget.of_ratio(float(ratio), tokens, layers, heads, n)
    except BudgetError:
        assert n * layers * heads > wanted
        return
    assert budget.total <= wanted < budget.total + 1
    assert budget.retained + budget.restore == budget.total == budget.pairs
    assert budget.restore == n * layers * heads and budget.retained >= 0


@given(st.integers(1, 500), st.integers(1, 500), st.integers(1, 12), st.integers(1, 8))
def test_tokens_per_head(count, tokens, layers, heads):
    if count > tokens:
        with pytest.raises(BudgetError):
            Budget.of_tokens_per_head(count, tokens, layers, heads)
    else:
        assert (
            Budget.of_tokens_per_head(count, tokens, layers, heads).total == count * layers * heads
        )


# Numbers that take minutes to compute, if anyone tried.
ENDLESS = ["1e2_0_000_000", "1e-20_000_000", "1e-999999999", "1" * 99, "0." + "1" * 99]


@pytest.mark.parametrize(
    "ratio", [0, 1.5, -0.1, float("nan"), float("inf"), "x", None, "1/0", "0.1_0", *ENDLESS]
)
def test_bad_ratios(ratio):
    with pytest.raises(BudgetError, match="above 0 and at most 1"):
        Budget.of_ratio(ratio, 100, 2, 2)


@pytest.mark.parametrize(
    "ratio",
    [Fraction(0.3) * Fraction(0.7), Fraction(10**99 - 1, 10**100), "0." + "3" * 40],
)
def test_a_ratio_of_many_digits_can_be_read_again(ratio):
    """Cache files hold the ratio as text; the rounding is far below one pair."""
    exact = parse_ratio(ratio)
    assert parse_ratio(str(exact)) == exact
    assert abs(exact - Fraction(ratio)) < Fraction(1, 10**18)


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_bad_token_counts(count):
    with pytest.raises(BudgetError, match="whole number"):
        Budget.of_tokens_per_head(count, 100, 2, 2)


def test_tight_budgets():
    with pytest.raises(BudgetError, match=r"smallest workable ratio is 0\.0157"):
        Budget.of_ratio(0.01, 512, 2, 2, 8)
    assert Budget.of_ratio(0.0157, 512, 2, 2, 8).retained >= 0
    with pytest.warns(RestoreKVWarning, match="512 tokens is too short for ratio 0.01"):
        whole = Budget.of_ratio(0.01, 512, 2, 2, 8, "whole")
    assert (whole.ratio, whole.restore_tokens, whole.pairs) == (1, 0, 512 * 4)
    assert whole.reserve(8) == whole
    with pytest.warns(RestoreKVWarning, match="no room for 60 restore tokens"):
        assert Budget.of_ratio(0.1, 512, 2, 2, 8, "whole").reserve(60) == whole
    assert Budget.of_ratio(0.0157, 512, 2, 2, 8, "whole").restore_tokens == 8
    fewer = Budget.of_ratio(0.01, 512, 2, 2, 8, "fewer")
    assert (fewer.restore_tokens, fewer.pairs) == (5, fewer.total)
    assert Budget.of_ratio(0.1, 512, 2, 2, 8, "fewer").restore_tokens == 8
    clip = Budget.of_ratio(0.01, 512, 2, 2, 8, "clip")
    assert (clip.restore_tokens, clip.retained, clip.pairs, clip.total) == (8, 0, 32, 20)


def test_a_text_without_a_whole_token_for_a_head_is_kept_whole():
    with pytest.warns(RestoreKVWarning, match="no room for one token for each head"):
        assert Budget.of_ratio("0.019", 50, 2, 2, 0, "whole").kept_whole
    one_token = Budget.of_ratio("0.02", 50, 2, 2, 0, "whole")
    assert (one_token.kept_whole, one_token.pairs) == (False, 4)
    assert Budget.of_ratio(1, 1, 2, 2).pairs == 4


def test_context_shorter_than_the_restore_tokens():
    with pytest.raises(BudgetError, match="fewer than the 8 restore tokens"):
        Budget.of_ratio(1, 5, 2, 2, 8)
    with pytest.raises(BudgetError, match="empty"):
        Budget.of_ratio(1, 0, 2, 2)
    with pytest.raises(BudgetError, match="on_small_budget"):
        Budget.of_ratio(1, 5, 2, 2, 1, "whatever")


@given(
    st.decimals(min_value="0.001", max_value=1, places=3), st.integers(1, 5000), st.integers(1, 16)
)
def test_whole_tokens_give_every_head_the_same(ratio, tokens, heads):
    budget = Budget.of_ratio(str(ratio), tokens, 3, heads, whole_tokens=True)
    assert budget.total == (Fraction(ratio) * tokens // 1) * 3 * heads
    assert 0 <= Budget.of_ratio(str(ratio), tokens, 3, heads).total - budget.total < 3 * heads


def test_whole_tokens_leave_no_room_for_a_part_of_a_restore_token():
    with pytest.raises(BudgetError, match=r"smallest workable ratio is 0\.04"):
        Budget.of_ratio("0.039", 100, 2, 2, 4, whole_tokens=True)
    assert Budget.of_ratio("0.04", 100, 2, 2, 4, whole_tokens=True).retained == 0


@pytest.mark.parametrize(
    ("ratio", "advice"), [("0,3", "write 0.3, with"), (",25", "write 0.25, with"), (30, "0.3 for")]
)
def test_a_ratio_in_another_notation_is_answered_with_the_right_one(ratio, advice):
    with pytest.raises(BudgetError, match=re.escape(advice)):
        parse_ratio(ratio)
