"""TOVA (arXiv:2401.06104): what the last token looks at.

    score_i = mean over all H * G query heads of a layer of softmax_i(q_last k_i / sqrt(D)),

the same for every KV head of the layer; the softmax runs over the whole sequence, prefix included. The last token
itself always stays, as in TOVAPress of kvpress 0.5.5; the paper leaves that to its weight. No settings.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.evictors.base import Evictor
from restorekv.evictors.snapkv import SnapKV
from restorekv.model.prompt import Context

LAST = SnapKV(window=1, kernel=1, groups="mean")  # reads the last token once more; the pool of one column is no pool


@dataclass(frozen=True)
class TOVA(Evictor):
    """SnapKV with a window of one token, averaged over the KV heads too."""

    name: ClassVar[str] = "tova"

    def latest(self, context: Context) -> int:
        return LAST.latest(context)

    @torch.no_grad()
    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, full: DynamicCache, watched: None = None
    ) -> Tensor:
        """(L, H, T), at least 0."""
        looked = LAST.score(model, tokenizer, context, full)
        return looked.mean(1, keepdim=True).repeat(1, looked.shape[1], 1)
