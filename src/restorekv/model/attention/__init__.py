"""The attention function "restorekv", registered with transformers.

It gets the post-RoPE query of a layer and either dense keys and values, which go to PyTorch's SDPA,
or a `RaggedLayer` twice, which goes to one of the backends here, or a `MultiContextLayer` or
`FlatLayer` twice, whose documents go there one by one. A backend computes softmax(q [K_context;
K_tail]^T * scale + bias) [V_context; V_tail]; `naive.py` is the definition.

On a device that is not a CPU, a backend answers only after `proofs.py` has compared it with that
definition there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from restorekv.cache import quantized
from restorekv.cache.flat import FlatLayer
from restorekv.cache.multi_context import MultiContextLayer
from restorekv.cache.quantized import QuantizedRows
from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.errors import ModelError, RestoreKVError
from restorekv.model.attention import cascade, frozen, naive, proofs, stored, tiles
from restorekv.model.attention import trials as _trials  # noqa: F401  (registers what has to prove itself)

try:
    from restorekv.model.attention import triton_attend
except ImportError:  # an extra: pip install 'restorekv[triton]'
    triton_attend = None

NAME = "restorekv"
Pairs = Tensor | RaggedLayer
Callback = Callable[[nn.Module, Tensor, Pairs, Pairs, Tensor | None, float], Tensor | None]
Backend = Callable[[Tensor, RaggedLayer, Tensor | None, float], Tensor]
BACKENDS: dict[str, Backend] = {
    "naive": naive.attend_ragged,
    "cascade": cascade.attend_ragged,
    "frozen": frozen.attend_ragged,
}
if triton_attend is not None:
    BACKENDS["triton"] = triton_attend.attend_ragged
LADDER = {  # on a device that is not a CPU: the first that can answer and has proven itself
    **({} if triton_attend is None else {"triton": triton_attend}),
    "cascade": cascade,
    "frozen": frozen,
    "naive": naive,
}
# Bytes of a layer that may be copied at once: joined for SDPA, or unpacked from 8 bits.
WORKSPACE = 16 << 20

_callback: ContextVar[Callback | None] = ContextVar("callback", default=None)
_backend: ContextVar[str | None] = ContextVar("backend", default=None)
_inspectors: ContextVar[tuple[Callable, Callable] | None] = ContextVar("inspectors", default=None)
_open: list[str] = []  # open blocks of `observing` and `using` in all threads


@contextmanager
def observe_attention(callback: Callback) -> Iterator[None]:
    """Calls callback(module, query (B, H*G, Q, D), key, value, mask, scale) before every layer's
    attention.

    Key and value are dense (B, H, K, D), and a returned tensor (B, Q, H*G, D) replaces the result;
    or both are the RaggedLayer, whose result is computed in any case.
    `model.observer.observe_layers` is easier to use.
    """
    with _set_variable(_callback, callback):
        yield


@contextmanager
def force_backend(backend: str) -> Iterator[None]:
    """Forces one of BACKENDS for ragged layers, instead of the one that `choose` picks."""
    if backend not in BACKENDS:
        raise RestoreKVError(
            f"There is no attention backend {backend!r} here; use one of {', '.join(BACKENDS)}."
        )
    with _set_variable(_backend, backend):
        yield


@contextmanager
def inspect_attention(
    on_call: Callable[..., object], on_mask: Callable[[Tensor, Callable], object]
) -> Iterator[None]:
    """Shows every call of `attend` and every mask that transformers makes, with the function it is
    made from.

    on_call(module, query, key, value, mask, scale, options) is called before a layer's attention.
    """
    with _set_variable(_inspectors, (on_call, on_mask)):
        yield


@contextmanager
def suspend_overrides() -> Iterator[None]:
    """Runs the block without the observer and the forced backend of the blocks around it, as a
    proof does.
    """
    with (
        _set_variable(_callback, None),
        _set_variable(_backend, None),
        _set_variable(_inspectors, None),
    ):
        yield


@contextmanager
def _set_variable(variable: ContextVar, value: object) -> Iterator[None]:
    """Sets a variable in the block. torch.compile cannot read it, so it is read only while some
    block is open.
    """
    token = variable.set(value)
    _open.append(variable.name)
    try:
        yield
    finally:
        _open.remove(variable.name)
        variable.reset(token)


def _get_variable(variable: ContextVar) -> object | None:
    """Returns the value that an open block has set, or None."""
    return variable.get() if variable.name in _open else None


def get_observer() -> Callback | None:
    """Returns the callback of this thread's innermost `observing` block."""
    return _get_variable(_callback)


