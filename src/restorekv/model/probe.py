"""The probe of whether RestoreKV computes what a model computes, and up to which position.

The config alone does not say: Mistral has a window that it names for no layer, and other models add
sinks, caps or biases to their attention, compress their keys, keep states that are not KV pairs, or
rotate old keys again when a text gets long. So the real model reads seven tokens in three kinds of
passes:

1. all of them by transformers alone: every layer has to call the registered attention function
   once, with plain keys and values and without anything that the ragged attention lacks; the
   class's own eager attention, given random queries and keys, has to give their causal softmax,
   with the layer's sinks and cap if it has any; and values of the first layer must not depend on
   positions;
2. the last three of them over a ragged cache of the first four, which has to give the same logits
   or, if layers compute in 16 bits or are quantized, the same attention in every layer from the
   same input, because rounding changes the logits of a deep model too much; where layers keep
   states, also one token after the other;
3. four of them, the last one far away, which must not change the keys of the others. If it does,
   this is repeated at the lengths that the config names (probe_limits.py).

Models with latent attention also read all of them without a cache, where their class makes keys and
values of every head, and with a cache of latents, which has to give the same attention.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from restorekv.cache.dense import list_full_attention
from restorekv.cache.ragged import RaggedCache
from restorekv.cache.states import KINDS, PairlessLayer, list_state_layers
from restorekv.errors import ModelError, RestoreKVError, summarize_error
from restorekv.model import attention
from restorekv.model.attention.caps import cap_logits
from restorekv.model.attention.sinks import compute_weights
from restorekv.model.latent import install_latent_attention
from restorekv.model.parallel_states import install_parallel_states
from restorekv.model.prefill import make_full_cache, read_only_view
from restorekv.model.probe_limits import Support, find_limit
from restorekv.model.probe_passes import (
    CACHED,
    IDS,
    START,
    AttentionCall,
    InstanceError,
    PassRecord,
    ProbedModel,
    make_refusal,
    record_pass,
    trace_modules,
)
from restorekv.model.shape import (
    CacheShape,
    LayerHeads,
    compute_logits,
    find_attention,
    find_pairless_layers,
    get_backbone,
    is_latent_config,
    list_attention_modules,
    list_heads,
)

# Standard deviation of _check_eager's random logits: large ones show caps, sinks and biases.
LOGIT_DEVIATION = 4.0
OTHER_STATES = "computes other states in parts than at once"


def probe_model(model: PreTrainedModel) -> Support:
    """Return the model's limits; raise ModelError for a model that RestoreKV does not reproduce."""
    shape = CacheShape.from_model(model)
    backbone = get_backbone(model)
    _check_layers(model, backbone)
    _check_config(model)
    if model.get_output_embeddings() is None:
        raise ModelError(
            f"{type(model).__name__} has no output layer for tokens (LM head); pass the whole "
            "model, which AutoModelForCausalLM loads, or AutoModelForImageTextToText if it takes "
            "images too."
        )
    install_latent_attention(model)
    _check_latent_class(model)
    install_parallel_states(model)
    attention.install_attention(model)
    try:
        with torch.no_grad():
            return _run_passes(ProbedModel(model, backbone, shape))
    # A lack of memory says nothing about the model, so it is not turned into a refusal.
    except (RestoreKVError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of any class, which expects tensors and gets a ragged layer
        # A hook or a patch of this model alone may have raised it.
        refusal = make_refusal(
            model, f"does not run over a compressed cache ({summarize_error(error)})"
        )
        raise InstanceError(str(refusal)) from error


def _check_latent_class(model: PreTrainedModel) -> None:
    """Refuse latent attention of a class that caches the keys and values of every head, as those of
    older versions of transformers do.
    """
    if not is_latent_config(model.config):
        return
    if not any(type(module) in attention.PROJECTIONS for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has latent attention, but caches keys and values of every "
            "head; use transformers 5.24 or later, whose classes cache latents."
        )


def _check_layers(model: PreTrainedModel, backbone: nn.Module) -> None:
    """Refuse a model that is not a decoder, or whose layers are not where observers look."""
    layers = getattr(backbone, "layers", None)
    pairless = find_pairless_layers(model.config)
    if isinstance(layers, nn.ModuleList):
        attending = [layer for index, layer in enumerate(layers) if index not in pairless]
        if all(find_attention(layer) is not None for layer in attending):
            return
    for path, module in model.named_modules():
        if _is_position_table(path, module):
            raise make_refusal(model, f"has no RoPE: it adds positions to embeddings ({path})")
    if any("alibi" in name for name in vars(sys.modules[type(model).__module__])):
        raise make_refusal(model, "is a class for ALiBi, not for RoPE alone")
    raise make_refusal(model, "has no decoder layers with an attention module each")


def _check_config(model: PreTrainedModel) -> None:
    """Refuse a model whose config says that tokens see later ones.

    The probe's passes would fail as well, with an error that does not say why.
    """
    config = model.config.get_text_config()
    # In models for images, the value "vision" is about their tokens alone.
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise make_refusal(model, "lets tokens see later ones (use_bidirectional_attention)")


def _is_position_table(path: str, module: nn.Module) -> bool:
    """Return whether a module is a table of embeddings of positions."""
    name = path.rpartition(".")[2].lower()
    if name == "wpe":
        return True
    has_table = "position" in name and isinstance(getattr(module, "weight", None), Tensor)
    return has_table and name != "embed_positions"  # which RoFormer rotates with


def _run_passes(probed: ProbedModel) -> Support:
    """Make all passes and return the narrowest limit."""
    # The margin keeps every token in the cache until all are compared, however small a window.
    cache = make_full_cache(probed.model, margin=len(IDS))
    with record_pass(probed.model) as record:
        output = probed.read_tokens(probed.backbone, cache)
    probed.check_finite(output.last_hidden_state)
    _check_calls(probed, record, cache)
    _check_positions(probed, cache)
    if is_latent_config(probed.model.config):
        _check_latent(probed)
    _check_ragged(probed, cache, output.last_hidden_state)
    narrowest = find_limit(probed, record, cache)
    has_sinks = any(call.options.get("s_aux") is not None for call in record.calls)
    has_cap = any(call.options.get("softcap") is not None for call in record.calls)
    return replace(narrowest, has_sinks=has_sinks, has_cap=has_cap)


def _check_calls(probed: ProbedModel, record: PassRecord, cache: Any) -> None:
    """Refuse attention that is not each layer's softmax over plain keys and values."""
    layers = len(probed.attending)
    called = [getattr(call.module, "layer_idx", None) for call in record.calls]
    if not called or len(cache.layers) != len(probed.windows):
        raise probed.make_refusal("does not compute attention through AttentionInterface")
    if len(called) != layers:
        raise probed.make_refusal(f"calls its attention {len(called)} times for {layers} layers")
    if called != list(probed.attending):
        raise probed.make_refusal("does not call the attention of its layers in their order")
    all_heads = list_heads(probed.model.config)
    modules = list_attention_modules(probed.model)
    for call, module, source in zip(record.calls, modules, probed.attended, strict=True):
        # Observers look at the inputs of these modules.
        if call.module is not module:
            raise probed.make_refusal("has several attention modules in a layer")
        _check_heads(probed, call, all_heads[source])
        # A layer without pairs of its own attends to those that an earlier layer has cached.
        layer = cache.layers[source]
        if not torch.equal(layer.keys, call.key) or not torch.equal(layer.values, call.value):
            raise probed.make_refusal("attends to other keys or values than its cache holds")
        _check_eager(probed, call)
        window = probed.windows[source]
        named = call.options.get("sliding_window")
        if named is not None and window is not None and int(named) != window:
            raise probed.make_refusal("has layers with a different window than its config names")


def _check_heads(probed: ProbedModel, call: AttentionCall, expected: LayerHeads) -> None:
    """Refuse a layer whose keys, values or queries do not have the sizes that the config names,
    as latent attention and layers of several kinds do not.
    """
    plain = (1, expected.heads, len(IDS), expected.head_dim)
    shapes = [tuple(call.key.shape), tuple(call.value.shape)]
    if shapes != [plain, plain]:
        (_, key_heads, _, key_dim), (_, value_heads, _, value_dim) = shapes
        raise probed.make_refusal(
            f"has {key_heads} key heads of {key_dim} and {value_heads} value heads of {value_dim} "
            f"numbers, where {expected.heads} of {expected.head_dim} are expected, as latent "
            "attention or unequal layers do"
        )
    query_heads = expected.heads * expected.groups
    if call.query.shape[1] != query_heads:
        raise probed.make_refusal(
            f"has {call.query.shape[1]} query heads where {query_heads} are expected"
        )


def _check_eager(probed: ProbedModel, call: AttentionCall) -> None:
    """Refuse a layer whose class's eager attention is not the causal softmax of random queries
    and keys.
    """
    module = sys.modules[type(call.module).__module__]
    eager_attention = getattr(module, "eager_attention_forward", None)
    if eager_attention is None:
        raise probed.make_refusal("has no eager attention to compare with")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.device)
        for like in (call.query, call.key, call.value)
    )
    query *= LOGIT_DEVIATION / (call.scale * query.shape[-1] ** 0.5)
    rows = query.shape[-2]
    later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    bias = torch.zeros(1, 1, rows, rows, dtype=torch.float32, device=query.device)
    bias = bias.masked_fill(later, torch.finfo(query.dtype).min)
    # `bias` is the causal mask.
    options = {name: each for name, each in call.options.items() if name != "is_causal"}
    result, *_ = eager_attention(
        call.module, query, key, value, bias, scaling=call.scale, dropout=0.0, **options
    )
    groups = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(groups, 1)
    values = value.repeat_interleave(groups, 1)
    logits = cap_logits(query @ keys.mT * call.scale, call.options.get("softcap")) + bias
    sinks = call.options.get("s_aux")
    if sinks is not None:
        sinks = sinks.float()
    # One group of all query heads, whose keys were repeated.
    weights = compute_weights(logits, sinks)
    if not torch.allclose(result.float(), (weights @ values).transpose(1, 2), atol=1e-3):
        raise probed.make_refusal(
            "computes its attention in a different way, such as with a different cap or sink"
        )


