"""H2O (arXiv:2306.14048), query-agnostic as in the paper's appendix: keeps what any token of the
context attends to.

    score_i = max over the causal queries j >= i of the prefill of softmax_i(q_j k_i / sqrt(D)).

The maximum is the appendix's; H2O itself takes the sum. Where the appendix says nothing there are
settings: `groups` reduces the query heads of a KV head ("max", as in the code that RestoreKV's
authors published, or "mean"), and with diagonal=false a token's attention to itself does not count.
The softmax is over every key that a query sees, prefix included, and the model's learned sinks, if
it has any. No window is kept.

Scores come from the weights that the prefill's own attention computes, in blocks of rows
(attention/blocked.py).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from restorekv.cache.tail import KeysValues
from restorekv.errors import RestoreKVError
from restorekv.evictors.attend import (
    REDUCTIONS,
    attend_pass,
    can_use_kernels,
    reduce_groups,
    triton_maxima,
)
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer
from restorekv.model.observer import LayerView
from restorekv.model.shape import CacheShape


class ColumnMaxima:
    """`best` (L, H, G, S + T) float32: the highest weight that each column has had so far.

    Where later layers attend to the same pairs (Gemma 3n, Gemma 4), their query heads count as if
    they were further queries of the layer's own heads.
    """

    sees_sharing = True

    def __init__(self, model: Model, context: Context, diagonal: bool) -> None:
        shape = CacheShape.from_model(model)
        self.best = torch.zeros(
            (shape.layers, shape.heads, shape.groups, context.num_tokens),
            dtype=torch.float32,
            device=model.device,
        )
        self.diagonal = diagonal

    @torch.no_grad()
    def on_layer(self, view: LayerView) -> Tensor:
        """Handle one layer of one chunk of the prefill; return the attention output (Q, H * G,
        D).
        """
        # Keys hold all columns so far, the last Q are this chunk's.
        before = view.key.shape[1] - view.query.shape[2]
        cached = view.key[:, :before], view.value[:, :before]
        own = view.key[:, before:], view.value[:, before:]
        if can_use_kernels(view.query, view.sinks, view.cap):
            return self._attend_with_kernels(view, own, cached)

        def get_pairs(head: int) -> KeysValues:
            return cached[0][head], cached[1][head]

        def on_weights(head: int, low: int, high: int, weights: Tensor) -> None:
            if not self.diagonal:
                # The weight of a token on itself lies on the diagonal that starts at its own
                # column.
                weights.diagonal(before + low, dim1=-2, dim2=-1).zero_()
            # A view: the maxima are written into the observer's tensor.
            best = self.best[view.layer, head, :, : before + high]
            torch.maximum(best, weights.amax(1), out=best)

        inside = [slice(0, before)]
        return attend_pass(
            view.query, own, get_pairs, view.scale, inside, on_weights, view.sinks, view.cap
        )

    def _attend_with_kernels(self, view: LayerView, own: KeysValues, cached: KeysValues) -> Tensor:
        """Do the same with the kernels of triton_maxima.py."""
        before = cached[0].shape[1]
        # With no sinks and a chunk that spans all cached columns, the softmax is over everything.
        output, lse = triton_maxima.attend_pass(
            view.query, own, cached, view.scale, sinks=0, start=0, end=before
        )
        of_cached = triton_maxima.find_maxima(view.query, cached[0], lse, view.scale)
        of_own = triton_maxima.find_maxima(
            view.query, own[0], lse, view.scale, own=True, diagonal=self.diagonal
        )
        best = self.best[view.layer, ..., : view.key.shape[1]]
        torch.maximum(best, torch.cat([of_cached, of_own], -1), out=best)
        return output


@dataclass(frozen=True)
class H2O(Evictor):
    """Needs 4 * L * H * G * T bytes during the prefill, for the maxima of every query head."""

    name: ClassVar[str] = "h2o"

    groups: str = "max"
    diagonal: bool = True

    def __post_init__(self) -> None:
        if self.groups not in REDUCTIONS:
            raise RestoreKVError(f"h2o takes groups=max|mean, not {self.groups}.")

    def make_observer(self, model: Model, context: Context) -> ColumnMaxima:
        return ColumnMaxima(model, context, self.diagonal)

    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: Any = None,
    ) -> Tensor:
        """Return (L, H, T) in [0, 1]."""
        best = observer.best[..., context.prefix_length :]
        return torch.stack([reduce_groups(layer, self.groups) for layer in best])
