"""What every attention layer saw in a forward pass, handed to an observer while the pass runs.

Queries and keys come from the attention function itself, after QK-norm and RoPE, so nothing is projected twice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.model.attention import observing
from restorekv.model.shape import decoder


@dataclass(frozen=True)
class LayerProbe:
    """One layer in one pass of batch 1: Q query tokens over K keys, the last Q of which are their own.

    hidden (Q, d) is the input of the attention module, after the input norm; query (H, G, Q, D) is after QK-norm
    and RoPE; key and value (H, K, D), in a ragged cache those of its tail.
    """

    layer: int
    module: nn.Module
    scale: float
    hidden: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


@contextmanager
def probing(model: PreTrainedModel, see: Callable[[LayerProbe], Tensor | None]) -> Iterator[None]:
    """Calls see(LayerProbe) for every attention layer of every pass inside the block, in the order of the layers.

    Where it returns a tensor (Q, H * G, D), this is what attention gives, unless the layer is ragged.
    """
    inputs: list[Tensor] = []

    def remember(module: nn.Module, args: tuple, kwargs: dict[str, object]) -> None:
        inputs[:] = [kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]]

    def notice(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        grouped = query[0].unflatten(0, (key.shape[1], -1))
        found = see(LayerProbe(module.layer_idx, module, scale, inputs[0][0], grouped, key[0], value[0]))
        return found if found is None else found[None]

    handles = [layer.self_attn.register_forward_pre_hook(remember, with_kwargs=True) for layer in decoder(model).layers]
    try:
        with observing(notice):
            yield
    finally:
        for handle in handles:
            handle.remove()
