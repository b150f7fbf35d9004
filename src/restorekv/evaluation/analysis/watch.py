"""Attention weights over a ragged cache, passed to a callback while a pass runs.

The backend `frozen` computes the pass; the weights are those of its own blocks, in float64.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby

import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv.cache.ragged import RaggedLayer
from restorekv.model import attention
from restorekv.model.attention import frozen
from restorekv.model.attention.naive import causal
from restorekv.model.observer import LayerView, observe_layers

See = Callable[[int, RaggedLayer, Iterator[Tensor]], None]


@contextmanager
def watching(model: PreTrainedModel, see: See, last: int | None = None) -> Iterator[None]:
    """Calls see(layer index, layer, weights) for every ragged layer of every pass of batch 1 in the block.

    `weights` yields, for each of the H KV heads, (G, Q, N + t): a softmax over the head's N context pairs, in the order
    of the layer's rows, and the t pairs of the tail, the pass's own included. With `last`, of the last so many queries.
    """

    def on_layer(view: LayerView) -> None:
        query, layer, mask = view.query[None], view.ragged, view.mask
        if mask is None:
            mask = causal(query.shape[-2], layer.columns, query.device)[None, None]
        first = 0 if last is None else query.shape[-2] - last
        see(view.layer, layer, weights(query[..., first:, :], layer, mask[..., first:, :], view.scale))

    with attention.using("frozen"), observe_layers(model, on_layer):
        yield


def weights(query: Tensor, layer: RaggedLayer, mask: Tensor, scale: float) -> Iterator[Tensor]:
    """query (1, H, G, Q, D), mask (1, 1, Q, t) bool -> per head (G, Q, N + t) on the CPU."""
    exact = query.dtype if query.device.type == "mps" else torch.float64  # Apple's GPUs have no float64
    context = (layer.context_keys, layer.context_values, layer.bias)
    blocks = frozen.blocks(query.to(exact), layer.keys, layer.values, mask, *context, layer.bounds, scale)
    for _, found in groupby(blocks, key=lambda block: block[0]):
        yield torch.cat([block[-1][0] for block in found], 1).double().cpu()
