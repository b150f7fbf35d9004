"""StreamingLLM (arXiv:2309.17453): keeps the first tokens, as attention sinks, and the most recent
ones.

score_i = i, the column, with the `sinks` first columns of the whole sequence above all others, the
first one highest; sinks in the chat prefix need no score. Sinks and budget are those of
StreamingLLMPress of kvpress 0.5.5, which scores 1 or 0 for one compression ratio; unlike in the
paper, keys keep their RoPE phase.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from restorekv.evictors.base import (
    Cache,
    Context,
    Evictor,
    Model,
    Tokenizer,
    check_not_negative,
    pin_columns,
)
from restorekv.model.shape import CacheShape


@dataclass(frozen=True)
class Streaming(Evictor):
    """Reads neither keys nor values: every head gets the same scores."""

    name: ClassVar[str] = "streaming"
    streams: ClassVar[bool] = False

    sinks: int = 4

    def __post_init__(self) -> None:
        check_not_negative(self, "sinks")

    @torch.no_grad()
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: None = None,
    ) -> Tensor:
        """Return (L, H, T), whole numbers."""
        shape = CacheShape.from_model(model)
        # The column itself is the score: later tokens rank higher.
        recency = torch.arange(
            context.prefix_length, context.num_tokens, dtype=torch.float32, device=model.device
        )
        scores = recency.repeat(shape.layers, shape.heads, 1)
        return pin_columns(scores, list_sink_columns(self.sinks, context))


def list_sink_columns(sinks: int, context: Context) -> range:
    """Return which of the T columns are among the sequence's first `sinks`, the first one last.

    That is the order of `pin_columns`, which then ranks the first column highest.
    """
    count = min(sinks - context.prefix_length, context.text_tokens)
    return range(count - 1, -1, -1)
