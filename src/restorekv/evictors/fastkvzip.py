"""Fast KVzip (arXiv:2601.17668): a small gate per layer predicts KVzip's scores from the attention
module's input.

With query and key of R dimensions from the same token's input x (after the input norm), both
normalized (RMS), and s learned sink keys c_hs, token t competes with the sinks alone:

    l = <k_th, q_thg> / sqrt(R) + b_hg      l_s = <c_hs, q_thg> / sqrt(R)
    score_th = mean over g of  exp(l) / (exp(l) + sum_s exp(l_s)).

Projections run in the wider of the gate's and the model's dtype, the rest in float32. The first
four columns and the last ones are always kept. As in kvpress 0.5.5, columns include the chat prefix
and the window is 2 % of them, or 4,096 from 32,000 on. Two differences: below 50 columns the window
is empty (kvpress keeps one; older versions, by mistake, all), and the authors' own code,
"fastkvzip:long=16000,sinks=0", counts the text alone.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from restorekv.errors import RestoreKVError
from restorekv.evictors.base import Context, check_not_negative
from restorekv.evictors.gate_file import Layer
from restorekv.evictors.gated import Gated, apply_linear, list_recent_columns

EPSILON = 1e-6  # of the RMS norms


@dataclass(frozen=True)
class FastKVzip(Gated):
    """`window` is a share of S + T; contexts of at least `long` columns keep `cap` instead; `sinks`
    counts from 0.
    """

    name: ClassVar[str] = "fastkvzip"
    kinds: ClassVar[tuple[str, ...]] = ("fastkvzip",)

    window: float = 0.02
    cap: int = 4096
    long: int = 32000
    sinks: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.window <= 1:
            raise RestoreKVError(
                "fastkvzip takes a window from 0 to 1, a share of the context, "
                f"not {self.window:g}."
            )
        check_not_negative(self, "cap", "long", "sinks")

    @staticmethod
    def predict(layer: Layer, hidden: Tensor) -> Tensor:
        """Return (..., H, T) in (0, 1)."""
        # The published gates have k_base (H, 1, s, R): R is the gate's rank, s the number of its
        # learned sink keys.
        sink_keys = layer["k_base"].float().squeeze(-3)  # (..., H, s, R)
        heads, _, rank = sink_keys.shape[-3:]
        query = apply_linear(hidden, layer["q_proj.weight"], layer["q_proj.bias"])
        # Each KV head has G queries of rank R.
        query = query.unflatten(-1, (heads, -1, rank))
        query = _normalize_rms(query, layer["q_norm.weight"]).transpose(-4, -3)  # (..., H, T, G, R)
        key = apply_linear(hidden, layer["k_proj.weight"]).unflatten(-1, (heads, 1, rank))
        key = _normalize_rms(key, layer["k_norm.weight"]).transpose(-4, -3)  # (..., H, T, 1, R)
        own = (query * key).sum(-1) / math.sqrt(rank) + layer["b"].float()  # (..., H, T, G)
        # The learned sinks compete with the token's own logit in a softmax of which only the own
        # weight counts.
        sinks = (query.flatten(-3, -2) @ sink_keys.mT / math.sqrt(rank)).logsumexp(-1)
        # exp(l) / (exp(l) + sum_s exp(l_s)) is a sigmoid of the difference of logarithms.
        return torch.sigmoid(own - sinks.view_as(own)).mean(-1)

    def for_later_part(self, context: Context) -> Self:
        # Later parts of a text have no attention sinks.
        return replace(self, sinks=0)

    def list_pinned_columns(self, context: Context) -> list[int]:
        """Return the sinks, then the window, the most recent last."""
        columns = context.num_tokens
        # A share of short contexts, a fixed number of tokens for long ones.
        length = self.cap
        if columns < self.long:
            length = int(columns * self.window)
        window = list_recent_columns(context, length)
        # Sinks count from the start of the prefix.
        sinks = min(max(self.sinks - context.prefix_length, 0), window.start)
        return [*range(sinks), *window]


def _normalize_rms(values: Tensor, weight: Tensor) -> Tensor:
    """Divide values (..., T, H, G, R) by their RMS and multiply by weight (..., R), in float32."""
    values = values.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + EPSILON)
    return values * weight.float()[..., None, None, None, :]
