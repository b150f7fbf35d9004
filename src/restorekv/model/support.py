"""Whether RestoreKV computes what a model computes, and up to which position: the model itself is
asked.

A config does not tell: Mistral has a window without saying so for any layer, other models add
sinks, caps or biases to their attention, compress their keys, keep states that are no pairs, or
rotate old keys anew when a text gets long. So seven tokens are read once per class and config,
three times, by the real model:

1. by transformers alone, where every layer has to call the registered attention function once, with plain keys and
   values and without anything that the ragged attention lacks; the class's own eager attention, given random queries
   and keys, has to give their causal softmax; and values of the first layer must not depend on positions;
2. the last three of them over a ragged cache of the first four, which has to give the same hidden states;
3. four of them, the last one far away, which must not change the keys of the others.

Which pairs a layer sees at any distance is asked of the function that transformers makes its masks
from: it takes indices, so no long text has to be read. The first position that does not see the
whole text is the end of what is exact. Up to there a window hides nothing, and the model is used; a
longer text is refused.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from restorekv.cache.ragged import RaggedCache
from restorekv.errors import ModelError, RestoreKVError, summarize_error
from restorekv.model import attention
from restorekv.model.shape import CacheShape, compute_logits, get_backbone

UNLIMITED = sys.maxsize
# Tokens that are read; the first and the third are one token at two positions.
IDS = (5, 6, 5, 6, 7, 8, 5)
START = 5  # position of the first one
CACHED = 4  # tokens of the ragged cache
FAR = 1 << 20  # a position beyond every length that configs mention
DISTANCES = 1 << 17  # positions whose view of the first column is computed one by one
PAIRS = 4096  # random pairs of positions whose visibility is computed
LOUD = 4.0  # size of random queries: large logits show caps, sinks and biases
# What modules hand to the attention function that does not change its result without dropout.
HARMLESS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "past_key_values",
    "past_key_value",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "is_causal",
    "sliding_window",
    "logits_to_keep",
    "num_items_in_batch",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "target_dtype",
    "deterministic",
    "labels",
    "input_ids",
}
REMEDY = "use a decoder with RoPE whose layers all attend to the whole text"

_known: dict[tuple[type, str], Support | RestoreKVError] = {}
_moves: dict[tuple[type, str], bool] = {}  # whether cached keys can be moved
_probing = threading.Lock()


@dataclass(frozen=True)
class Support:
    """What a model computes: `positions` that are exact, and what happens after them as part of a
    sentence.

    `changes_keys` says that a pass beyond them changes how the model rotates, until a shorter pass
    changes it back.
    """

    positions: int = UNLIMITED
    beyond: str = ""
    changes_keys: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """What the attention function got from one layer."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    options: dict[str, object]


@dataclass
class PassRecord:
    """The calls of a pass, and the functions of the masks that were made for it, by the masks'
    identity.
    """

    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[Tensor, Callable]] = field(default_factory=list)


def prepare_model(model: PreTrainedModel) -> None:
    """Routes attention through `restorekv.model.attention`; raises ModelError for a model that is
    not supported.
    """
    get_support(model)
    attention.install_attention(model)


def get_support(model: PreTrainedModel) -> Support:
    """Returns what is known of the model's class and config, which is found out once; raises
    ModelError.
    """
    key = type(model), _describe_config(model.config)
    with _probing:
        if key not in _known:
            try:
                _known[key] = probe_model(model)
            except RestoreKVError as error:
                _known[key] = error
        found = _known[key]
    if isinstance(found, RestoreKVError):
        raise type(found)(str(found))
    return found


def _describe_config(config: PretrainedConfig) -> str:
    """Returns what decides a config's computation, as text."""
    entries = {
        name: value
        for name, value in config.to_dict().items()
        if name not in ("_name_or_path", "dtype")
    }
    return json.dumps(entries, sort_keys=True, default=str)


def refuse_beyond(model: PreTrainedModel, positions: int, what: str) -> None:
    """Refuses what needs more positions than are exact."""
    support = get_support(model)
    if positions > support.positions:
        raise ModelError(
            f"{what} needs {positions:,} positions, and {support.beyond} of {_class_name(model)}; shorten it, or {REMEDY}."
        )


def refuse_scoring_beyond(model: PreTrainedModel, positions: int) -> None:
    """Refuses a pass that reads the text again to score it, where its positions change how the
    model rotates.

    A window does not matter here: the scorer computes attention over the whole text itself.
    """
    support = get_support(model)
    if support.changes_keys and positions > support.positions:
        raise ModelError(
            f"Scoring this text reads it again up to position {positions:,}, and {support.beyond} of {_class_name(model)}; "
            "shorten the text, or use an evictor that reads it once, such as snapkv."
        )


