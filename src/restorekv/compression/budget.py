"""How many KV pairs a compressed cache may hold (Eqs. 1, 3, 9): the one place that rounds.

    B = floor(r * T_b * L * H),    restore = n * L * H,    retained = B - restore

T_b is T under the prefix policy "free" (the chat prefix is kept and not counted) and S + T under
"counted" (it competes with the context). r is the exact decimal that the user wrote, so 0.1 of 30
tokens is 3.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil, floor
from typing import Literal

from restorekv.errors import BudgetError, warn

PrefixPolicy = Literal["free", "counted"]
OnSmallBudget = Literal["whole", "error", "fewer", "clip"]
ON_SMALL_BUDGET: tuple[str, ...] = ("whole", "error", "fewer", "clip")
PREFIX_POLICIES: tuple[str, ...] = ("free", "counted")
RATIO_LETTERS = 60  # a ratio in a text or a file is shorter
LARGEST_DENOMINATOR = 10**18  # of a ratio that would be longer


@dataclass(frozen=True)
class Budget:
    """B for one context and model, and the part of it that restore tokens take.

    `tokens` is T_b, the columns that compete for the budget; it is not always the T of
    `Context.text_tokens`. `restore_tokens` is the n in use; under on_small_budget="fewer" it may be
    lower than what was asked for.

    on_small_budget says what happens when B < n*L*H. "whole" keeps every pair, restores nothing,
    sets the ratio to 1 and warns; it does the same if B is less than one token per head. "error"
    refuses. "fewer" lowers n to what fits. "clip" keeps n, retains nothing and exceeds B, as
    kvpress does.

    `kept_whole` is True if "whole" kept every pair. `whole_tokens` rounds B down to whole tokens
    per head, for allocations that give every head the same number: B = floor(r * T_b) * L * H.
    """

    ratio: Fraction
    tokens: int
    layers: int
    heads: int
    restore_tokens: int = 0
    on_small_budget: OnSmallBudget = "error"
    whole_tokens: bool = False
    kept_whole: bool = False

    @classmethod
    def of_ratio(
        cls,
        ratio: float | str | Fraction,
        tokens: int,
        layers: int,
        heads: int,
        restore_tokens: int = 0,
        on_small_budget: OnSmallBudget = "error",
        whole_tokens: bool = False,
    ) -> "Budget":
        """Return the budget of a share of the T_b * L * H pairs."""
        if on_small_budget not in ON_SMALL_BUDGET:
            raise BudgetError(
                f"on_small_budget must be one of {', '.join(ON_SMALL_BUDGET)}, "
                f"not {on_small_budget!r}."
            )
        if tokens < 1:
            raise BudgetError("The context is empty; give at least one token to compress.")
        budget = cls(parse_ratio(ratio), tokens, layers, heads, 0, on_small_budget, whole_tokens)
        return budget.reserve(restore_tokens)

    @classmethod
    def of_tokens_per_head(
        cls,
        count: int,
        tokens: int,
        layers: int,
        heads: int,
        on_small_budget: OnSmallBudget = "error",
    ) -> "Budget":
        """Return the budget of an absolute number of pairs per head, on average: B = count * L *
        H.
        """
        if (
            isinstance(count, bool)
            or not isinstance(count, int | float)
            or count != count // 1
            or count < 1
        ):
            raise BudgetError(
                f"tokens_per_head must be a whole number of at least 1, not {count!r}."
            )
        if count > tokens:
            raise BudgetError(
                f"tokens_per_head={count} is more than the {tokens} tokens there are; lower it."
            )
        ratio = Fraction(int(count), tokens)
        return cls.of_ratio(ratio, tokens, layers, heads, on_small_budget=on_small_budget)

    def reserve(self, restore_tokens: int) -> "Budget":
        """Return this budget with room for n restore tokens, as `on_small_budget` says."""
        if self.kept_whole:
            return self  # nothing was lost, so there is nothing to restore
        room = self.ratio * self.tokens  # r * T_b, the pairs of an average head
        if self.on_small_budget == "whole" and max(restore_tokens, 1) > floor(room):
            warn(_explain_kept_whole(self.ratio, self.tokens, restore_tokens))
            return replace(self, ratio=Fraction(1), restore_tokens=0, kept_whole=True)
        if self.on_small_budget == "fewer":
            restore_tokens = min(restore_tokens, floor(room))
        if self.on_small_budget == "error" and restore_tokens > room:
            raise BudgetError(_explain_small_budget(self.ratio, self.tokens, restore_tokens))
        return replace(self, restore_tokens=restore_tokens)

    def require_at_most(self, restore_tokens: int) -> None:
        """Refuse a budget with room for more restore tokens than there are.

        Raises:
            BudgetError: The budget reserves more than `restore_tokens`.
        """
        if self.restore_tokens > restore_tokens:
            raise BudgetError(
                f"The budget reserves {self.restore_tokens} restore tokens, and there are "
                f"{restore_tokens}; prepare the context with an adapter that has them."
            )

    @property
    def total(self) -> int:
        """B, the pairs that the cache may hold."""
        if self.whole_tokens:
            return floor(self.ratio * self.tokens) * self.layers * self.heads
        # An exact fraction until here: this is the one place that rounds.
        return floor(self.ratio * self.tokens * self.layers * self.heads)

    @property
    def restore(self) -> int:
        """The pairs of the restore cache, n * L * H."""
        return self.restore_tokens * self.layers * self.heads

    @property
    def retained(self) -> int:
        """The pairs that the evictor may keep."""
        return max(self.total - self.restore, 0)

    @property
    def pairs(self) -> int:
        """The pairs that the cache will hold: B, unless "clip" lets the restore cache exceed it."""
        return self.retained + self.restore


def parse_ratio(ratio: float | str | Fraction) -> Fraction:
    """Return a ratio as the exact decimal that was written, not the nearest double: 0.1 -> 1/10.

    A fraction of so many digits that a cache file could not hold it is rounded.
    """
    text = str(ratio)[:RATIO_LETTERS]
    try:
        # Fraction takes seconds to expand numbers such as 1e999999, and reads 1_0 as 10.
        endless = len(text) == RATIO_LETTERS or re.search(r"_|e[-+]?\d{3}", text, re.IGNORECASE)
        if isinstance(ratio, Fraction):
            exact = ratio
        elif endless:
            exact = Fraction(0)
        else:
            exact = Fraction(text)
    except (ValueError, ZeroDivisionError):
        exact = Fraction(0)
    if len(str(exact)) >= RATIO_LETTERS:
        exact = exact.limit_denominator(LARGEST_DENOMINATOR)
    if not 0 < exact <= 1:
        hint = ""
        number = text
        percent = re.fullmatch(r"\s*(\d{1,2}(?:\.\d+)?)\s*%\s*", text)
        if percent:
            number = percent[1]
            exact = Fraction(number)
        if percent or 1 < exact <= 100:
            hint = f"; it is the share that stays, so write {float(exact / 100):g} for {number} %"
        elif re.fullmatch(r"\s*0?,\d+\s*", text):
            hint = f"; write 0.{text.strip().partition(',')[2]}, with a point"
        raise BudgetError(f"The ratio must be above 0 and at most 1, not {text.strip()}{hint}.")
    return exact


def _explain_kept_whole(ratio: Fraction, tokens: int, restore_tokens: int) -> str:
    """Return the warning about a text that is too short for its ratio and therefore kept whole."""
    wanted = "one token for each head"
    if restore_tokens:
        wanted = f"{restore_tokens} restore tokens"
    length = "1 token" if tokens == 1 else f"{tokens} tokens"
    return (
        f"A text of {length} is too short for ratio {float(ratio):g}, which has no room for "
        f"{wanted}: everything is kept, at ratio 1, and nothing is restored. What is appended "
        "later is kept whole, too."
    )


def _explain_small_budget(ratio: Fraction, tokens: int, restore_tokens: int) -> str:
    """Return the sentence about n restore tokens that do not fit, with the smallest ratio at which
    they would: r = n / T_b, rounded up.
    """
    if restore_tokens > tokens:
        return (
            f"{tokens} tokens compete for the budget, fewer than the {restore_tokens} restore "
            "tokens; give a longer context or no adapter."
        )
    smallest = ceil(Fraction(restore_tokens, tokens) * 10_000) / 10_000
    return (
        f"{restore_tokens} restore tokens do not fit into ratio {float(ratio):g} of {tokens} "
        f"tokens; the smallest workable ratio is {smallest:g} "
        "(or use fewer of them with on_small_budget='fewer', in the shell --on-small-budget fewer)."
    )
