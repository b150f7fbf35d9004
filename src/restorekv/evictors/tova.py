"""TOVA (arXiv:2401.06104): keeps what the last token attends to.

    score_i = mean over all H * G query heads of a layer of softmax_i(scale q_last k_i),

with the model's own scale, the same for every KV head of the layer; the softmax is over the whole
sequence, prefix included. The last token itself is always kept, as in TOVAPress of kvpress 0.5.5,
while in the paper its weight decides. No settings.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer
from restorekv.evictors.snapkv import SnapKV

# Reads the last token again, without pooling.
LAST = SnapKV(window=1, kernel=1, groups="mean")


@dataclass(frozen=True)
class TOVA(Evictor):
    """SnapKV with a window of one token, averaged over the KV heads too."""

    name: ClassVar[str] = "tova"

    def count_pinned_tail(self, context: Context) -> int:
        return LAST.count_pinned_tail(context)

    @torch.no_grad()
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T), at least 0."""
        # One value per column for all heads of a layer: the mean over its KV heads, repeated.
        weights = LAST.score(model, tokenizer, context, full)
        return weights.mean(1, keepdim=True).repeat(1, weights.shape[1], 1)