def _class_name(model: PreTrainedModel) -> str:
    """Returns the class's name."""
    return type(model).__name__


def probe_model(model: PreTrainedModel) -> Support:
    """Returns what the model computes; raises ModelError for what RestoreKV does not."""
    shape = CacheShape.from_model(model)
    _check_layers(model)
    attention.install_attention(model)
    try:
        with torch.no_grad():
            return _probe_passes(model, shape)
    except RestoreKVError:
        raise
    except Exception as error:  # code of any class, which expects tensors and gets a ragged layer
        why = (
            f"{_class_name(model)} does not run over a compressed cache ({summarize_error(error)})"
        )
        raise ModelError(f"{why}; {REMEDY}.") from error


def _check_layers(model: PreTrainedModel) -> None:
    """Refuses a model whose layers are not where observers look for them, or that is no decoder."""
    layers = getattr(get_backbone(model), "layers", None)
    if isinstance(layers, nn.ModuleList) and all(hasattr(layer, "self_attn") for layer in layers):
        return
    embeds = [path for path, module in model.named_modules() if _is_position_table(path, module)]
    if embeds:
        raise ModelError(
            f"{_class_name(model)} has no RoPE: it adds positions to embeddings ({embeds[0]}); {REMEDY}."
        )
    if any("alibi" in name for name in vars(sys.modules[type(model).__module__])):
        raise ModelError(
            f"{_class_name(model)} is a class for ALiBi, not for RoPE alone; {REMEDY}."
        )
    raise ModelError(
        f"{_class_name(model)} has no decoder layers with a module 'self_attn' each; {REMEDY}."
    )


def _is_position_table(path: str, module: nn.Module) -> bool:
    """Returns whether a module is a table of embeddings of positions."""
    name = path.rpartition(".")[2].lower()
    table = "position" in name and isinstance(getattr(module, "weight", None), Tensor)
    return name == "wpe" or (table and name != "embed_positions")  # which RoFormer rotates with


def _probe_passes(model: PreTrainedModel, shape: CacheShape) -> Support:
    """Reads the tokens three times."""
    ids = torch.tensor([IDS], device=model.device) % model.get_input_embeddings().weight.shape[0]
    positions = torch.arange(START, START + len(IDS), device=model.device)[None]
    cache = DynamicCache()
    with _record_pass(_class_name(model)) as record:
        output = get_backbone(model)(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
        )
    _check_calls(model, shape, record, cache)
    _check_positions(model, cache)
    _check_ragged(model, ids, positions, cache, output.last_hidden_state)
    limits = [
        _find_window_limit(model, record),
        _find_cache_limit(model),
        _find_rotation_limit(model, ids, positions, cache),
    ]
    return min(limits, key=lambda limit: limit.positions)


@contextmanager
def _record_pass(name: str) -> Iterator[PassRecord]:
    """Records the calls of the attention function and of the masks' maker in the block; masks are
    never left out.
    """
    record = PassRecord()

    def on_call(*arguments: object) -> None:
        call = AttentionCall(*arguments)
        _check_options(name, call)  # before attention is computed, which fails with some of them
        record.calls.append(call)

    with attention.inspect_attention(on_call, lambda *made: record.masks.append(made)):
        yield record


def _check_calls(
    model: PreTrainedModel, shape: CacheShape, record: PassRecord, cache: DynamicCache
) -> None:
    """Refuses attention that is not each layer's softmax over plain keys and values."""
    name = _class_name(model)
    called = [getattr(call.module, "layer_idx", None) for call in record.calls]
    if called != list(range(shape.layers)) or len(cache.layers) != shape.layers:
        why = "does not compute attention through AttentionInterface"
        if called and len(cache.layers) == shape.layers:
            why = f"calls its attention {len(called)} times for {shape.layers} layers"
        raise ModelError(f"{name} {why}; {REMEDY}.")
    plain = (1, shape.heads, len(IDS), shape.head_dim)
    for call, layer in zip(record.calls, cache.layers, strict=True):
        shapes = [tuple(x.shape) for x in (call.key, call.value)]
        if shapes != [plain] * 2 or call.query.shape[1] != shape.heads * shape.groups:
            (_, heads, _, size), (_, others, _, width) = shapes
            raise ModelError(
                f"{name} has {heads} key heads of {size} and {others} value heads of {width} numbers, where "
                f"{shape.heads} of {shape.head_dim} are expected, as latent attention or unequal layers do; {REMEDY}."
            )
        if not torch.equal(layer.keys, call.key) or not torch.equal(layer.values, call.value):
            raise ModelError(
                f"{name} attends to other keys or values than its cache holds; {REMEDY}."
            )
        _check_eager(name, call)


