"""Evictors with learned scores: a gate per layer reads the attention module's input while the
prefill runs.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from restorekv.evictors import gate_file
from restorekv.evictors.base import Cache, Context, Evictor, Model, Tokenizer, pin_columns
from restorekv.evictors.gate_file import Gate, Layer
from restorekv.model.observer import LayerView
from restorekv.model.shape import CacheShape

Predict = Callable[[Layer, Tensor], Tensor]


class GateScores:
    """`scores` (L, H, S + T) float32: the gates' predictions for every column, filled chunk by
    chunk.
    """

    def __init__(self, model: Model, context: Context, gate: Gate, predict: Predict) -> None:
        shape = CacheShape.from_model(model)
        self.scores = torch.zeros(
            shape.layers, shape.heads, context.num_tokens, dtype=torch.float32, device=model.device
        )
        self.gate = gate
        self.predict = predict

    @torch.no_grad()
    def on_layer(self, view: LayerView) -> None:
        """Handle one layer of one chunk of the prefill, whose columns are the last so far."""
        assert view.hidden is not None
        # The chunk's rows are the last columns so far.
        end = view.key.shape[1]
        start = end - view.hidden.shape[0]
        self.scores[view.layer, :, start:end] = self.predict(
            self.gate.layers[view.layer], view.hidden
        )


@dataclass(frozen=True)
class Gated(Evictor):
    """`gate` is a file, or "auto" for the gate that ships for the model. Scores need no pass beyond
    the prefill.

    The prefill must run without adapters, as it does in `Eviction.prepare`: the gates were trained
    on such inputs.
    """

    kinds: ClassVar[tuple[str, ...]]  # of gates that it reads, the preferred one first

    gate: str = "auto"

    def load_gate(self, model: Model) -> Gate:
        """Return the gate for `model`; raise GateError."""
        return gate_file.load_gate(model, self.gate, self.kinds)

    def identity(self, model: Model) -> str:
        # A file is named by its contents: a gate of the same path may change.
        return replace(self, gate=self.load_gate(model).digest).spec

    @staticmethod
    @abstractmethod
    def predict(layer: Layer, hidden: Tensor) -> Tensor:
        """Return scores (..., H, T) float32 for hidden states (..., T, d); the tensors of `layer`
        have the same leading axes.
        """

    @abstractmethod
    def list_pinned_columns(self, context: Context) -> Sequence[int]:
        """Return the columns of the context that are always kept, the most important last."""

    def count_pinned_tail(self, context: Context) -> int:
        pinned = set(self.list_pinned_columns(context))
        count = 0
        # From the last column back, as far as columns are pinned without a gap.
        while count < context.text_tokens and context.text_tokens - 1 - count in pinned:
            count += 1
        return count

    def make_observer(self, model: Model, context: Context) -> GateScores:
        return GateScores(model, context, self.load_gate(model), self.predict)

    def score(
        self,
        model: Model,
        tokenizer: Tokenizer,
        context: Context,
        full: Cache,
        observer: Any = None,
    ) -> Tensor:
        """Return (L, H, T): the predictions, with the pinned columns above all others."""
        scores = observer.scores[..., context.prefix_length :]
        return pin_columns(scores, self.list_pinned_columns(context))


def apply_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return (..., T, m) for hidden (..., T, d), weight (..., m, d) and bias (..., m), in the wider
    of both dtypes.
    """
    # Gates are float32 and models may be bfloat16; the wider one loses nothing.
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    hidden = hidden.to(dtype)
    weight = weight.to(dtype)
    if bias is not None:
        bias = bias.to(dtype)
    if weight.ndim == 2:
        return F.linear(hidden, weight, bias)
    product = hidden @ weight.mT
    if bias is None:
        return product
    return product + bias.unsqueeze(-2)


def list_recent_columns(context: Context, window: int) -> range:
    """Return the last `window` columns of the context."""
    return range(max(context.text_tokens - window, 0), context.text_tokens)
