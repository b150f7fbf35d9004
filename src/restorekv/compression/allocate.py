"""Which pairs stay, given scores and a count (Eq. 3: Evict(C, s, B) keeps exactly B).

Every allocation keeps exactly the count, for any scores; of equal scores the lower (layer, head,
position) wins, so that ties can neither miss the budget nor differ between devices. If a count does
not divide evenly, the first layers or heads get one more.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import floor
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from restorekv import spec
from restorekv.errors import BudgetError, RestoreKVError
from restorekv.files import read_json

# Scores processed at once. PyTorch's own selection would copy all of them and make as many indices.
SCORES_AT_ONCE = 1 << 22
RADIX = 1 << 16  # values of one digit; a 32-bit key has two digits
UNIFORM = "uniform"
ROUNDING = 1e-3  # how far the sum of a file's shares may be from 1


@dataclass(frozen=True)
class Allocation(ABC):
    """Which pairs compete with which."""

    name: ClassVar[str]
    # Whole tokens per head, so that every head keeps the same number.
    rectangular: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return spec.format_spec(self.name, self)

    @abstractmethod
    def __call__(self, scores: Tensor, pairs: int) -> Tensor:
        """Return a mask of the shape of scores (L, H, T) with exactly `pairs` set."""


@dataclass(frozen=True)
class Global(Allocation):
    """Ranks all layers and heads together, as KVzip and the paper do; a head may end up empty."""

    name: ClassVar[str] = "global"

    def __call__(self, scores: Tensor, pairs: int) -> Tensor:
        return mark_highest(scores, pairs)


GLOBAL = Global()


@dataclass(frozen=True)
class PerLayer(Allocation):
    """Ranks the heads of each layer together; layers keep the same number."""

    name: ClassVar[str] = "per-layer"

    def __call__(self, scores: Tensor, pairs: int) -> Tensor:
        # Whole numbers per layer; the first layers get one more if the count is not divisible.
        return mark_highest_of_each(scores, split_evenly(pairs, len(scores)))


@dataclass(frozen=True)
class PerHead(Allocation):
    """Ranks each head alone, as SnapKV and H2O were published; a rectangle when the count
    divides.
    """

    name: ClassVar[str] = "per-head"
    rectangular: ClassVar[bool] = True

    def __call__(self, scores: Tensor, pairs: int) -> Tensor:
        # (L * H, T): a row per head, in the order layer by layer.
        heads = scores.flatten(0, 1)
        return mark_highest_of_each(heads, split_evenly(pairs, len(heads))).view_as(scores)


@dataclass(frozen=True)
class AdaKV(Allocation):
    """Ada-KV (arXiv:2407.11550): ranks the heads of each layer together, but guarantees every head
    the share `safeguard` of what an even split would give it.
    """

    name: ClassVar[str] = "adakv"

    safeguard: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.safeguard <= 1:
            raise RestoreKVError(f"adakv's safeguard must be from 0 to 1, not {self.safeguard}.")

    def __call__(self, scores: Tensor, pairs: int) -> Tensor:
        counts = split_evenly(pairs, len(scores))
        return torch.stack(
            [self.mark_layer(layer, count) for layer, count in zip(scores, counts, strict=True)]
        )

    def mark_layer(self, scores: Tensor, pairs: int) -> Tensor:
        """Return a mask of a layer's scores (H, T): the best floor(safeguard * floor(pairs / H)) of
        each head, then the best of the rest of the layer.
        """
        # The decimal as it was written, so that 0.2 of 5 is 1 on every machine.
        safe = floor(Fraction(str(self.safeguard)) * (pairs // len(scores)))
        # The guaranteed part of each head first, then the layer's best among all other pairs.
        keep = mark_highest_of_each(scores, [safe] * len(scores))
        others = (~keep).nonzero(as_tuple=True)
        keep[others] = mark_highest(scores[others], pairs - safe * len(scores))
        return keep


@dataclass(frozen=True)
class HeadShares(Allocation):
    """Ranks each head alone and splits the pairs among heads by `shares` (L * H, layer by layer),
    or evenly without them, as Attention Matching does.

    `shares_file` is "uniform" or a file in the published form: one flat JSON object, {"L0H0":
    share, ...}, the shares of all heads adding up to 1. They depend neither on the context nor on
    the ratio.
    """

    name: ClassVar[str] = "heads"

    shares_file: str = UNIFORM
    shares: tuple[Fraction, ...] = ()

    @classmethod
    def of(cls, shares_file: str, layers: int, kv_heads: int) -> "HeadShares":
        """Make the allocation for "uniform" or a file, which must name exactly the heads of the
        model.
        """
        if shares_file == UNIFORM:
            return cls()
        shares = load_shares(shares_file)
        # The order of the flattened heads, so that shares can be zipped with them.
        names = [f"L{i}H{j}" for i, j in product(range(layers), range(kv_heads))]
        if shares.keys() != set(names):
            raise BudgetError(
                f"{shares_file} has shares for {len(shares)} heads, the model has {layers} x "
                f"{kv_heads}; give a file that was made for this model."
            )
        return cls(shares_file, tuple(shares[name] for name in names))

    @property
    def spec(self) -> str:
        """The file's name, which records hold."""
        return self.shares_file

    def __call__(self, scores: Tensor, pairs: int) -> Tensor:
        heads = scores.flatten(0, 1)
        # Without a file, every head has the same share.
        counts = split_by_shares(
            pairs, self.shares or (Fraction(1),) * len(heads), scores.shape[-1]
        )
        return mark_highest_of_each(heads, counts).view_as(scores)


