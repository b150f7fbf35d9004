"""Choose what computes a layer's attention, and register the result with transformers.

`attend_layer` gets the post-RoPE query of a layer, and keys and values or a layer of a cache that
holds both. The type of the keys decides what computes the attention:

| key and value | computed by |
|---|---|
| dense tensors (B, H, K, D) | PyTorch's SDPA, or sinks.py or caps.py in models that need them |
| `RaggedLayer` | a backend of this folder (`choose_backend`) |
| `SlidingLayer` | sliding.py |
| `MultiContextLayer`, `FlatLayer` | each document's layer by itself, as above |

On a device that is not a CPU, a backend answers only after `self_tests.py` has compared it with
reference.py there. Importing this file registers "restorekv" with transformers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from restorekv.cache import quantized
from restorekv.cache.flat import FlatLayer
from restorekv.cache.multi_context import MultiContextLayer
from restorekv.cache.ragged import RaggedLayer
from restorekv.cache.sliding import SlidingLayer
from restorekv.errors import ModelError, RestoreKVError
from restorekv.model.attention import (
    autograd,
    cascade,
    packed,
    reference,
    self_tests,
    sliding,
    tiles,
)

# Importing the self-test registers the backends as components that have to pass it.
from restorekv.model.attention import backend_self_test as _backend_self_test  # noqa: F401
from restorekv.model.attention.caps import attend_with_cap
from restorekv.model.attention.sinks import attend_with_sinks, group_sinks

try:
    from restorekv.model.attention import triton_attend
except ImportError:  # an extra: pip install 'restorekv[triton]'
    triton_attend = None

NAME = "restorekv"
AttentionInput = Tensor | RaggedLayer
Callback = Callable[
    [
        nn.Module,
        Tensor,
        AttentionInput,
        AttentionInput,
        Tensor | None,
        float,
        Tensor | None,
        float | None,
    ],
    Tensor | None,
]
# Called with query, layer, mask, scale and, if the model has them, sinks and cap. Add a new backend
# here, so that `force_backend` knows it. To have it chosen on a GPU, add it to BACKENDS_BY_SPEED
# and to the components in backend_self_test.py; to have it chosen on a CPU, name it in
# `choose_backend`.
Backend = Callable[..., Tensor]
BACKENDS: dict[str, Backend] = {
    "reference": reference.attend_ragged,
    "cascade": cascade.attend_ragged,
    "autograd": autograd.attend_ragged,
}
if triton_attend is not None:
    BACKENDS["triton"] = triton_attend.attend_ragged


@dataclass(frozen=True)
class Projection:
    """What is computed around the attention of a module whose class needs it.

    Args:
        applies: Returns whether a module and its keys need it.
        attend: Returns a module's result (B, Q, H * G, D'), given its query (B, H * G, Q, D) and a
            function that computes attention with the query that it makes of it.
    """

    applies: Callable[[nn.Module, object], bool]
    attend: Callable[[nn.Module, Tensor, Callable[[Tensor], Tensor]], Tensor]


# By the class of a module; model/latent.py adds those of latent attention.
PROJECTIONS: dict[type, Projection] = {}
# On a device that is not a CPU, the first that can answer and has passed its self-test is chosen.
BACKENDS_BY_SPEED: dict[str, ModuleType] = {
    "cascade": cascade,
    "autograd": autograd,
    "reference": reference,
}
if triton_attend is not None:
    BACKENDS_BY_SPEED = {"triton": triton_attend, **BACKENDS_BY_SPEED}
# Bytes of a layer that may be copied at once: joined for SDPA, or unpacked from 8 bits.
MAX_COPY_BYTES = 16 << 20

REREADING = (
    "The tokens do not follow what the cache has seen, as with use_cache=False, with a draft model "
    "or prompt lookup, with padding before the text, or without the ids that "
    "CompressedContext.inputs puts before a question; leave out such options, put padding between "
    "text and question, or use ask."
)
_observer: ContextVar[Callback | None] = ContextVar("observer", default=None)
_backend: ContextVar[str | None] = ContextVar("backend", default=None)
_inspectors: ContextVar[tuple[Callable, Callable] | None] = ContextVar("inspectors", default=None)
# Names of the variables that open blocks have set, of all threads. `_get_variable` looks here
# first, because torch.compile cannot read a ContextVar.
_open_variable_names: list[str] = []


@contextmanager
def observe_attention(callback: Callback) -> Iterator[None]:
    """Call callback(module, query, key, value, mask, scale, sinks, cap) before the attention of
    every dense or ragged layer; a `SlidingLayer` is not shown. `observe_layers` is easier to use.

    Args:
        callback: Gets the module, the query (B, H*G, Q, D), key and value, the mask, the scale, the
            logits of sinks (H*G,) and the cap on the logits, both None in models without them.
            Dense key and value are (B, H, K, D), and a tensor (B, Q, H*G, D) that the callback
            returns replaces the result. For a ragged layer both are that layer, and its result is
            computed in any case.
    """
    with _set_variable(_observer, callback):
        yield


@contextmanager
def force_backend(backend: str) -> Iterator[None]:
    """Force one of BACKENDS for ragged layers, instead of the one that `choose_backend` picks."""
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
    """Show every call of `attend_layer`, and every mask that transformers makes.

    Of a `FlatLayer`, only the calls for its ragged parts are shown.

    Args:
        on_call: Gets (module, query, key, value, mask, scale, options) before the attention.
        on_mask: Gets (mask, function), the function that the mask is made from.
    """
    with _set_variable(_inspectors, (on_call, on_mask)):
        yield


@contextmanager
def suspend_overrides() -> Iterator[None]:
    """Run the block, such as a self-test, without the observer, the backend and the inspectors that
    outer blocks have set.
    """
    with (
        _set_variable(_observer, None),
        _set_variable(_backend, None),
        _set_variable(_inspectors, None),
    ):
        yield


@contextmanager
def _set_variable(variable: ContextVar, value: object) -> Iterator[None]:
    """Set a variable in the block.

    torch.compile cannot read a ContextVar, so it is read only while some block is open.
    """
    token = variable.set(value)
    _open_variable_names.append(variable.name)
    try:
        yield
    finally:
        _open_variable_names.remove(variable.name)
        variable.reset(token)


def _get_variable(variable: ContextVar) -> Any:
    """Return the value that an open block has set, or None."""
    return variable.get() if variable.name in _open_variable_names else None


def get_observer() -> Callback | None:
    """Return the callback of this thread's innermost `observe_attention` block."""
    return _get_variable(_observer)


