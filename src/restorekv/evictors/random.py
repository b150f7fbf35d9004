"""Random eviction, which every method must beat.

score_i is uniform in [0, 1), drawn on the CPU from `seed` and the context's ids: one context always
gets the same bits, on every device, and two contexts get independent ones. RandomPress of kvpress
0.5.5 has no seed by default and, given one, draws the same scores in every layer.
"""

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from restorekv.errors import RestoreKVError
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer
from restorekv.model.shape import CacheShape


@dataclass(frozen=True)
class Random(Evictor):
    """Does not touch PyTorch's own random state."""

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32:
            raise RestoreKVError(f"random takes a seed from 0 to 2**32 - 1, not {self.seed}.")

    @torch.no_grad()
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T) in [0, 1)."""
        shape = CacheShape.from_model(model)
        # The text itself is part of the seed: two texts get independent draws.
        seed = zlib.crc32(context.ids.cpu().numpy().tobytes(), self.seed)
        generator = torch.Generator().manual_seed(seed)
        # Drawn on the CPU, so that a device gives the same scores, and in one dtype, whatever
        # PyTorch's default is.
        size = shape.layers, shape.heads, context.text_tokens
        scores = torch.rand(size, generator=generator, dtype=torch.float32)
        return scores.to(model.device)
