"""StreamingLLM (arXiv:2309.17453): the first tokens, as attention sinks, and then the most recent ones.

score_i = i, the column, with the `sinks` first columns of the whole sequence above all others, the first one highest;
those among them that belong to the chat prefix need no score. Sinks and budget are those of StreamingLLMPress of
kvpress 0.5.5, whose scores are 1 or 0 for one compression ratio; keys keep their RoPE phase, unlike in the paper.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.evictors.base import Evictor, pin
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape


@dataclass(frozen=True)
class Streaming(Evictor):
    """Looks at neither keys nor values: every head gets the same scores."""

    name: ClassVar[str] = "streaming"
    streams: ClassVar[bool] = False

    sinks: int = 4

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise RestoreKVError(f"streaming takes sinks >= 0, not {self.sinks}.")

    @torch.no_grad()
    def score(
        self, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, full: DynamicCache, watched: None = None
    ) -> Tensor:
        """(L, H, T) whole numbers."""
        shape = CacheShape.of(model)
        recency = torch.arange(context.prefix, context.positions, dtype=torch.float32, device=model.device)
        return pin(recency.repeat(shape.layers, shape.heads, 1), sink_columns(self.sinks, context))


def sink_columns(sinks: int, context: Context) -> range:
    """Which of the T columns are among the first `sinks` of the sequence; the first comes last: `pin` ranks it top."""
    return range(min(sinks - context.prefix, context.tokens) - 1, -1, -1)
