"""Evictors that learned their scores: a gate per layer reads the attention module's input while the prefill runs."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.evictors import gate_file
from restorekv.evictors.base import Evictor, pin
from restorekv.evictors.gate_file import Gate, Layer
from restorekv.model.observer import LayerProbe
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape

Predict = Callable[[Layer, Tensor], Tensor]


class GateScores:
    """`scores` (L, H, S + T) float32: what the gates say of every column, a chunk of the prefill at a time."""

    def __init__(self, model: PreTrainedModel, context: Context, gate: Gate, predict: Predict) -> None:
        shape = CacheShape.of(model)
        self.scores = torch.zeros(shape.layers, shape.heads, context.positions, device=model.device)
        self.gate, self.predict = gate, predict

    @torch.no_grad()
    def __call__(self, probe: LayerProbe) -> None:
        """One layer of one chunk: the last columns so far are its own."""
        end = probe.key.shape[1]
        start = end - probe.hidden.shape[0]
        self.scores[probe.layer, :, start:end] = self.predict(self.gate.layers[probe.layer], probe.hidden)


@dataclass(frozen=True)
class Gated(Evictor):
    """`gate` is a file, or "auto" for the one that ships with the bundled model. The scores cost no pass of their own.

    The prefill must run without adapters, as it does in `Eviction.prepare`: the gates were trained on such inputs.
    """

    kinds: ClassVar[tuple[str, ...]]  # that it reads, the preferred first

    gate: str = "auto"

    def load(self, model: PreTrainedModel) -> Gate:
        """The gate for `model`; raises GateError."""
        return gate_file.load(model, self.gate, self.kinds)

    def identity(self, model: PreTrainedModel) -> str:
        return replace(self, gate=self.load(model).digest).spec

    @staticmethod
    @abstractmethod
    def predict(layer: Layer, hidden: Tensor) -> Tensor:
        """hidden (..., T, d) -> scores (..., H, T) float32; leading axes, as the layers', are shared with `layer`'s."""

    @abstractmethod
    def kept(self, context: Context) -> Sequence[int]:
        """Columns of the context that always stay, the most needed last."""

    def latest(self, context: Context) -> int:
        kept = set(self.kept(context))
        return next((n for n in range(context.tokens) if context.tokens - 1 - n not in kept), context.tokens)

    def watch(self, model: PreTrainedModel, context: Context) -> GateScores:
        return GateScores(model, context, self.load(model), self.predict)

    def score(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        context: Context,
        full: DynamicCache,
        watched: GateScores | None = None,
    ) -> Tensor:
        """(L, H, T): what the gates said, the kept columns above all."""
        return pin(self.seen(watched).scores[..., context.prefix :], self.kept(context))


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden (..., T, d), weight (..., m, d), bias (..., m) -> (..., T, m), in the wider of both dtypes."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    if weight.ndim == 2:
        return F.linear(hidden, weight, None if bias is None else bias.to(dtype))
    result = hidden @ weight.mT
    return result if bias is None else result + bias.to(dtype).unsqueeze(-2)


def recent(context: Context, window: int) -> range:
    """The last `window` columns of the context; none if it is 0."""
    return range(max(context.tokens - window, 0), context.tokens)


def at_least_zero(evictor: Evictor, *names: str) -> None:
    """Refuses settings below 0."""
    for name in names:
        if getattr(evictor, name) < 0:
            raise RestoreKVError(f"{evictor.name} takes {name} >= 0, not {getattr(evictor, name)}.")