def choose_backend(query: Tensor, layer: RaggedLayer, cap: float | None = None) -> Backend:
    """Return the function that answers a query (B, H, G, Q, D) from a layer, under `cap` if the
    model has one.

    The first rule that applies: the backend that an open `force_backend` block names; `packed` for
    a layer of 8-bit codes; on a device that needs self-tests, the fastest of BACKENDS_BY_SPEED
    that can answer and has passed its self-test there; elsewhere `cascade`, if it can answer; and
    `autograd`, which has gradients everywhere.
    """
    name = _get_variable(_backend)
    if name is not None:
        if self_tests.needs_self_test(query.device):
            self_tests.require_self_test(name, *self_tests.get_self_test_key(query))
        return BACKENDS[name]
    if packed.is_packed(layer):
        return packed.attend_ragged
    if self_tests.needs_self_test(query.device):
        return _choose_tested(query, layer, cap)
    if cascade.can_answer(query, layer, cap):
        return cascade.attend_ragged
    return autograd.attend_ragged


def _choose_tested(query: Tensor, layer: RaggedLayer, cap: float | None) -> Backend:
    """Return the fastest backend that can answer and has passed its self-test on that device."""
    for name, module in BACKENDS_BY_SPEED.items():
        can_answer = getattr(module, "can_answer", None)  # backends without it always can
        if can_answer is not None and not can_answer(query, layer, cap):
            continue
        if self_tests.passed_self_test(name, *self_tests.get_self_test_key(query)):
            return module.attend_ragged
    raise RestoreKVError(
        f"{self_tests.describe_device(query.device)} computes attention wrongly even with "
        f"PyTorch's own operations; use another device, and {self_tests.REPORT}."
    )