def _check_positions(probed: ProbedModel, cache: Any) -> None:
    """Refuse a model that adds positions to embeddings: a token must have the same value in the
    first layer wherever it is.
    """
    if probed.states:
        # What a layer with states has read before is in every later value, so a token is read
        # alone.
        values = []
        for position in (START, 2 * START):
            alone: Any = make_full_cache(probed.model)
            positions = torch.full_like(probed.positions[:, :1], position)
            probed.read_tokens(probed.backbone, alone, slice(1), positions)
            values.append(list_full_attention(alone)[0].values[0].float())
        first, third = values
    else:
        first, _, third, *_ = cache.layers[0].values[0].float().unbind(1)
    if is_latent_config(probed.model.config):
        # The value is the latent alone, which the rotated key follows.
        latent = probed.model.config.get_text_config().kv_lora_rank
        first = first[..., :latent]
        third = third[..., :latent]
    if not probed.is_close(first, third, strict=True):
        raise probed.make_refusal("has no RoPE: it adds positions to embeddings or values")


def _check_ragged(probed: ProbedModel, cache: Any, hidden: Tensor) -> None:
    """Refuse a model that computes other logits over a ragged cache than at once.

    Args:
        probed: The model.
        cache: The pairs of all tokens.
        hidden: (1, 7, d), the hidden states of all tokens.
    """
    shape = probed.shape
    keep = torch.ones(shape.layers, shape.heads, CACHED, dtype=torch.bool)
    first = make_full_cache(probed.model, margin=len(IDS))
    if probed.states:
        probed.read_tokens(probed.backbone, first, slice(CACHED))
        _check_states(probed, first)
    else:
        for index, layer in enumerate(cache.layers):
            first.update(layer.keys[:, :, :CACHED], layer.values[:, :, :CACHED], index)
    ragged = RaggedCache.from_kept_pairs(first, keep, offset=START)
    # Columns of a window were read from START on; a short window hides what is further away.
    for layer in ragged.sliding:
        layer.first += START
    if torch.finfo(probed.dtype).bits > 16:
        answered = _run_ragged(probed, ragged)
        same = probed.is_close(answered, compute_logits(probed.model, hidden[:, CACHED:]))
    else:
        # The error of rounding to 16 bits grows from layer to layer, and changes the logits of
        # deep models.
        same = _is_attention_close(probed, ragged, hidden)
    if not same:
        raise probed.make_refusal("computes other logits over a compressed cache than without")