def _check_options(name: str, call: AttentionCall) -> None:
    """Refuses settings of a layer's attention that the ragged attention lacks."""
    others = [
        key for key, value in call.options.items() if key not in HARMLESS and value is not None
    ]
    if others:
        raise ModelError(
            f"{name} computes its attention with {', '.join(sorted(others))}; {REMEDY}."
        )
    if call.options.get("is_causal") is False:
        raise ModelError(f"{name} has layers that see later tokens; {REMEDY}.")
    if call.mask is not None and call.mask.dtype != torch.bool:
        raise ModelError(
            f"{name} adds a bias to the logits of its attention, as ALiBi does; {REMEDY}."
        )


def _check_eager(name: str, call: AttentionCall) -> None:
    """Refuses a layer whose class's eager attention is not the causal softmax of random queries and
    keys.
    """
    own = getattr(sys.modules[type(call.module).__module__], "eager_attention_forward", None)
    if own is None:
        raise ModelError(f"{name} has no eager attention to compare with; {REMEDY}.")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(like.shape, generator=generator).to(like.device)
        for like in (call.query, call.key, call.value)
    )
    query *= LOUD / (call.scale * query.shape[-1] ** 0.5)
    rows = query.shape[-2]
    later = torch.ones(rows, rows, dtype=torch.bool, device=query.device).triu(1)
    bias = torch.zeros(1, 1, rows, rows, device=query.device).masked_fill(
        later, torch.finfo(query.dtype).min
    )
    given = {name: value for name, value in call.options.items() if name != "is_causal"}
    result = own(call.module, query, key, value, bias, scaling=call.scale, dropout=0.0, **given)[0]
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (key, value))
    weights = (query @ keys.mT * call.scale + bias).softmax(-1)
    if not torch.allclose(result.float(), (weights @ values).transpose(1, 2), atol=1e-3):
        raise ModelError(
            f"{name} computes its attention in a way of its own, such as with sinks or a cap; {REMEDY}."
        )


def _check_positions(model: PreTrainedModel, cache: DynamicCache) -> None:
    """Refuses positions in the embeddings: one token has one value in the first layer, wherever it
    is.
    """
    first, _, third, *_ = cache.layers[0].values[0].float().unbind(1)
    if not _is_close(first, third, model.dtype, strict=True):
        raise ModelError(
            f"{_class_name(model)} has no RoPE: it adds positions to embeddings or values; {REMEDY}."
        )


def _check_ragged(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: DynamicCache, hidden: Tensor
) -> None:
    """Refuses a model that computes other hidden states or logits over a ragged cache than at once."""
    shape = CacheShape.from_model(model)
    keep = torch.ones(shape.layers, shape.heads, CACHED, dtype=torch.bool)
    first = DynamicCache()
    for index, layer in enumerate(cache.layers):
        first.update(layer.keys[:, :, :CACHED], layer.values[:, :, :CACHED], index)
    ragged = RaggedCache.from_dense(first, keep, offset=START)
    last = {"input_ids": ids[:, CACHED:], "position_ids": positions[:, CACHED:], "use_cache": True}
    with attention.force_backend("naive"):
        answered = model(**last, past_key_values=ragged).logits
    expected = compute_logits(model, hidden[:, CACHED:])
    if not _is_close(answered, expected, model.dtype):
        raise ModelError(
            f"{_class_name(model)} computes other logits over a compressed cache than without; {REMEDY}."
        )


def _is_close(one: Tensor, other: Tensor, dtype: torch.dtype, strict: bool = False) -> bool:
    """Returns whether two results of the model are equal up to the rounding of its dtype."""
    exact = torch.finfo(dtype).eps
    tolerance = max(exact * (8 if strict else 32), 1e-4)
    return bool(
        (one.float() - other.float()).abs().max() <= tolerance * other.float().abs().max() + 1e-9
    )