def _unpack_for_call(query: Tensor, layer: RaggedLayer) -> RaggedLayer:
    """Return a layer for one call, unpacked if the backend cannot read its 8-bit context or is
    faster without it.

    If the device fails the self-test of 8 bits, the CPU unpacks the numbers.
    """
    if not packed.is_packed(layer):
        return layer
    kv_dtype = _get_kv_dtype(layer)
    if self_tests.needs_self_test(query.device) and not self_tests.passed_self_test(
        kv_dtype, *self_tests.get_self_test_key(query)
    ):
        return packed.unpack_layer(layer, torch.device("cpu"))
    if _should_unpack_at_once(layer):
        return packed.unpack_layer(layer)
    return layer


def _get_kv_dtype(layer: RaggedLayer) -> str:
    """Return the `kv_dtype` of a packed layer."""
    keys, _ = packed.get_packed_rows(layer)
    for name, dtype in quantized.QUANTIZED_DTYPES.items():
        if dtype == keys.codes.dtype:
            return name
    raise ValueError(f"no kv_dtype has codes of {keys.codes.dtype}")


def plan_kernels(layers: Sequence[RaggedLayer]) -> None:
    """Make the GPU backend's work lists for all layers, before a CUDA graph records a step."""
    if triton_attend is not None and layers[0].device.type == "cuda":
        tiles.plan_tiles(layers)


def _should_unpack_at_once(layer: RaggedLayer) -> bool:
    """Return whether to unpack a whole 8-bit context at once.

    A forced backend cannot read 8-bit codes. On a GPU the kernel is faster than `packed`, if the
    unpacked context fits into MAX_COPY_BYTES.
    """
    if _get_variable(_backend) is not None:
        return True
    keys, _ = packed.get_packed_rows(layer)
    nbytes = 2 * keys.codes.numel() * layer.dtype.itemsize
    return layer.device.type != "cpu" and nbytes <= MAX_COPY_BYTES