def _check_latent(probed: ProbedModel) -> None:
    """Refuse a model whose attention over latents is not that over the keys and values that its
    class makes of them, which it does without a cache.
    """
    attending = list_attention_modules(probed.model)
    with trace_modules(attending) as expanded:
        probed.backbone(input_ids=probed.ids, position_ids=probed.positions, use_cache=False)
    inputs = [given for given, _ in expanded]
    with trace_modules(attending, inputs) as joined:
        probed.read_tokens(probed.backbone, make_full_cache(probed.model))
    for (_, expected), (_, found) in zip(expanded, joined, strict=True):
        if not probed.is_close(found, expected, strict=True):
            raise probed.make_refusal("computes its latent attention in a different way")


def _check_states(probed: ProbedModel, cache: Any) -> None:
    """Refuse a model whose layers keep states of different shapes, compute other things when they
    continue from a state than at once, or other things for a token alone than with transformers'
    own cache.

    A token alone is not compared with a pass over all tokens, because Nemotron-H raises short time
    steps to its least time step only where it reads several tokens. Every answer that transformers
    generates has that.

    Every layer gets the input that it has in a pass over all tokens, since rounding to 16 bits
    changes the inputs of deep layers.

    Args:
        probed: The model.
        cache: The pairs and states of the first tokens, which do not change.
    """
    shapes = []
    for layer in list_state_layers(cache.layers):
        tensors = layer.named_tensors
        shapes.append({name: (state.shape, state.dtype) for name, state in tensors.items()})
    if not shapes[0] or any(shape != shapes[0] for shape in shapes):
        raise probed.make_refusal("has layers whose states are of different shapes")
    modules = probed.list_modules_with_states()
    whole: Any = make_full_cache(probed.model)
    with trace_modules(modules) as at_once:
        probed.read_tokens(probed.backbone, whole)
    given = [layer_input for layer_input, _ in at_once]
    expected = [output[:, CACHED:] for _, output in at_once]
    continued = _copy_cache(cache)
    found = _continue_states(probed, continued, given, len(IDS) - CACHED)
    _compare_states(probed, found, continued, expected, whole)
    alone: Any = DynamicCache(config=probed.model.config)
    probed.read_tokens(probed.backbone, alone, slice(CACHED))
    expected = _continue_states(probed, alone, given, 1)
    continued = _copy_cache(cache)
    found = _continue_states(probed, continued, given, 1)
    _compare_states(probed, found, continued, expected, alone)