def _find_window_limit(model: PreTrainedModel, record: PassRecord) -> Support:
    """Returns up to where every layer sees the whole text, from the masks and from windows that
    layers name.
    """
    limits = [UNLIMITED]
    used = []
    for call in record.calls:
        own = [function for mask, function in record.masks if mask is call.mask]
        if call.mask is not None and not own:  # it may hide pairs of a longer text
            raise ModelError(f"{_class_name(model)} makes a mask of its own; {REMEDY}.")
        used += own
        window = call.options.get("sliding_window")
        limits.append(UNLIMITED if window is None else int(window))
    limits += [_count_seen_whole(model, function) for function in set(used)]
    return _window_support(min(limits))


def _window_support(limit: int) -> Support:
    """Returns a limit that is a window's."""
    return Support(limit, f"layers see at most {limit:,} positions" if limit < UNLIMITED else "")


def _count_seen_whole(model: PreTrainedModel, function: Callable) -> int:
    """Returns how many positions a mask function lets see all before them, UNLIMITED if nothing
    ever hides them.
    """
    named = [
        each + step for each in _collect_integers(model.config.to_dict()) for step in (-1, 0, 1)
    ]
    later = sorted(
        each
        for each in {*named, *(1 << power for power in range(18, 31))}
        if DISTANCES <= each < 1 << 31
    )
    far = torch.cat([torch.arange(DISTANCES), torch.tensor(later)])
    sees_first = _compute_visible(model, function, far, torch.zeros_like(far))
    limit = UNLIMITED if bool(sees_first.all()) else int(far[sees_first.long().argmin()])
    if limit <= 1:
        raise ModelError(f"{_class_name(model)} makes a mask of its own; {REMEDY}.")
    # Before the limit the mask is exactly causal: near the start, near the limit, and at random.
    generator = torch.Generator().manual_seed(0)
    end = min(limit, DISTANCES)
    queries = torch.randint(end, (PAIRS,), generator=generator)
    keys = torch.randint(end, (PAIRS,), generator=generator)
    near = torch.arange(max(end - 64, 0), end).repeat_interleave(8)
    queries = torch.cat([queries, near, torch.arange(min(end, 64)).repeat_interleave(8)])
    keys = torch.cat([keys, near + torch.arange(8).repeat(len(near) // 8) - 4])
    keys = torch.cat([keys, torch.arange(min(end, 64) * 8) % min(end, 64)]).clamp(0, end - 1)
    if not torch.equal(_compute_visible(model, function, queries, keys), keys <= queries):
        raise ModelError(
            f"{_class_name(model)} hides or shows pairs in a way of its own; {REMEDY}."
        )
    return limit


def _compute_visible(
    model: PreTrainedModel, function: Callable, queries: Tensor, keys: Tensor
) -> Tensor:
    """Returns which of the queries at these positions see which keys: one bool for each pair."""
    zero = torch.zeros((), dtype=torch.long, device=model.device)
    queries = queries.to(model.device)
    keys = keys.to(model.device)
    shown = function(zero, zero, queries, keys)
    return torch.as_tensor(shown, device=model.device).expand(len(queries)).cpu()


def _find_cache_limit(model: PreTrainedModel) -> Support:
    """Returns the window of the cache that transformers makes for the model; refuses states that
    are not pairs.
    """
    limits = [UNLIMITED]
    for layer in DynamicCache(config=model.config).layers:
        if getattr(layer, "is_sliding", False):
            limits.append(int(layer.sliding_window))
        elif type(layer) is not DynamicLayer:
            raise ModelError(
                f"{_class_name(model)} keeps {type(layer).__name__} besides keys and values; {REMEDY}."
            )
    return _window_support(min(limits))


def _find_rotation_limit(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, cache: DynamicCache
) -> Support:
    """Returns up to which position RoPE rotates keys as it did before: dynamic and longrope change
    them later.
    """
    first = ids[:, :CACHED]
    try:
        keys = _compute_keys(model, first, positions[:, :CACHED], FAR)
    except Exception:  # a table of positions that ends
        keys = None
    own = [layer.keys[0, :, :CACHED].float() for layer in cache.layers]
    if keys is not None:
        moved = any(
            not _is_close(a[:, -1], b[:, -1], model.dtype) for a, b in zip(own, keys, strict=True)
        )
        if not moved:
            raise ModelError(
                f"{_class_name(model)} has no RoPE that follows the positions it is given; {REMEDY}."
            )
        if _are_keys_unchanged(own, keys, model.dtype):
            return Support()
    lengths = sorted(
        each for each in _collect_integers(model.config.to_dict()) if START + CACHED < each < FAR
    )
    exact = [
        each for each in lengths if _keeps_keys(model, first, positions[:, :CACHED], own, each)
    ]
    if not exact or exact != lengths[: len(exact)]:
        raise ModelError(
            f"{_class_name(model)} rotates keys in a way that depends on what follows them; {REMEDY}."
        )
    limit = exact[-1]
    # After a longer text dynamic RoPE keeps its frequencies at exactly the limit, and changes them
    # back below it.
    if keys is not None:
        _compute_keys(model, first, positions[:, :CACHED], FAR)
    if not _keeps_keys(model, first, positions[:, :CACHED], own, limit):
        limit -= 1
    _compute_keys(
        model, first, positions[:, :CACHED], START + CACHED
    )  # the first frequencies again
    return Support(
        limit,
        f"beyond {limit:,} positions RoPE changes the keys of all earlier tokens",
        changes_keys=True,
    )


def check_keys_movable(model: PreTrainedModel, turn: Callable[[Tensor, int], Tensor]) -> None:
    """Refuses a model whose cached keys cannot be moved: turn(keys, p) has to give those of p
    positions later.

    Layers without RoPE beside others with it do not rotate theirs, and some models scale queries by
    their position.
    """
    prepare_model(model)
    key = type(model), _describe_config(model.config)
    if key not in _moves:
        _moves[key] = _do_keys_move(model, turn)
    if not _moves[key]:
        raise RestoreKVError(
            f"{_class_name(model)} has layers that do not rotate keys and queries by RoPE alone, so its keys cannot be "
            "moved; compress the whole text at once, or use a model that rotates all of them alike."
        )


@torch.no_grad()
def _do_keys_move(model: PreTrainedModel, turn: Callable[[Tensor, int], Tensor]) -> bool:
    """Returns whether one token's keys turn with its position in every layer, and its queries keep
    their lengths.
    """
    ids = torch.tensor([IDS[:1]], device=model.device)
    first, near, far = (_run_one_token(model, ids, position) for position in (0, START, FAR))
    for (keys, query), (turned, _), (_, later) in zip(first, near, far, strict=True):
        if not _is_close(turn(keys, START).float(), turned.float(), model.dtype):
            return False
        if not _is_close(query.float().norm(dim=-1), later.float().norm(dim=-1), model.dtype):
            return False
    return True


def _run_one_token(
    model: PreTrainedModel, ids: Tensor, position: int
) -> list[tuple[Tensor, Tensor]]:
    """Returns every layer's keys (1, H, 1, D) and queries (1, H * G, 1, D) of a token that stands
    alone.
    """
    backbone = get_backbone(model)
    positions = torch.tensor([[position]], device=model.device)
    given = {
        "input_ids": ids,
        "position_ids": positions,
        "past_key_values": DynamicCache(),
        "use_cache": True,
    }
    # By which transformers 5.2 scales queries.
    if "cache_position" in inspect.signature(backbone.forward).parameters:
        given["cache_position"] = positions[0]
    with _record_pass(_class_name(model)) as record:
        backbone(**given)
    layers = CacheShape.from_model(model).layers
    if len(record.calls) != layers:  # else nothing would be compared
        raise ModelError(
            f"{_class_name(model)} called its attention {len(record.calls)} times for {layers} layers."
        )
    return [(call.key, call.query) for call in record.calls]


def _keeps_keys(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, own: list[Tensor], length: int
) -> bool:
    """Returns whether a text of that length leaves the keys of its first tokens as they are."""
    try:
        return _are_keys_unchanged(
            own, _compute_keys(model, ids, positions, length - 1), model.dtype
        )
    except Exception:  # a table of positions that ends
        return False


def _are_keys_unchanged(own: list[Tensor], other: list[Tensor], dtype: torch.dtype) -> bool:
    """Returns whether all keys but the last token's are equal."""
    return all(
        _is_close(b[:, :-1], a[:, :-1], dtype, strict=True) for a, b in zip(own, other, strict=True)
    )


def _compute_keys(
    model: PreTrainedModel, ids: Tensor, positions: Tensor, last: int
) -> list[Tensor]:
    """Returns every layer's keys (H, CACHED, D) where the last token's position is `last`."""
    positions = positions.clone()
    positions[:, -1] = last
    cache = DynamicCache()
    get_backbone(model)(
        input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True
    )
    return [layer.keys[0].float() for layer in cache.layers]


def _collect_integers(value: object) -> set[int]:
    """Returns the whole numbers anywhere in a config."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return set().union(*(_collect_integers(each) for each in value))
    return {value} if type(value) is int else set()