def attend_module(
    module: nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a module's attention as `attend_layer` does, which describes the arguments, between
    projections of query and result if its class has some.
    """
    projection = PROJECTIONS.get(type(module))
    if projection is None or not projection.applies(module, key):
        return attend_layer(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def attend(projected: Tensor) -> Tensor:
        result, _ = attend_layer(
            module, projected, key, value, attention_mask, dropout, scale, **kwargs
        )
        return result

    return projection.attend(module, query, attend), None


def attend_layer(
    module: nn.Module,
    query: Tensor,
    key: AttentionInput | SlidingLayer | MultiContextLayer | FlatLayer,
    value: AttentionInput | SlidingLayer | MultiContextLayer | FlatLayer,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, with the signature of transformers' AttentionInterface.

    Args:
        module: The attention layer.
        query: (B, H*G, Q, D), after RoPE.
        key: (B, H, K, D), or a layer of one of our caches, which holds keys and values.
        value: (B, H, K, D), or the same layer.
        attention_mask: (B or 1, 1, Q, K) bool of what a query sees, or None for a causal mask; for
            a ragged layer, K counts only the pairs of its tail.
        dropout: Only for dense keys and values.
        scaling: The factor of the logits, D^-0.5 by default.
        **kwargs: What the module hands to transformers' own functions. Of these, `s_aux` (H*G,) are
            the logits of the model's sinks, and `softcap` is the cap on its logits.

    Returns:
        (B, Q, H*G, D), and None in place of the weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(key, FlatLayer):
        return _attend_flat(module, query, key, scale, kwargs), None
    inspectors = _get_variable(_inspectors)
    if inspectors is not None:
        on_call, _ = inspectors
        on_call(module, query, key, value, attention_mask, scale, kwargs)
    if isinstance(key, MultiContextLayer):
        return _attend_multi_context(module, query, key, attention_mask, scale, kwargs), None
    if isinstance(key, SlidingLayer | RaggedLayer) and attention_mask is not None:
        _check_mask(key, attention_mask)
    if isinstance(key, SlidingLayer):
        return _attend_sliding(query, key, attention_mask, scale, kwargs), None
    callback = _get_variable(_observer)
    replacement = None
    if callback is not None:
        sinks = kwargs.get("s_aux")
        cap = kwargs.get("softcap")
        replacement = callback(module, query, key, value, attention_mask, scale, sinks, cap)
    # Over a ragged layer the callback observes, and replaces nothing.
    if isinstance(key, RaggedLayer):
        # Llama 4 has chunks instead of windows, and does not pass their size.
        chunk = getattr(getattr(module, "config", None), "attention_chunk_size", None)
        window = kwargs.get("sliding_window") or chunk
        if window is not None:
            _refuse_beyond_window(key, attention_mask, window)
        if key.checks_positions and query.shape[-2] > 1:
            # Granite's layers without RoPE get no positions, but this. Others get it always.
            if key.refuses_padding and kwargs.get("use_cache") is False:
                raise RestoreKVError(REREADING)
            _check_positions(key, attention_mask, kwargs.get("position_ids"))
        if key.refuses_padding and query.shape[-2] == 1 and attention_mask is not None:
            _refuse_padding_token(key, attention_mask)
        return _attend_ragged(query, key, attention_mask, scale, kwargs), None
    if replacement is not None:
        return replacement, None
    assert isinstance(value, Tensor), "dense keys come with dense values"
    return _attend_dense(module, query, key, value, attention_mask, dropout, scale, kwargs), None


def _attend_flat(
    module: nn.Module, query: Tensor, layer: FlatLayer, scale: float, options: dict[str, Any]
) -> Tensor:
    """Return the attention (1, Q, H*G, D) of rows that lie end to end, each of them to the cache of
    its own document.
    """
    results = []
    for own_layer, own_query, mask in layer.split_query(query):
        result = _attend_one_context(module, own_query, own_layer, mask, scale, options)
        results.append(result.flatten(0, 1))
    joined = results[0] if len(results) == 1 else torch.cat(results)
    return joined[None]


def _attend_multi_context(
    module: nn.Module,
    query: Tensor,
    layer: MultiContextLayer,
    attention_mask: Tensor | None,
    scale: float,
    options: dict[str, Any],
) -> Tensor:
    """Return the attention (B, Q, H*G, D) of a batch whose rows belong to several documents."""
    results = []
    for own_layer, own_query, mask in layer.split_query(query, attention_mask):
        results.append(_attend_one_context(module, own_query, own_layer, mask, scale, options))
    return torch.cat(results)


def _refuse_beyond_window(layer: RaggedLayer, attention_mask: Tensor | None, window: int) -> None:
    """Refuse a pass whose last token would not see the beginning of the context.

    model.generate over a fork comes here; the package's own loops refuse earlier. transformers'
    mask covers only the tail, so it hides none of the context.
    """
    positions = layer.get_seq_length()
    # A static tail, which only our own loops make, counts columns that are not written yet.
    if positions <= window or layer.static is not None:
        return
    if attention_mask is not None:
        # In a batch, shorter questions are padded with columns that they do not see.
        visible = attention_mask[:, :, -1]
        positions = layer.seen + int(visible.sum(-1).max())
    if positions > window:
        raise ModelError(
            f"Every layer of the model sees {window:,} positions, and the cache has "
            f"{layer.get_seq_length():,} with the question; ask a shorter question, or compress "
            "less of the text (on_long_text='cut')."
        )


def _check_mask(layer: RaggedLayer | SlidingLayer, attention_mask: Tensor) -> None:
    """Refuse a mask that was not made for the tail, such as one of four dimensions that covers the
    text too.
    """
    if attention_mask.dtype != torch.bool or attention_mask.shape[-1] != layer.columns:
        raise RestoreKVError(
            "An attention mask of four dimensions is bool over a compressed cache, with a column "
            f"for each of the {layer.columns:,} tokens that follow the text (restore tokens "
            "included), because every token sees the text; pass a mask (batch, "
            f"{layer.get_seq_length():,}), or none."
        )


def _check_positions(
    layer: RaggedLayer, attention_mask: Tensor | None, position_ids: Tensor | None
) -> None:
    """Refuse tokens whose positions are not those that follow what the cache has seen.

    With use_cache=False or drafts, transformers' `generate` reads the whole prompt into the cache
    again; with padding before the prompt, it reads the end of the text again. A step of one token
    does neither.

    Args:
        layer: The first layer of a cache that sees the whole text.
        attention_mask: (B or 1, 1, Q, columns) bool, or None.
        position_ids: (B or 1, Q), which most classes pass to their attention function. Those of
            models that read images too may have more dimensions, and are not compared.
    """
    # A static tail counts columns that are not written yet, and a step of it may be recorded as a
    # CUDA graph, which cannot wait for a number. torch.compile cannot, either.
    is_compiling = torch.compiler.is_compiling()
    if layer.refuses_padding and attention_mask is not None and not is_compiling:
        _refuse_padding(attention_mask)
    if position_ids is None or position_ids.ndim != 2 or layer.static is not None:
        return
    if is_compiling:
        return
    columns = layer.columns
    first = columns - position_ids.shape[-1]  # the column of the first query
    if attention_mask is None:
        expected = torch.arange(first, columns, device=position_ids.device) + layer.seen
        wrong = position_ids != expected
    else:
        # What a query sees of the tail, itself included, follows the context in its row.
        sees = attention_mask[:, 0]  # (B or 1, Q, columns)
        expected = layer.seen - 1 + sees.sum(-1)
        # A token of padding does not see itself, and its position says nothing. A mask may hide
        # other tokens too, which makes positions higher than what is seen.
        is_read = sees.diagonal(offset=first, dim1=-2, dim2=-1)
        wrong = is_read & (position_ids < expected)
    if bool(wrong.any()):
        raise RestoreKVError(REREADING)


def _refuse_padding(attention_mask: Tensor) -> None:
    """Refuse a mask (B or 1, 1, Q, columns) that hides tokens of a pass for good: the states of
    linear attention and of convolutions would read them.
    """
    if not bool(attention_mask[:, :, -1].all()):
        raise ModelError(
            "Rows with padding cannot be read over a compressed cache of a model whose layers keep "
            "states; read rows of one length, or use ask, which needs no padding."
        )


def _refuse_padding_token(layer: RaggedLayer, attention_mask: Tensor) -> None:
    """Refuse a pass of one token whose mask (B, 1, 1, columns) hides the token itself in some row:
    the states would read it. Earlier columns may be hidden, since our own loops pad the tails of a
    batch.
    """
    if layer.static is not None or torch.compiler.is_compiling():
        return
    _refuse_padding(attention_mask[..., -1:])


def _attend_ragged(
    query: Tensor,
    layer: RaggedLayer,
    attention_mask: Tensor | None,
    scale: float,
    options: dict[str, Any],
) -> Tensor:
    """Return the attention (B, Q, H*G, D) of a ragged layer, which a backend computes."""
    sinks = group_sinks(options.get("s_aux"), layer.heads)
    cap = options.get("softcap")
    grouped = query.unflatten(1, (layer.heads, -1))
    unpacked = _unpack_for_call(grouped, layer)
    backend = choose_backend(grouped, unpacked, cap)
    # Few models have sinks or a cap, and a backend is called without them otherwise.
    softmax_arguments = () if sinks is None and cap is None else (sinks, cap)
    result = backend(grouped, unpacked, attention_mask, scale, *softmax_arguments)
    return result.flatten(1, 2).transpose(1, 2).contiguous()


def _attend_dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scale: float,
    options: dict[str, Any],
) -> Tensor:
    """Return the attention (B, Q, H*G, D) of dense keys and values, as transformers computes it."""
    sinks = options.get("s_aux")
    cap = options.get("softcap")
    if sinks is not None or cap is not None:
        queries = query.shape[-2]
        if attention_mask is None and (queries > 1 or cap is not None):
            causal = reference.make_causal_mask(queries, key.shape[-2], query.device)
            attention_mask = causal[None, None]
    if cap is not None:
        assert attention_mask is not None, "made above"
        result = attend_with_cap(query, key, value, attention_mask, scale, cap, sinks, dropout)
        return result.transpose(1, 2).contiguous()
    if sinks is not None:
        result = attend_with_sinks(query, key, value, attention_mask, scale, sinks, dropout)
        return result.transpose(1, 2).contiguous()
    if attention_mask is not None and _can_use_grouped_sdpa(query, dropout, options):
        result = sdpa(query, key, value, attn_mask=attention_mask, scale=scale, enable_gqa=True)
        return result.transpose(1, 2).contiguous()
    result, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **options
    )
    return result


def _attend_one_context(
    module: nn.Module,
    query: Tensor,
    layer: RaggedLayer | SlidingLayer,
    mask: Tensor | None,
    scale: float,
    options: dict[str, Any],
) -> Tensor:
    """Return the attention (B, Q, H*G, D) of one document's rows, under a mask that we made."""
    sinks = options.get("s_aux")
    cap = options.get("softcap")
    if isinstance(layer, SlidingLayer):
        result = sliding.attend_rows(query, layer, mask, scale, sinks, cap)
        return result.transpose(1, 2).contiguous()
    result, _ = attend_layer(
        module, query, layer, layer, mask, scaling=scale, s_aux=sinks, softcap=cap
    )
    return result


def _attend_sliding(
    query: Tensor, layer: SlidingLayer, mask: Tensor | None, scale: float, options: dict[str, Any]
) -> Tensor:
    """Return the attention (B, Q, H*G, D) of a layer with a window in a pass of any kind."""
    named = options.get("sliding_window")
    if named is not None and named != layer.window:
        raise ModelError(
            f"The cache was made for a window of {layer.window:,} positions, and the layer has "
            f"{named:,}; compress the text again."
        )
    # Only our own loops have a static tail, with a mask that says which columns are written.
    attend = sliding.attend_rows if layer.static else sliding.attend_sequence
    result = attend(query, layer, mask, scale, options.get("s_aux"), options.get("softcap"))
    return result.transpose(1, 2).contiguous()


def _can_use_grouped_sdpa(query: Tensor, dropout: float, options: dict[str, object]) -> bool:
    """Return whether SDPA can read a KV head once for all its query heads under a mask.

    Its CPU kernel can, with the same result; transformers would copy keys and values for every
    query head.
    """
    if options.get("position_bias") is not None:
        return False
    return query.device.type == "cpu" and not torch.is_grad_enabled() and not dropout


def install_attention(model: PreTrainedModel) -> None:
    """Route every attention layer of `model` through `attend_layer`.

    Dense layers give the same result as with SDPA.
    """
    # Models that take images too have a config for each part, and may have been set in part.
    configs = (model.config, model.config.get_text_config())
    if all(config._attn_implementation == NAME for config in configs):
        return
    try:
        model.set_attn_implementation(NAME)
    except ValueError as error:
        raise ModelError(
            f"{type(model).__name__} does not support other attention functions (transformers' "
            "AttentionInterface); use another model."
        ) from error


def make_mask(*args: Any, **options: Any) -> Tensor | None:
    """Return transformers' mask for SDPA, with the signature of AttentionMaskInterface.

    Inside an `inspect_attention` block, plain causal masks are made too; otherwise they are
    skipped, because SDPA does not need them.
    """
    given = options.get("attention_mask")
    first = options.get("kv_offset", 0)
    last = first + options.get("kv_length", 0)
    # There is an offset only if the mask does not cover the cache from its first column.
    # transformers would treat the columns that are not given as padding.
    if given is not None and first and given.shape[-1] < last:
        raise RestoreKVError(
            f"The attention mask has {given.shape[-1]:,} columns, and the cache has {last:,} "
            "with the new tokens; pass the ids of new tokens alone, with ones for all that the "
            "cache has seen before them, or without a mask."
        )
    inspectors = _get_variable(_inspectors)
    if inspectors is None:
        return sdpa_mask(*args, **options)
    options["allow_is_causal_skip"] = False
    mask = sdpa_mask(*args, **options)
    _, on_mask = inspectors
    on_mask(mask, options.get("mask_function", causal_mask_function))
    return mask


AttentionInterface.register(NAME, attend_module)
AttentionMaskInterface.register(NAME, make_mask)