def choose_backend(query: Tensor, layer: RaggedLayer) -> Backend:
    """Returns the GPU kernel or the CPU's (cascade) if it can answer, else `frozen`, which has
    gradients everywhere.
    """
    if name := _get_variable(_backend):
        if proofs.needs_proof(query.device):
            proofs.require_proof(name, *_get_proof_key(query))
        return BACKENDS[name]
    if stored.is_packed(layer):
        return stored.attend_ragged
    if proofs.needs_proof(query.device):
        return _choose_proven(query, layer)
    return cascade.attend_ragged if cascade.can_answer(query, layer) else frozen.attend_ragged


def _choose_proven(query: Tensor, layer: RaggedLayer) -> Backend:
    """Returns the fastest backend that can answer and has proven itself on the query's device."""
    for name, module in LADDER.items():
        usable = getattr(module, "can_answer", None)
        if (usable is None or usable(query, layer)) and proofs.is_proven(
            name, *_get_proof_key(query)
        ):
            return module.attend_ragged
    raise RestoreKVError(
        f"{proofs.describe_device(query.device)} computes attention wrongly even with PyTorch's own operations; use another "
        f"device, and {proofs.REPORT}."
    )


def _get_proof_key(query: Tensor) -> tuple[torch.device, int, int, int, torch.dtype]:
    """query (B, H, G, Q, D) -> what a proof has to hold for, as `proofs.is_proven` takes it."""
    return query.device, query.shape[1], query.shape[2], query.shape[4], query.dtype


def store_context(cache: RaggedCache, storage: str, groups: int) -> None:
    """Stores the context of a cache in 8 bits, on the CPU where its device has not proven that it
    can.
    """
    first = cache.layers[0]
    key = first.device, first.heads, groups, first.restore_keys.shape[-1], first.dtype
    if (
        storage == "model"
        or not proofs.needs_proof(first.device)
        or proofs.is_proven(storage, *key)
    ):
        cache.quantize(storage)
        return
    for layer in cache.layers:
        rows = layer.context_keys.cpu(), layer.context_values.cpu()
        packed = quantized.quantize(*rows, layer.bounds, storage)
        layer.context_keys, layer.context_values = (each.to(first.device) for each in packed)


def _unpack_for_call(query: Tensor, layer: RaggedLayer) -> RaggedLayer:
    """Returns a layer for one call: an 8-bit context is unpacked if the backend cannot read it (see
    `unpacks`).

    A device that has not proven that it can read 8 bits gets numbers that the CPU has unpacked.
    """
    if not stored.is_packed(layer):
        return layer
    if proofs.needs_proof(query.device) and not proofs.is_proven(
        _get_storage(layer), *_get_proof_key(query)
    ):
        return stored.unpack_layer(layer, torch.device("cpu"))
    return stored.unpack_layer(layer) if _is_unpacked_whole(layer) else layer


def _get_storage(layer: RaggedLayer) -> str:
    """Returns the name of a packed layer's storage."""
    codes: QuantizedRows = layer.context_keys
    return next(
        name for name, kind in quantized.STORAGE_DTYPES.items() if kind == codes.codes.dtype
    )


