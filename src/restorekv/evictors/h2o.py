"""H2O (arXiv:2306.14048), query-agnostic as in the paper's appendix: the most that any token of the context looks.

    score_i = max over the causal queries j >= i of the prefill of softmax_i(q_j k_i / sqrt(D)).

The maximum, not H2O's sum, is the appendix's. It is silent on the rest, so it is a setting: `groups` reduces the query
heads of a KV head ("max", as in the code RestoreKV's authors published, or "mean"), and with diagonal=false a token's
look at itself does not count. The softmax runs over every key a query sees, prefix included. No window is kept.

Scored while the prefill runs, from the weights that its own attention makes anyway, in blocks of rows
(attention/blocked.py): the T x T matrix never exists.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.evictors.attend import REDUCTIONS, on_gpu, over_groups, triton_maxima
from restorekv.evictors.base import Evictor
from restorekv.model.attention import blocked
from restorekv.model.observer import LayerProbe
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape


class ColumnMaxima:
    """`best` (L, H, G, S + T) float32: the highest weight each column has had so far."""

    def __init__(self, model: PreTrainedModel, context: Context, diagonal: bool) -> None:
        shape = CacheShape.of(model)
        self.best = torch.zeros(shape.layers, shape.heads, shape.groups, context.positions, device=model.device)
        self.diagonal = diagonal

    @torch.no_grad()
    def __call__(self, probe: LayerProbe) -> Tensor:
        """One layer of one chunk of the prefill: what attention gives, (Q, H * G, D)."""
        before = probe.key.shape[1] - probe.query.shape[2]
        held, own = zip(*((x[:, :before], x[:, before:]) for x in (probe.key, probe.value)), strict=True)
        if on_gpu(probe.query):
            output, lse = triton_maxima.attend(probe.query, own, held, probe.scale, 0, 0, before)
            found = [
                triton_maxima.highest(probe.query, held[0], lse, probe.scale),
                triton_maxima.highest(probe.query, own[0], lse, probe.scale, own=True, diagonal=self.diagonal),
            ]
            best = self.best[probe.layer, ..., : probe.key.shape[1]]
            torch.maximum(best, torch.cat(found, -1), out=best)
            return output

        def see(head: int, low: int, high: int, weights: Tensor) -> None:
            if not self.diagonal:
                weights.diagonal(before + low, dim1=-2, dim2=-1).zero_()
            best = self.best[probe.layer, head, :, : before + high]
            torch.maximum(best, weights.amax(1), out=best)

        inside = [slice(0, before)]
        return blocked.attend(probe.query, own, lambda head: tuple(x[head] for x in held), probe.scale, inside, see)


@dataclass(frozen=True)
class H2O(Evictor):
    """Maxima are held for each query head until the prefill is done: 4 * L * H * G * T bytes."""

    name: ClassVar[str] = "h2o"

    groups: str = "max"
    diagonal: bool = True

    def __post_init__(self) -> None:
        if self.groups not in REDUCTIONS:
            raise RestoreKVError(f"h2o takes groups=max|mean, not {self.groups}.")

    def watch(self, model: PreTrainedModel, context: Context) -> ColumnMaxima:
        return ColumnMaxima(model, context, self.diagonal)

    def score(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        context: Context,
        full: DynamicCache,
        watched: ColumnMaxima | None = None,
    ) -> Tensor:
        """(L, H, T) in [0, 1]."""
        best = self.seen(watched).best[..., context.prefix :]
        return torch.stack([over_groups(layer, self.groups) for layer in best])