def _copy_cache(cache: Any) -> Any:
    """Return a cache with copies of the states of a full cache, and with its pairs, that a pass may
    append to.
    """
    copied: Any = read_only_view(cache)
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, PairlessLayer):
            copied.layers[index] = copy.copy(layer)  # an append changes the copy alone
    return copied


def _continue_states(
    probed: ProbedModel, cache: Any, given: list[Tensor], size: int
) -> list[Tensor]:
    """Read the tokens after the cached ones; return what the layers with states output for them.

    Args:
        probed: The model.
        cache: The pairs and states of the first tokens.
        given: The input (1, 7, d) of each layer with states, for all tokens.
        size: How many tokens are read together.
    """
    modules = probed.list_modules_with_states()
    pieces = []
    for start in range(CACHED, len(IDS), size):
        tokens = slice(start, start + size)
        with trace_modules(modules, [layer_input[:, tokens] for layer_input in given]) as found:
            probed.read_tokens(probed.backbone, cache, tokens)
        pieces.append([output for _, output in found])
    return [torch.cat(outputs, 1) for outputs in zip(*pieces, strict=True)]


def _compare_states(
    probed: ProbedModel, found: list[Tensor], cache: Any, expected: list[Tensor], other: Any
) -> None:
    """Refuse a model if what its layers with states output, or their states in two caches, differ.

    Args:
        probed: The model.
        found: The outputs (1, tokens, d) of each layer.
        cache: A cache with layers of this package.
        expected: The outputs of each layer that are expected.
        other: A cache with the expected states.
    """
    for own, output in zip(found, expected, strict=True):
        if not probed.is_close(own, output, strict=True):
            raise probed.make_refusal(OTHER_STATES)
    # A state may be wrong although what was read from it so far is right.
    for index in probed.states:
        for kind in KINDS:
            # By the number of a state, as transformers' own layers have them too.
            own_states = getattr(cache.layers[index], f"{kind}_states")
            found_states = getattr(probed.get_state_layer(other, index), f"{kind}_states")
            for number, state in found_states.items():
                if state is not None and not probed.is_close(own_states[number], state):
                    raise probed.make_refusal(OTHER_STATES)


def _run_ragged(probed: ProbedModel, ragged: RaggedCache) -> Tensor:
    """Return the logits of the tokens after those of a ragged cache."""
    with attention.force_backend("reference"):
        answered = probed.read_tokens(probed.model, ragged, slice(CACHED, None)).logits
    probed.check_finite(answered)
    return answered


def _is_attention_close(probed: ProbedModel, ragged: RaggedCache, hidden: Tensor) -> bool:
    """Return whether every layer's attention is the same over a ragged cache as at once.

    Each layer gets the input that it has in a pass over all tokens. Refuses a model whose
    logits are not those that `compute_logits` gets from its last hidden states (1, 7, d).
    """
    cache = make_full_cache(probed.model, margin=len(IDS))
    attending = list_attention_modules(probed.model)
    with trace_modules(attending) as at_once:
        output = probed.read_tokens(probed.model, cache)
    if not probed.is_close(compute_logits(probed.model, hidden), output.logits, strict=True):
        raise probed.make_refusal("scales or caps its logits in a way of its own")
    inputs = [given[:, CACHED:] for given, _ in at_once]
    with trace_modules(attending, inputs) as over_ragged:
        _run_ragged(probed, ragged)
    return all(
        probed.is_close(found, expected[:, CACHED:], strict=True)
        for (_, expected), (_, found) in zip(at_once, over_ragged, strict=True)
    )
