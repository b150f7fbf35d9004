"""Observers, which see the inputs of every attention layer while a forward pass runs.

Queries and keys come from the attention function itself, after QK-norm and RoPE, so nothing is
projected twice.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.cache.ragged import RaggedLayer
from restorekv.model.attention import get_observer, observe_attention
from restorekv.model.attention.sinks import group_sinks
from restorekv.model.shape import (
    find_attention,
    get_backbone,
    list_full_layers,
    list_pair_layers,
)


@dataclass(frozen=True)
class LayerView:
    """One layer in one pass of batch 1: Q query tokens over K keys, the last Q being their own.

    `layer` counts the layers that see the whole text: it is the row of the scores (L, H, T).
    hidden (Q, d) is the input of the attention module, after the input norm; query (H, G, Q, D) is
    after QK-norm and RoPE; key and value (H, K, D) are those of the tail if the layer is `ragged`;
    mask (1, 1, Q, K) or None = causal; sinks (H, G) are logits in every softmax, or None; cap is
    that on the logits (attention/caps.py), or None.

    A layer that shares the pairs of an earlier one (shape.py) has the `layer` of that one, and the
    same key and value.
    """

    layer: int
    module: nn.Module
    scale: float
    hidden: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    ragged: RaggedLayer | None = None
    mask: Tensor | None = None
    # The cosines and sines (1, Q, R) that the module was given, if it was given any.
    rotation: tuple[Tensor, Tensor] | None = None
    sinks: Tensor | None = None
    cap: float | None = None


OnLayer = Callable[[LayerView], Tensor | None]
HOOKS_LOCK = threading.Lock()  # PyTorch numbers hooks without locking


class Observer(Protocol):
    """An object that looks at every layer of a prefill.

    One that has `sees_sharing = True` is also shown the layers that share pairs of earlier ones.
    """

    def on_layer(self, view: LayerView) -> Tensor | None:
        """Look at a layer of a chunk; return None, or the attention output (Q, H * G, D) that
        replaces the layer's.
        """
        ...


@contextmanager
def observe_layers(
    model: PreTrainedModel, on_layer: OnLayer, sharing: bool = False
) -> Iterator[None]:
    """Call on_layer(LayerView) for every attention layer of every pass in the block, in order.

    Layers with a sliding window are left out: nothing of them is evicted.

    A tensor (Q, H * G, D) that `on_layer` returns replaces the output of attention, except in a
    ragged layer.

    Args:
        model: The model whose passes are observed.
        on_layer: What is called.
        sharing: Whether layers that share the pairs of an earlier layer (Gemma 3n, Gemma 4) are
            shown too, as further calls with that layer's number. Their queries are not those of
            the earlier layer.
    """
    # Hooks of attention modules put the layer's input here for the attention function, which
    # follows.
    inputs: list[Tensor] = []
    rotations: list[tuple[Tensor, Tensor] | None] = []
    rows = _list_rows(model, sharing)

    def before_layer(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> None:
        # Hooks see the passes of other threads too, whose observers may be active, and come without
        # kwargs while PyTorch is still registering them.
        if kwargs is not None and get_observer() is before_attention:
            inputs[:] = [kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]]
            rotation = kwargs.get("position_embeddings")
            # Llama 4 has complex numbers in one tensor.
            rotations[:] = [rotation if isinstance(rotation, tuple) else None]

    def before_attention(
        module: Any,
        query: Tensor,
        key: Any,  # AttentionInput, and so is `value`
        value: Any,
        mask: Tensor | None,
        scale: float,
        sinks: Tensor | None,
        cap: float | None,
    ) -> Tensor | None:
        # A layer with a window has no row of scores.
        if module.layer_idx not in rows:
            return None
        ragged = None
        # In a ragged layer transformers gets the layer instead of tensors; the tail has the pass's
        # pairs.
        if isinstance(key, RaggedLayer):
            ragged = key
            key, value = ragged.keys_and_values
        view = LayerView(
            layer=rows[module.layer_idx],
            module=module,
            scale=scale,
            hidden=inputs[0][0],
            # Query heads of one KV head lie next to each other.
            query=query[0].unflatten(0, (key.shape[1], -1)),
            key=key[0],
            value=value[0],
            ragged=ragged,
            mask=mask,
            rotation=rotations[0],
            sinks=group_sinks(sinks, key.shape[1]),
            cap=cap,
        )
        output = on_layer(view)
        return None if output is None else output[None]

    layers: Any = get_backbone(model).layers
    with HOOKS_LOCK:
        handles = [
            find_attention(layers[index]).register_forward_pre_hook(before_layer, with_kwargs=True)
            for index in rows
        ]
    try:
        with observe_attention(before_attention):
            yield
    finally:
        with HOOKS_LOCK:
            for handle in handles:
                handle.remove()


def _list_rows(model: PreTrainedModel, sharing: bool) -> dict[int, int]:
    """Return the row in the scores of every layer that is observed."""
    own = {index: row for row, index in enumerate(list_full_layers(model.config))}
    if not sharing:
        return own
    sources = enumerate(list_pair_layers(model.config))
    return {index: own[source] for index, source in sources if source in own}
