"""KeyDiff (arXiv:2504.15364): the keys that differ most from all others carry the most.

    anchor = mean over i of k_i / ||k_i||          score_i = -cos(k_i, anchor)

for each KV head, with keys after RoPE, in float32; the mean is over the whole sequence, prefix
included. No settings. The same as KeyDiffPress of kvpress 0.5.5; unlike the paper, neither evicts
block by block during the prefill.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from restorekv.cache.dense import list_full_attention
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer


@dataclass(frozen=True)
class KeyDiff(Evictor):
    """Reads only the cached keys."""

    name: ClassVar[str] = "keydiff"

    @torch.no_grad()
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T) in [-1, 1]."""
        scores = []
        for layer in list_full_attention(full):
            differences = _measure_difference(layer.keys[0].float())
            scores.append(differences[:, context.prefix_length :])
        return torch.stack(scores)


def _measure_difference(keys: Tensor) -> Tensor:
    """Return minus the cosine of every key (H, K, D) with its head's anchor: (H, K)."""
    # The mean direction of a head's keys, prefix included, since the paper takes all keys.
    anchor = F.normalize(keys, dim=-1).mean(1, keepdim=True)
    return -F.cosine_similarity(keys, anchor, dim=-1)
