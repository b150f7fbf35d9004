"""Expected attention (arXiv:2510.00636): what later queries will attend to, if they are Gaussian.

Before RoPE a head's queries have mean m and covariance C, over all columns but the first `sinks`.
With R the average rotation over the next `future` positions S+T ... (of a model that rotates
differently beyond its limit, those up to there: no question can stand behind it), and softmax_i
over the same columns (prefix included),

    a_i = softmax_i(scale k_i R m + scale^2 k_i R C R^T k_i / 2)
    score_i = (mean over G of a_i + epsilon) ||v_i||

The first `sinks` columns are always kept. A model's learned sinks, whose logits no query changes,
are in the softmax too. covariance=false drops the second term, values=false epsilon and ||v_i||.
As kvpress 0.5.5.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from restorekv.cache.dense import list_full_attention
from restorekv.errors import RestoreKVError
from restorekv.evictors.base import (
    Cache,
    Context,
    Evictor,
    Model,
    Tokenizer,
    pin_columns,
)
from restorekv.evictors.query_moments import QueryMoments, compute_expected_weights
from restorekv.evictors.streaming import list_sink_columns
from restorekv.model.support import get_support, refuse_scoring_beyond


@dataclass(frozen=True)
class ExpectedAttention(Evictor):
    """Collects L * H * G * D * D floats of covariance during the prefill."""

    name: ClassVar[str] = "expected-attention"

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    values: bool = True
    epsilon: float = 0.0

    def __post_init__(self) -> None:
        if (
            self.sinks < 0
            or not 1 <= self.future <= 1 << 20
            or not 0 <= self.epsilon < float("inf")
        ):
            raise RestoreKVError(
                f"{self.name} takes sinks and epsilon >= 0 and future from 1 to 2**20, not {self}."
            )

    def for_later_part(self, context: Context) -> Self:
        # Sinks are outside every part's softmax.
        return replace(self, sinks=min(self.sinks, context.prefix_length))

    def make_observer(self, model: Model, context: Context) -> QueryMoments:
        return QueryMoments(model, self.sinks)

    @torch.no_grad()
    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: Any = None,
    ) -> Tensor:
        """Return (L, H, T), at least 0."""
        start = full.get_seq_length()
        refuse_scoring_beyond(model, start + 1)
        limits = get_support(model)
        future = self.future
        if limits.changes_keys:
            future = min(future, limits.positions - start)
        scores = torch.zeros(
            *observer.mean.shape[:2], context.num_tokens, dtype=torch.float32, device=model.device
        )
        for index, layer in enumerate(list_full_attention(full)):
            # (H, S + T - sinks, D): the sinks get no score here, they are pinned below.
            keys = layer.keys[0, :, self.sinks :].float()
            mean, covariance = observer.predict_moments(model, index, start, future)
            # covariance=false makes the second term zero instead of skipping it.
            weights = compute_expected_weights(
                keys,
                mean,
                covariance * self.covariance,
                observer.scales[index],
                observer.sinks[index],
            )
            if self.values:
                # epsilon > 0 lets a long value count even where hardly any query looks.
                values = layer.values[0, :, self.sinks :].float()
                weights = (weights + self.epsilon) * values.norm(dim=-1)
            scores[index, :, self.sinks :] = weights
        return pin_columns(
            scores[..., context.prefix_length :], list_sink_columns(self.sinks, context)
        )