# cli/choices.py repeats the names, so that the command line refuses others before PyTorch loads.
ALLOCATIONS: dict[str, type[Allocation]] = {
    "global": Global,
    "per-layer": PerLayer,
    "per-head": PerHead,
    "adakv": AdaKV,
}


def make_allocation(text: str) -> Allocation:
    """Make an allocation from its spec: "global", "adakv:safeguard=0.3"."""
    return spec.parse_spec(text, ALLOCATIONS, "allocation")


def split_evenly(pairs: int, parts: int) -> list[int]:
    """Split `pairs` as evenly as whole numbers allow, larger parts first."""
    whole, rest = divmod(pairs, parts)
    # True counts as 1: the first `rest` parts get one more.
    return [whole + (part < rest) for part in range(parts)]


def split_by_shares(pairs: int, shares: tuple[Fraction, ...], capacity: int) -> list[int]:
    """Split `pairs` among heads by their shares, rounded down; split the rest evenly, the first
    heads getting more.

    Args:
        pairs: How many there are in all.
        shares: The share of each head; they add up to nearly 1.
        capacity: How many pairs a head can take at most.
    """
    # Shares of a file add up to 1 only nearly; dividing by their sum makes the counts add up.
    whole = sum(shares)
    counts = [min(floor(share * pairs / whole), capacity) for share in shares]
    # A head cannot keep more than its T columns. What it cannot take, and what rounding down left
    # over, goes to the heads with room, evenly.
    while left := pairs - sum(counts):
        open_heads = [head for head, count in enumerate(counts) if count < capacity]
        parts = split_evenly(left, len(open_heads))
        for head, more in zip(open_heads, parts, strict=True):
            counts[head] = min(counts[head] + more, capacity)
    return counts


def load_shares(path: str) -> dict[str, Fraction]:
    """Return shares by the names of the heads; refuse whatever is not the published form."""
    shares = read_json(Path(path), f"The file of head budgets {path}")
    if not isinstance(shares, dict) or not _are_shares(list(shares.values())):
        raise BudgetError(
            f"{path} has no shares from 0 to 1 that add up to 1; give {{'L0H0': share, ...}}."
        )
    return {name: Fraction(value) for name, value in shares.items()}


def _are_shares(values: list[Any]) -> bool:
    """Return whether values of a file are numbers from 0 to 1 that add up to 1."""
    for value in values:
        if type(value) not in (int, float) or not 0 <= value <= 1:
            return False
    return abs(sum(values) - 1) <= ROUNDING


