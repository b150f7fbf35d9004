"""The one seam into transformers: an attention function named "restorekv".

It receives the post-RoPE query of a layer and either dense keys and values, which go to PyTorch's SDPA (after
the observer, if there is one, has seen them), or a `RaggedLayer` twice, which goes to a backend of this
package: softmax(q [K_context; K_tail]^T * scale + bias) [V_context; V_tail], defined by `naive.py`; or a
`MultiContextLayer` twice, whose documents are attended to one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from restorekv.cache.multi_context import MultiContextLayer
from restorekv.cache.ragged import RaggedLayer
from restorekv.errors import ModelError, RestoreKVError
from restorekv.model.attention import cascade, frozen, naive, stored, tiles

try:
    from restorekv.model.attention import triton_attend
except ImportError:  # an extra: pip install 'restorekv[triton]'
    triton_attend = None

NAME = "restorekv"
Observer = Callable[[nn.Module, Tensor, Tensor, Tensor, float], Tensor | None]
Backend = Callable[[Tensor, RaggedLayer, Tensor | None, float], Tensor]
BACKENDS: dict[str, Backend] = {"naive": naive.attend, "cascade": cascade.attend, "frozen": frozen.attend}
if triton_attend is not None:
    BACKENDS["triton"] = triton_attend.attend
WORKSPACE = 16 << 20  # bytes of a layer that may be copied at once: joined for SDPA, or opened from 8 bits

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)
_backend: ContextVar[str | None] = ContextVar("backend", default=None)
_open: list[str] = []  # blocks of `observing` and `using`, of all threads


@contextmanager
def observing(callback: Observer) -> Iterator[None]:
    """Calls callback(module, query (1, H*G, Q, D), key (1, H, K, D), value, scale) before attention.

    A tensor (1, Q, H*G, D) that it returns is the result. Of a ragged layer the tail is shown and no result is taken.
    """
    with setting(_observer, callback):
        yield


@contextmanager
def using(backend: str) -> Iterator[None]:
    """Forces one of BACKENDS for ragged layers; without it `choose` decides."""
    if backend not in BACKENDS:
        raise RestoreKVError(f"There is no attention backend {backend!r} here; use one of {', '.join(BACKENDS)}.")
    with setting(_backend, backend):
        yield


@contextmanager
def setting(variable: ContextVar, value: object) -> Iterator[None]:
    """Sets it inside the block. torch.compile cannot read such a variable, so it is read only while a block is open."""
    token = variable.set(value)
    _open.append(variable.name)
    try:
        yield
    finally:
        _open.remove(variable.name)
        variable.reset(token)


def held(variable: ContextVar) -> object | None:
    """The value set by an open block, if there is one."""
    return variable.get() if variable.name in _open else None


def choose(query: Tensor, layer: RaggedLayer) -> Backend:
    """Frozen where gradients are needed; else the GPU's kernel, the CPU's (cascade), or frozen, which runs anywhere."""
    if name := held(_backend):
        return BACKENDS[name]
    if stored.packed(layer):
        return stored.attend
    if query.is_cuda and triton_attend is not None and triton_attend.usable(query, layer):
        return triton_attend.attend
    return cascade.attend if cascade.usable(query, layer) else frozen.attend


def prepare(layers: Sequence[RaggedLayer]) -> None:
    """Makes what the GPU's backend needs of a cache, for all its layers and every fork, such as a graph would hold."""
    if triton_attend is not None and layers[0].device.type == "cuda":
        tiles.plan(layers)


def opens(layer: RaggedLayer) -> bool:
    """Whether a context of 8 bits is widened whole: for a backend that was asked for, or a GPU's, within WORKSPACE."""
    small = layer.device.type != "cpu" and stored.packed(layer) and stored.workspace(layer) <= WORKSPACE
    return small or (held(_backend) is not None and stored.packed(layer))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor | RaggedLayer | MultiContextLayer,
    value: Tensor | RaggedLayer | MultiContextLayer,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query (B, H*G, Q, D) -> (B, Q, H*G, D), the signature of transformers' AttentionInterface."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, MultiContextLayer):
        parts = key.split(query, attention_mask)
        return torch.cat([attend(module, rows, own, own, mask, scaling=scale)[0] for own, rows, mask in parts]), None
    observer, ragged = held(_observer), isinstance(key, RaggedLayer)
    if observer is not None:
        found = observer(module, query, *((key.keys, key.values) if ragged else (key, value)), scale)
        if found is not None and not ragged:
            return found, None
    if ragged:
        grouped = query.unflatten(1, (key.heads, -1))
        layer = stored.opened(key) if opens(key) else key
        result = choose(grouped, layer)(grouped, layer, attention_mask, scale)
        return result.flatten(1, 2).transpose(1, 2).contiguous(), None
    if attention_mask is not None and heads_are_shared(query, dropout, kwargs):
        result = sdpa(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=True)
        return result.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs)


def heads_are_shared(query: Tensor, dropout: float, options: dict[str, object]) -> bool:
    """Whether SDPA reads a KV head once for all its query heads, under a mask: its kernel for CPUs does, with the same
    result. transformers copies keys and values for each of them."""
    plain = all(options.get(name) is None for name in ("softcap", "position_bias"))
    return query.device.type == "cpu" and not torch.is_grad_enabled() and not dropout and plain


def install(model: PreTrainedModel) -> None:
    """Routes every attention layer of `model` through `attend`; dense results stay those of SDPA."""
    if model.config._attn_implementation == NAME:
        return
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ModelError(
            f"{type(model).__name__} has no exchangeable attention; use a model with AttentionInterface."
        ) from error


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
