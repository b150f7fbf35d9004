"""ContrastKV (Chen et al., ACL 2026, 2026.acl-long.417): what a repetition attends to, against what
any text does.

Two signals of shape (L, H, T) are collected over the whole context, chunk after chunk, and then
fused. Both are KVzip's column maxima (rows and query heads of the pass; softmax over sinks, chunk
and the pass's own pairs):

    S+  of a pass that reconstructs the chunk,
    S-  of a pass of `noise` tokens drawn uniformly: columns that get attention whatever is read.

Head level, with quantiles of each signal over the T columns of one layer and head (linear between
neighbors):

    both at or above their (1 - beta)-quantile -> 1
    both at or below their beta-quantile       -> 0
    the rest is undecided

Layer level, for the undecided, with minima, maxima and ranks over the H * T pairs of one layer,
decided ones included:

    min(S+ + bump, max S+)

where `bump` is what distinguishes the two evictors. A pair that is both high and low, as when
nothing varies, gets 1. Noise comes from its own generator on the CPU, with new draws for every
chunk in order, so that a seed gives the same tokens on every device. It is drawn from the
tokenizer's vocabulary, special tokens included, without the rows that only pad the embedding table.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from restorekv.errors import RestoreKVError
from restorekv.evictors.base import Cache, Context, Model, Tokenizer
from restorekv.evictors.kvzip import KVzip, Repetition, make_repetitions

MOST_NOISE = 128  # tokens of a noise pass in the paper


@dataclass(frozen=True)
class ContrastKV(KVzip):
    """The definition of the ACL paper: S+ is KVzip's score, bump = gamma * (S- - min S-) / (max S-
    - min S-).

    The paper's `beta`, `gamma` and `noise` are not available to us: 0.10, 0.12 and 64 are those of
    `ContrastKVSimple` (the paper has at most 128 noise tokens). That the layer level normalizes
    over a whole layer is our reading of its name. If S- is equal everywhere in a layer there is no
    bump.
    """

    name: ClassVar[str] = "contrastkv"
    lowest: ClassVar[int] = 0  # the first id of the noise

    noise: int = 64
    seed: int = 0
    beta: float = 0.10
    gamma: float = 0.12

    # Checks chunk and sinks.
    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.noise <= MOST_NOISE or not 0 <= self.seed < 1 << 63:
            raise RestoreKVError(
                f"{self.name} takes noise from 1 to {MOST_NOISE} and seed from 0 to 2^63 - 1, "
                f"not {self.noise} and {self.seed}."
            )
        if not 0 <= self.beta <= 0.5 or not 0 <= self.gamma < float("inf"):
            raise RestoreKVError(
                f"{self.name} takes beta from 0 to 0.5 and a finite gamma >= 0, "
                f"not {self.beta} and {self.gamma}."
            )

    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T) after two passes over the full cache for every chunk."""
        positive, negative = self.collect_signals(model, tokenizer, context, full)
        return self.fuse_signals(positive, negative)

    def collect_signals(
        self, model: Model, tokenizer: Tokenizer, context: Context, full: Cache
    ) -> tuple[Tensor, Tensor]:
        """Return S+ and S-, (L, H, T) float32 each."""
        passes = self.make_passes(tokenizer, context)
        generator = torch.Generator().manual_seed(self.seed)
        embeddings: Any = model.get_input_embeddings()
        # Models pad their embedding tables; rows without a token were never trained.
        vocabulary = min(len(tokenizer), embeddings.num_embeddings)
        noise_passes = []
        for each in passes:
            # Drawn on the CPU, chunk by chunk, so that a seed means the same tokens on every
            # device.
            noise = torch.randint(self.lowest, vocabulary, (1, self.noise), generator=generator)
            noise_passes.append(replace(each, ids=noise))
        positive = self.collect_maxima(model, context, full, passes)
        negative = self.collect_maxima(model, context, full, noise_passes)
        return positive, negative

    def make_passes(self, tokenizer: Tokenizer, context: Context) -> list[Repetition]:
        """Return the reconstruction of every chunk."""
        return list(make_repetitions(tokenizer, context, self.chunk, self.space))

    def fuse_signals(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Return the scores for S+ and S-, all (L, H, T)."""
        # The layer level for all pairs; then the head level decides some of them.
        highest = positive.amax((1, 2), keepdim=True)
        scores = torch.minimum(positive + self.compute_bump(positive, negative), highest)
        # Quantiles of a head over its T columns, one pair for each signal.
        low_p, high_p = _compute_quantiles(positive, self.beta, 1 - self.beta)
        low_n, high_n = _compute_quantiles(negative, self.beta, 1 - self.beta)
        # The order matters where a pair is both low and high, as when a signal is constant: high
        # wins.
        scores = scores.masked_fill((positive <= low_p) & (negative <= low_n), 0.0)
        return scores.masked_fill((positive >= high_p) & (negative >= high_n), 1.0)

    def compute_bump(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Return (L, H, T) >= 0."""
        lowest = negative.amin((1, 2), keepdim=True)
        highest = negative.amax((1, 2), keepdim=True)
        # A constant signal has no span, and then no bump: 0 / tiny is 0.
        span = (highest - lowest).clamp_min(torch.finfo(negative.dtype).tiny)
        return self.gamma * (negative - lowest) / span


@dataclass(frozen=True)
class ContrastKVSimple(ContrastKV):
    """The simplification used for the ContrastKV rows of RestoreKV (arXiv:2608.01247;
    cvsp-lab/RestoreKV).

    S+ is of a pass that reads the chunk again without an instruction; noise has ids from 5 up; bump
    = gamma * (max S+ - min S+) * rank(S-) for pairs with S+ at or above its median in the layer and
    S- at or above its 0.8-quantile there, and 0 for the others. Our choices, where our description
    of that code is silent: the rank is the share of the layer's other pairs with a smaller S-, from
    0 to 1, so that ties get one low rank; the clip at max S+ and the precedence of the head level
    are the paper's; sinks are KVzip's.
    """

    name: ClassVar[str] = "contrastkv-simple"
    lowest: ClassVar[int] = 5

    chunk: int = 2000

    def make_passes(self, tokenizer: Tokenizer, context: Context) -> list[Repetition]:
        """Return every chunk unchanged."""
        passes = []
        for start in range(context.prefix_length, context.num_tokens, self.chunk):
            end = min(start + self.chunk, context.num_tokens)
            passes.append(Repetition(context.ids[:, start:end], start, end))
        return passes

    def compute_bump(self, positive: Tensor, negative: Tensor) -> Tensor:
        """Return (L, H, T) >= 0."""
        # Flat over a layer's pairs: (L, H * T).
        flat_positive = positive.flatten(1)
        flat_negative = negative.flatten(1)
        (median,) = _compute_quantiles(flat_positive, 0.5)
        (top,) = _compute_quantiles(flat_negative, 0.8)
        smaller = torch.searchsorted(flat_negative.sort(-1).values, flat_negative)
        rank = smaller / max(flat_negative.shape[-1] - 1, 1)
        span = flat_positive.amax(-1, keepdim=True) - flat_positive.amin(-1, keepdim=True)
        is_lifted = (flat_positive >= median) & (flat_negative >= top)
        bump = self.gamma * span * rank * is_lifted
        return bump.view_as(positive)


def _compute_quantiles(values: Tensor, *levels: float) -> list[Tensor]:
    """Return quantiles along the last axis, which keeps length 1; linear between neighbors.

    Indices are computed in double precision: torch.quantile is off by whole elements on long axes.
    """
    ordered = values.sort(-1).values
    last = values.shape[-1] - 1
    quantiles = []
    for level in levels:
        low = int(level * last)
        high = min(low + 1, last)
        quantiles.append(ordered[..., [low]].lerp(ordered[..., [high]], level * last - low))
    return quantiles
