"""KVzap (arXiv:2601.07891): a linear layer or a small MLP per layer predicts the logarithm of
KVzip+'s scores.

    score_t = W x_t + b      or      W' gelu(W x_t + b) + b'

from the attention module's input x_t, for all KV heads at once. A fixed budget ranks these
logarithms over all layers and heads; as published, KVzap drops what is below a threshold instead.
Nothing is pinned by default, as in kvpress's KVzapPress; its DMSPress also keeps a sliding window,
here "kvzap:window=128". Projections run in the wider of the gate's and the model's dtype; the
result is float32.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from restorekv.evictors import gate_file
from restorekv.evictors.base import Context, Model, check_not_negative
from restorekv.evictors.gate_file import Gate, Layer
from restorekv.evictors.gated import Gated, apply_linear, list_recent_columns


@dataclass(frozen=True)
class KVzap(Gated):
    """A gate's file says which of both it is. gate=linear and gate=mlp name those that ship with
    the tiny model.

    `window` is a number of tokens.
    """

    name: ClassVar[str] = "kvzap"
    kinds: ClassVar[tuple[str, ...]] = ("kvzap-mlp", "kvzap-linear")

    window: int = 0

    def __post_init__(self) -> None:
        check_not_negative(self, "window")

    def load_gate(self, model: Model) -> Gate:
        # The two architectures have gates of their own; a name picks one of what ships.
        if self.gate in ("linear", "mlp"):
            return gate_file.load_gate(model, "auto", (f"kvzap-{self.gate}",))
        return super().load_gate(model)

    @staticmethod
    def predict(layer: Layer, hidden: Tensor) -> Tensor:
        """Return (..., H, T): logarithms, of any sign."""
        # The file's parameter names say which architecture it is.
        if "weight" in layer:
            return apply_linear(hidden, layer["weight"], layer["bias"]).float().mT
        inner = F.gelu(apply_linear(hidden, layer["0.weight"], layer["0.bias"]))
        return apply_linear(inner, layer["2.weight"], layer["2.bias"]).float().mT

    def list_pinned_columns(self, context: Context) -> range:
        return list_recent_columns(context, self.window)
