"""L2-norm eviction (arXiv:2406.11430): keys of small norm are the ones that get attention.

score_i = -||k_i||_2 of the key after RoPE, in float32. No settings. The same as KnormPress of
kvpress 0.5.5.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from restorekv.cache.dense import list_full_attention
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer


@dataclass(frozen=True)
class Knorm(Evictor):
    """Reads only the cached keys."""

    name: ClassVar[str] = "knorm"

    @torch.no_grad()
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T), at most 0."""
        scores = []
        for layer in list_full_attention(full):
            keys = layer.keys[0, :, context.prefix_length :]
            # At least float32: bfloat16 has 8 bits, and neighbors would tie.
            precise = torch.promote_types(keys.dtype, torch.float32)
            scores.append(-torch.linalg.vector_norm(keys, dim=-1, dtype=precise).float())
        return torch.stack(scores)