def plan_kernels(layers: Sequence[RaggedLayer]) -> None:
    """Makes the GPU backend's work lists for all layers and their forks, before a CUDA graph
    records a step.
    """
    if triton_attend is not None and layers[0].device.type == "cuda":
        tiles.plan_tiles(layers)


def _is_unpacked_whole(layer: RaggedLayer) -> bool:
    """Returns whether to unpack a whole 8-bit context: for a forced backend, and on a GPU if
    WORKSPACE suffices.
    """
    if not stored.is_packed(layer):
        return False
    nbytes = 2 * layer.context_keys.codes.numel() * layer.dtype.itemsize
    return _get_variable(_backend) is not None or (
        layer.device.type != "cpu" and nbytes <= WORKSPACE
    )


def attend_layer(
    module: nn.Module,
    query: Tensor,
    key: Pairs | MultiContextLayer | FlatLayer,
    value: Pairs | MultiContextLayer | FlatLayer,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """query (B, H*G, Q, D) -> (B, Q, H*G, D), with the signature of transformers'
    AttentionInterface.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, FlatLayer):
        parts = [
            attend_layer(module, rows, own, own, mask, scaling=scale)[0]
            for own, rows, mask in key.split_query(query)
        ]
        flat = [part.flatten(0, 1) for part in parts]
        return (flat[0] if len(flat) == 1 else torch.cat(flat))[None], None
    if (inspectors := _get_variable(_inspectors)) is not None:
        inspectors[0](module, query, key, value, attention_mask, scale, kwargs)
    if isinstance(key, MultiContextLayer):
        parts = key.split_query(query, attention_mask)
        return torch.cat(
            [
                attend_layer(module, rows, own, own, mask, scaling=scale)[0]
                for own, rows, mask in parts
            ]
        ), None
    ragged = isinstance(key, RaggedLayer)
    if (callback := _get_variable(_callback)) is not None:
        result = callback(module, query, key, value, attention_mask, scale)
        if result is not None and not ragged:
            return result, None
    if ragged:
        window = kwargs.get("sliding_window")
        if window is not None and attention_mask is None and key.get_seq_length() > window:
            # model.generate over a fork comes here; the package's own loops refuse before.
            raise ModelError(
                f"The model sees at most {window:,} positions, and the cache has {key.get_seq_length():,}; ask less."
            )
        grouped = query.unflatten(1, (key.heads, -1))
        layer = _unpack_for_call(grouped, key)
        result = choose_backend(grouped, layer)(grouped, layer, attention_mask, scale)
        return result.flatten(1, 2).transpose(1, 2).contiguous(), None
    if attention_mask is not None and _shares_heads(query, dropout, kwargs):
        result = sdpa(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=True)
        return result.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs
    )


def _shares_heads(query: Tensor, dropout: float, options: dict[str, object]) -> bool:
    """Returns whether SDPA can read a KV head once for all its query heads under a mask, as its CPU
    kernel does.

    The result is the same; transformers copies keys and values for every query head.
    """
    plain = all(options.get(name) is None for name in ("softcap", "position_bias"))
    return query.device.type == "cpu" and not torch.is_grad_enabled() and not dropout and plain


def install_attention(model: PreTrainedModel) -> None:
    """Routes every attention layer of `model` through `attend`; dense layers give the same result
    as with SDPA.
    """
    if model.config._attn_implementation == NAME:
        return
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ModelError(
            f"{type(model).__name__} has no exchangeable attention; use a model with AttentionInterface."
        ) from error


def make_mask(*args: object, **options: object) -> Tensor | None:
    """Returns what transformers' mask for SDPA is; while somebody inspects, plain causal masks are
    made too.
    """
    if (inspectors := _get_variable(_inspectors)) is None:
        return sdpa_mask(*args, **options)
    mask = sdpa_mask(*args, **{**options, "allow_is_causal_skip": False})
    inspectors[1](mask, options.get("mask_function", causal_mask_function))
    return mask


AttentionInterface.register(NAME, attend_layer)
AttentionMaskInterface.register(NAME, make_mask)