def mark_highest_of_each(rows: Tensor, counts: list[int]) -> Tensor:
    """Return a mask of the highest scores of each row (N, ...), as many as its count."""
    return torch.stack([mark_highest(row, count) for row, count in zip(rows, counts, strict=True)])


def mark_highest(scores: Tensor, pairs: int) -> Tensor:
    """Return a mask of the `pairs` highest scores, of any shape; ties go to the lower index."""
    flat = scores.reshape(-1)
    if not 0 <= pairs <= flat.numel():
        raise ValueError(f"cannot keep {pairs} of {flat.numel()} pairs")
    # NaN compares as false with everything, so the count would silently be wrong.
    if flat.isnan().any():
        raise RestoreKVError(
            "The scores are not numbers (NaN); load the model in bfloat16 or float32."
        )
    if pairs == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    # All above the n-th highest stay. Of those equal to it, the lower indices fill up the count.
    threshold = find_nth_highest(flat, pairs)
    keep = flat > threshold
    ties = (flat == threshold).nonzero().squeeze(-1)
    keep[ties[: pairs - int(keep.sum())]] = True
    return keep.view_as(scores)


def find_nth_highest(flat: Tensor, count: int) -> Tensor:
    """Return the `count`-th highest of values (N,) without NaN.

    Of many float32 values it is found by a radix search, which needs no copy of them.
    """
    # kthvalue copies its input. Above a few million values, two passes that tally digits need less
    # memory: 65,536 counters.
    if flat.numel() <= SCORES_AT_ONCE or flat.dtype != torch.float32:
        return flat.kthvalue(flat.numel() - count + 1).values

    # The key's upper 16 bits, then its lower 16 bits among the keys that share the upper ones.
    upper, rank = _find_nth_digit(_tally_digits(flat, _get_upper_digits), count)

    def get_lower_digits(keys: Tensor) -> Tensor:
        return keys[_get_upper_digits(keys) == upper] & (RADIX - 1)

    lower, _ = _find_nth_digit(_tally_digits(flat, get_lower_digits), rank)
    # `_get_upper_digits` has moved the signed digits up by half their range; move them back.
    key = (upper - RADIX // 2) * RADIX + lower
    bits = torch.tensor(key, dtype=torch.int32, device=flat.device)
    return _to_sortable(bits).view(torch.float32)


def _tally_digits(flat: Tensor, get_digits: Callable[[Tensor], Tensor]) -> Tensor:
    """Return how often every digit comes up (RADIX,).

    Args:
        flat: Float32 values (N,).
        get_digits: Returns the digits, 0 to RADIX - 1, of the sortable keys that count.
    """
    tally = torch.zeros(RADIX, dtype=torch.long, device=flat.device)
    # In parts, so that no copy of all scores exists.
    for part in flat.split(SCORES_AT_ONCE):
        keys = _to_sortable(part.view(torch.int32))
        tally += torch.bincount(get_digits(keys), minlength=RADIX)
    return tally


def _find_nth_digit(tally: Tensor, count: int) -> tuple[int, int]:
    """Return the digit of the `count`-th highest key, and that key's rank, from 1, among the keys
    with this digit.
    """
    # Summed from the highest digit down: the first sum that reaches the count is at the digit.
    sums = tally.flip(0).cumsum(0)
    steps_down = int(torch.searchsorted(sums, count))
    digit = RADIX - 1 - steps_down
    return digit, count - int(sums[steps_down] - tally[digit])


def _get_upper_digits(keys: Tensor) -> Tensor:
    """Return the upper 16 bits of signed keys, moved up so that the lowest is 0."""
    return (keys >> 16) + RADIX // 2


def _to_sortable(bits: Tensor) -> Tensor:
    """Turn the int32 bits of float32 values into keys that are ordered as the values are; its own
    inverse.
    """
    # Positive floats are ordered as their bits are; of negative ones all bits but the sign are
    # flipped.
    return bits ^ (bits >> 31 & 0x7FFFFFFF)
