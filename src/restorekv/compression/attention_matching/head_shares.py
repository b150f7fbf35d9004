"""A fixed number of pairs for every head, equal or in given shares: the budgets of Attention Matching.

Head budgets are published as one flat JSON object, {"L0H0": share, ...}, the shares of all L * H heads adding up to 1.
They depend neither on the context nor on the ratio.
"""

from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import floor
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from restorekv.compression.allocate import Allocation, even, top_of_each
from restorekv.errors import BudgetError
from restorekv.files import read_json

UNIFORM = "uniform"
ROUNDING = 1e-3  # by how much the shares of a file may miss 1


@dataclass(frozen=True)
class HeadShares(Allocation):
    """Ranks each head alone by `shares` (L * H), layers first, or equal ones; `heads` names their file or "uniform"."""

    name: ClassVar[str] = "heads"

    heads: str = UNIFORM
    shares: tuple[Fraction, ...] = ()

    @classmethod
    def of(cls, heads: str, layers: int, kv_heads: int) -> "HeadShares":
        """Makes the allocation for "uniform" or a file, which must name exactly the heads of the model."""
        if heads == UNIFORM:
            return cls()
        shares, names = read_shares(heads), [f"L{i}H{j}" for i, j in product(range(layers), range(kv_heads))]
        if shares.keys() != set(names):
            raise BudgetError(
                f"{heads} has shares for {len(shares)} heads, the model has {layers} x {kv_heads}; "
                "give a file that was made for this model."
            )
        return cls(heads, tuple(shares[name] for name in names))

    @property
    def spec(self) -> str:
        """The file's name, which records hold."""
        return self.heads

    def __call__(self, scores: Tensor, pairs: int) -> Tensor:
        heads = scores.flatten(0, 1)
        counts = share_out(pairs, self.shares or (Fraction(1),) * len(heads), scores.shape[-1])
        return top_of_each(heads, counts).view_as(scores)


def share_out(pairs: int, shares: tuple[Fraction, ...], most: int) -> list[int]:
    """Returns numbers up to `most` that add up to `pairs`: floors of the shares, the rest evenly, first heads first."""
    whole = sum(shares)
    counts = [min(floor(share * pairs / whole), most) for share in shares]
    while left := pairs - sum(counts):
        room = [head for head, count in enumerate(counts) if count < most]
        for head, more in zip(room, even(left, len(room), most * len(shares)), strict=True):
            counts[head] = min(counts[head] + more, most)
    return counts


def read_shares(path: str) -> dict[str, Fraction]:
    """Returns shares by the names of the heads; refuses whatever is not the published form."""
    shares = read_json(Path(path), f"The file of head budgets {path}")
    values = list(shares.values()) if isinstance(shares, dict) else [None]
    if not all(type(value) in (int, float) and 0 <= value <= 1 for value in values) or abs(sum(values) - 1) > ROUNDING:
        raise BudgetError(f"{path} has no shares from 0 to 1 that add up to 1; give {{'L0H0': share, ...}}.")
    return {name: Fraction(value) for name, value in shares.items()}
