"""Random eviction: the floor that every method must beat.

score_i is uniform in [0, 1), drawn from `seed` and the context's ids on the CPU: one context always gets the same bits,
on every device, and two contexts never share their luck. RandomPress of kvpress 0.5.5 has no seed of its own and, given
one, draws the same scores in every layer.
"""

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.evictors.base import Evictor
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape


@dataclass(frozen=True)
class Random(Evictor):
    """Leaves PyTorch's own random state alone."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise RestoreKVError(f"random takes a seed from 0 to 2**32 - 1, not {self.seed}.")

    @torch.no_grad()
    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, full: DynamicCache, watched: None = None
    ) -> Tensor:
        """(L, H, T) in [0, 1)."""
        shape = CacheShape.of(model)
        drawn = zlib.crc32(context.ids.cpu().numpy().tobytes(), self.seed)
        generator = torch.Generator().manual_seed(drawn)
        return torch.rand(shape.layers, shape.heads, context.tokens, generator=generator).to(model.device)
