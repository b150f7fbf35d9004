"""L2-norm eviction (arXiv:2406.11430): keys of small norm are the ones that get attention.

score_i = -||k_i||_2 of the key after RoPE, in float32. No settings. The same as KnormPress of kvpress 0.5.5.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.evictors.base import Evictor
from restorekv.model.prompt import Context


@dataclass(frozen=True)
class Knorm(Evictor):
    """Reads the cached keys and nothing else."""

    name: ClassVar[str] = "knorm"

    @torch.no_grad()
    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, full: DynamicCache, watched: None = None
    ) -> Tensor:
        """(L, H, T), at most 0."""
        keys = (layer.keys[0, :, context.prefix :] for layer in full.layers)
        return torch.stack([-torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32) for key in keys])
