"""The probe of whether RestoreKV computes what a model computes, and up to which position.

The config alone does not say: Mistral has a window that it names for no layer, and other models add
sinks, caps or biases to their attention, compress their keys, keep states that are not KV pairs, or
rotate old keys again when a text gets long. So the real model reads seven tokens in three kinds of
passes:

1. all of them by transformers alone: every layer has to call the registered attention function
   once, with plain keys and values and without anything that the ragged attention lacks; the
   class's own eager attention, given random queries and keys, has to give their causal softmax,
   with the layer's sinks if it has any; and values of the first layer must not depend on positions;
2. the last three of them over a ragged cache of the first four, which has to give the same logits
   or, if layers compute in 16 bits or are quantized, the same attention in every layer from the
   same input, because rounding changes the logits of a deep model too much;
3. four of them, the last one far away, which must not change the keys of the others. If it does,
   this is repeated at the lengths that the config names.

Which pairs a layer sees at any distance follows from the function that transformers makes its masks
from: it takes indices, so no long text has to be read. RestoreKV is exact up to the first position
that does not see the whole text. In a hybrid model, layers with a window alternate with others
(shape.py): the function of the windowed layers has to show exactly the window that the config
names, and only the other layers can limit the positions.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from restorekv.cache.ragged import RaggedCache
from restorekv.errors import ModelError, RestoreKVError, summarize_error
from restorekv.model import attention
from restorekv.model.attention.sinks import compute_weights
from restorekv.model.cache_argument import pass_cache
from restorekv.model.linear_layers import list_quantized_layers
from restorekv.model.observer import HOOKS_LOCK
from restorekv.model.prefill import QueryOnlyLayer, make_full_cache
from restorekv.model.shape import (
    CacheShape,
    LayerHeads,
    compute_logits,
    get_backbone,
    get_dtype_name,
    list_heads,
    list_pair_layers,
    list_windows,
)

UNLIMITED = sys.maxsize
# Tokens that are read; the first, the third and the last are one token at three positions.
IDS = (5, 6, 5, 6, 7, 8, 5)
START = 5  # position of the first one
CACHED = 4  # tokens of the ragged cache
FAR = 1 << 20  # a position beyond every length that configs mention
DISTANCES = 1 << 17  # positions whose view of the first column is computed one by one
PAIRS = 4096  # random pairs of positions whose visibility is computed
EDGE = 64  # positions near the start and near the limit whose visibility is computed
# Standard deviation of check_eager's random logits: large ones show caps, sinks and biases.
LOGIT_DEVIATION = 4.0
# Keyword arguments of the attention function that change nothing here without dropout, or that
# other checks compare.
KNOWN_OPTIONS = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "cache",
    "past_key_values",
    "past_key_value",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "return_dict",
    "is_causal",
    "s_aux",  # learned sinks, which check_eager compares
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
# How a refusal describes an option that is not supported.
OPTION_PHRASES = {
    "softcap": "a cap on its logits (softcap)",
}
REMEDY = "use a decoder with RoPE and layers that attend to the whole text"


class InstanceError(ModelError):
    """A fault of one model, which says nothing about others of its class and config."""


@dataclass(frozen=True)
class Support:
    """The limits of a model.

    Args:
        positions: How many positions are exact.
        beyond: What happens after those positions, as a clause such as "layers see at most 4,096
            positions". Error messages quote it; it is empty if the model has no limit.
        changes_keys: Whether a pass beyond them changes how the model rotates, until a shorter pass
            changes it back.
        has_sinks: Whether layers have learned sinks (attention/sinks.py).
    """

    positions: int = UNLIMITED
    beyond: str = ""
    changes_keys: bool = False
    has_sinks: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """What the attention function got from one layer."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    options: dict[str, Any]


@dataclass
class PassRecord:
    """The calls of a pass, and the functions of the masks that were made for it."""

    calls: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[Tensor | None, Callable]] = field(default_factory=list)


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
    attention.install_attention(model)
    try:
        with torch.no_grad():
            return _Probe(model, backbone, shape).run()
    # A lack of memory says nothing about the model, so it is not turned into a refusal.
    except (RestoreKVError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # code of any class, which expects tensors and gets a ragged layer
        # A hook or a patch of this model alone may have raised it.
        refusal = _make_refusal(
            model, f"does not run over a compressed cache ({summarize_error(error)})"
        )
        raise InstanceError(str(refusal)) from error


def _make_refusal(model: PreTrainedModel, why: str) -> ModelError:
    return ModelError(f"{type(model).__name__} {why}; {REMEDY}.")


def _check_layers(model: PreTrainedModel, backbone: nn.Module) -> None:
    """Refuse a model that is not a decoder, or whose layers are not where observers look."""
    layers = getattr(backbone, "layers", None)
    if isinstance(layers, nn.ModuleList) and all(hasattr(layer, "self_attn") for layer in layers):
        return
    for path, module in model.named_modules():
        if _is_position_table(path, module):
            raise _make_refusal(model, f"has no RoPE: it adds positions to embeddings ({path})")
    if any("alibi" in name for name in vars(sys.modules[type(model).__module__])):
        raise _make_refusal(model, "is a class for ALiBi, not for RoPE alone")
    raise _make_refusal(model, "has no decoder layers with a module 'self_attn' each")


def _check_config(model: PreTrainedModel) -> None:
    """Refuse a model whose config says that tokens see later ones.

    The probe's passes would fail as well, with an error that does not say why.
    """
    config = model.config.get_text_config()
    # In models for images, the value "vision" is about their tokens alone.
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise _make_refusal(model, "lets tokens see later ones (use_bidirectional_attention)")


def _is_position_table(path: str, module: nn.Module) -> bool:
    """Return whether a module is a table of embeddings of positions."""
    name = path.rpartition(".")[2].lower()
    if name == "wpe":
        return True
    has_table = "position" in name and isinstance(getattr(module, "weight", None), Tensor)
    return has_table and name != "embed_positions"  # which RoFormer rotates with


class _Probe:
    """The probe of one model: its three kinds of passes, and the checks of what they compute."""

    def __init__(self, model: PreTrainedModel, backbone: nn.Module, shape: CacheShape) -> None:
        self.model: Any = model
        self.backbone = backbone
        self.shape = shape
        # Of every layer with pairs of its own, None for the whole text.
        self.windows = list_windows(self.model.config)
        # Of every layer, the one whose pairs it attends to.
        self.pair_layers = list_pair_layers(self.model.config)
        # The dtype whose rounding may explain a difference: the model's, or one of 16 bits, since
        # quantized layers do not compute more exactly whatever dtype is around them.
        self.dtype = self.model.dtype
        if torch.finfo(self.dtype).bits > 16 and list_quantized_layers(model):
            self.dtype = torch.bfloat16
        vocabulary_size = self.model.get_input_embeddings().weight.shape[0]
        # (1, 7); a tiny vocabulary has fewer ids.
        self.ids = torch.tensor([IDS], device=model.device) % vocabulary_size
        self.positions = torch.arange(START, START + len(IDS), device=model.device)[None]

    def run(self) -> Support:
        """Make all passes and return the narrowest limit."""
        # The margin keeps every token in the cache until all are compared, however small a window.
        cache = make_full_cache(self.model, margin=len(IDS))
        with _record_pass(self.model) as record:
            output = self.backbone(
                input_ids=self.ids,
                position_ids=self.positions,
                use_cache=True,
                **pass_cache(self.backbone, cache),
            )
        self.check_finite(output.last_hidden_state)
        self.check_calls(record, cache)
        self.check_positions(cache)
        self.check_ragged(cache, output.last_hidden_state)
        limits = [
            self.find_window_limit(record),
            self.find_cache_limit(),
            self.find_rotation_limit(cache),
            self.find_scale_limit(),
        ]
        narrowest = min(limits, key=lambda limit: limit.positions)
        has_sinks = any(call.options.get("s_aux") is not None for call in record.calls)
        return replace(narrowest, has_sinks=has_sinks)

    def make_refusal(self, why: str) -> ModelError:
        """Return the error of a model that `why` describes."""
        return _make_refusal(self.model, why)

    def is_close(self, one: Tensor, other: Tensor, strict: bool = False) -> bool:
        """Return whether two results are equal up to the rounding of the model's layers."""
        return _is_close(one, other, self.dtype, strict)

    def check_finite(self, result: Tensor) -> None:
        """Refuse NaN and infinite numbers, with which no check would mean anything."""
        if not result.isfinite().all():
            raise InstanceError(
                f"{type(self.model).__name__} computes numbers that are not finite in "
                f"{get_dtype_name(self.model.dtype)}: its weights are damaged or too large for it; "
                "load it in float32, or fetch it again."
            )

    def check_calls(self, record: PassRecord, cache: Any) -> None:
        """Refuse attention that is not each layer's softmax over plain keys and values."""
        layers = len(self.pair_layers)
        called = [getattr(call.module, "layer_idx", None) for call in record.calls]
        if called != list(range(layers)) or len(cache.layers) != len(self.windows):
            if called and len(cache.layers) == len(self.windows):
                if len(called) == layers:
                    raise self.make_refusal(
                        "does not call the attention of its layers in their order"
                    )
                raise self.make_refusal(
                    f"calls its attention {len(called)} times for {layers} layers"
                )
            raise self.make_refusal("does not compute attention through AttentionInterface")
        all_heads = list_heads(self.model.config)
        for call, source in zip(record.calls, self.pair_layers, strict=True):
            self.check_heads(call, all_heads[source])
            # A layer without pairs of its own attends to those that an earlier layer has cached.
            layer = cache.layers[source]
            if not torch.equal(layer.keys, call.key) or not torch.equal(layer.values, call.value):
                raise self.make_refusal("attends to other keys or values than its cache holds")
            self.check_eager(call)
            window = self.windows[source]
            named = call.options.get("sliding_window")
            if named is not None and window is not None and int(named) != window:
                raise self.make_refusal("has layers with a different window than its config names")

    def check_heads(self, call: AttentionCall, expected: LayerHeads) -> None:
        """Refuse a layer whose keys, values or queries do not have the sizes that the config names,
        as latent attention and layers of several kinds do not.
        """
        plain = (1, expected.heads, len(IDS), expected.head_dim)
        shapes = [tuple(call.key.shape), tuple(call.value.shape)]
        if shapes != [plain, plain]:
            (_, heads, _, size), (_, others, _, width) = shapes
            raise self.make_refusal(
                f"has {heads} key heads of {size} and {others} value heads of {width} numbers, "
                f"where {expected.heads} of {expected.head_dim} are expected, as latent attention "
                "or unequal layers do"
            )
        query_heads = expected.heads * expected.groups
        if call.query.shape[1] != query_heads:
            raise self.make_refusal(
                f"has {call.query.shape[1]} query heads where {query_heads} are expected"
            )

    def check_eager(self, call: AttentionCall) -> None:
        """Refuse a layer whose class's eager attention is not the causal softmax of random queries
        and keys.
        """
        module = sys.modules[type(call.module).__module__]
        eager_attention = getattr(module, "eager_attention_forward", None)
        if eager_attention is None:
            raise self.make_refusal("has no eager attention to compare with")
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
        options = {name: each for name, each in call.options.items() if name != "is_causal"}
        result, *_ = eager_attention(
            call.module, query, key, value, bias, scaling=call.scale, dropout=0.0, **options
        )
        groups = query.shape[1] // key.shape[1]
        keys = key.repeat_interleave(groups, 1)
        values = value.repeat_interleave(groups, 1)
        logits = query @ keys.mT * call.scale + bias
        sinks = call.options.get("s_aux")
        if sinks is not None:
            sinks = sinks.float()
        # One group of all query heads, whose keys were repeated.
        weights = compute_weights(logits, sinks)
        if not torch.allclose(result.float(), (weights @ values).transpose(1, 2), atol=1e-3):
            raise self.make_refusal(
                "computes its attention in a different way, such as with a cap or a different sink"
            )

    def check_positions(self, cache: Any) -> None:
        """Refuse a model that adds positions to embeddings: a token must have the same value in the
        first layer wherever it is.
        """
        first, _, third, *_ = cache.layers[0].values[0].float().unbind(1)
        if not self.is_close(first, third, strict=True):
            raise self.make_refusal("has no RoPE: it adds positions to embeddings or values")

    def check_ragged(self, cache: Any, hidden: Tensor) -> None:
        """Refuse a model that computes other logits over a ragged cache than at once.

        Args:
            cache: The pairs of all tokens.
            hidden: (1, 7, d), the hidden states of all tokens.
        """
        shape = self.shape
        keep = torch.ones(shape.layers, shape.heads, CACHED, dtype=torch.bool)
        first = make_full_cache(self.model, margin=len(IDS))
        for index, layer in enumerate(cache.layers):
            first.update(layer.keys[:, :, :CACHED], layer.values[:, :, :CACHED], index)
        ragged = RaggedCache.from_kept_pairs(first, keep, offset=START)
        # Columns of a window were read from START on; a short window hides what is further away.
        for layer in ragged.sliding:
            layer.first += START
        if torch.finfo(self.dtype).bits > 16:
            answered = self.run_ragged(ragged)
            same = self.is_close(answered, compute_logits(self.model, hidden[:, CACHED:]))
        else:
            # The error of rounding to 16 bits grows from layer to layer, and changes the logits of
            # deep models.
            same = self.is_attention_close(ragged, hidden)
        if not same:
            raise self.make_refusal("computes other logits over a compressed cache than without")

    def run_ragged(self, ragged: RaggedCache) -> Tensor:
        """Return the logits of the tokens after those of a ragged cache."""
        with attention.force_backend("reference"):
            answered = self.model(
                input_ids=self.ids[:, CACHED:],
                position_ids=self.positions[:, CACHED:],
                use_cache=True,
                **pass_cache(self.model, ragged),
            ).logits
        self.check_finite(answered)
        return answered

    def is_attention_close(self, ragged: RaggedCache, hidden: Tensor) -> bool:
        """Return whether every layer's attention is the same over a ragged cache as at once.

        Each layer gets the input that it has in a pass over all tokens. Refuses a model whose
        logits are not those that `compute_logits` gets from its last hidden states (1, 7, d).
        """
        cache = make_full_cache(self.model, margin=len(IDS))
        with _trace_attention(self.model) as at_once:
            output = self.model(
                input_ids=self.ids,
                position_ids=self.positions,
                use_cache=True,
                **pass_cache(self.model, cache),
            )
        if not self.is_close(compute_logits(self.model, hidden), output.logits, strict=True):
            raise self.make_refusal("scales or caps its logits in a way of its own")
        inputs = [given[:, CACHED:] for given, _ in at_once]
        with _trace_attention(self.model, inputs) as over_ragged:
            self.run_ragged(ragged)
        return all(
            self.is_close(found, expected[:, CACHED:], strict=True)
            for (_, expected), (_, found) in zip(at_once, over_ragged, strict=True)
        )

    def find_window_limit(self, record: PassRecord) -> Support:
        """Return up to which position every layer sees what RestoreKV assumes: the whole text or,
        in windowed layers of a hybrid model, their window.

        This follows from the masks, and from the windows that layers name.
        """
        limits = [UNLIMITED]
        functions: dict[int | None, set[Callable]] = {}  # by the window of the layers
        for call, source in zip(record.calls, self.pair_layers, strict=True):
            window = self.windows[source]
            own = [function for mask, function in record.masks if _is_same_mask(mask, call.mask)]
            if call.mask is not None and not own:  # it may hide pairs of a longer text
                raise self.make_refusal("makes a mask of its own")
            functions.setdefault(window, set()).update(own)
            named = call.options.get("sliding_window")
            if named is not None and window is None:
                limits.append(int(named))
        if not any(functions.values()):  # nothing says what its layers see of a longer text
            raise self.make_refusal("calls attention without a mask")
        seen_whole = []
        for window, own in functions.items():
            for function in own:
                seen_whole.append(self.count_seen_whole(function))
                if window is None:
                    limits.append(seen_whole[-1])
                else:
                    self.check_window(function, window)
        limit = min(limits)
        has_limit = limit < UNLIMITED
        return _make_window_limit(limit, in_every_layer=has_limit and max(seen_whole) == limit)

    def check_window(self, function: Callable, window: int) -> None:
        """Refuse a mask function by which a token sees anything but itself and the window - 1
        tokens before it.
        """
        generator = torch.Generator().manual_seed(0)
        queries = torch.randint(DISTANCES, (PAIRS,), generator=generator)
        # Everywhere, and close to both ends of what the window shows.
        anywhere = torch.randint(DISTANCES, (PAIRS,), generator=generator)
        near = torch.randint(-EDGE, EDGE + 1, (PAIRS,), generator=generator)
        first = torch.arange(EDGE).repeat_interleave(EDGE)
        far = torch.tensor([1 << power for power in range(18, 31)])
        pairs = [
            (queries, anywhere),
            (queries, queries + near),
            (queries, queries - window + near),
            (first, torch.arange(EDGE).repeat(EDGE)),
            (far, far - window),
            (far, far - window + 1),
            (far, far),
            (far, torch.zeros_like(far)),
        ]
        for rows, keys in pairs:
            keys = keys.clamp(min=0)
            expected = (keys <= rows) & (keys > rows - window)
            if not torch.equal(self.compute_visible(function, rows, keys), expected):
                raise self.make_refusal("hides or shows pairs in a way of its own")

    def count_seen_whole(self, function: Callable) -> int:
        """Return how many positions, from the first on, see everything before them by a mask
        function; UNLIMITED if nothing is ever hidden.
        """
        # Near positions one by one; far ones around the config's numbers, and at powers of two.
        later = {1 << power for power in range(18, 31)}
        for number in _collect_integers(self.model.config.to_dict()):
            later.update((number - 1, number, number + 1))
        later = sorted(each for each in later if DISTANCES <= each < 1 << 31)
        far = torch.cat([torch.arange(DISTANCES), torch.tensor(later)])
        sees_first = self.compute_visible(function, far, torch.zeros_like(far))
        limit = UNLIMITED
        if not sees_first.all():
            limit = int(far[sees_first.long().argmin()])
        if limit <= 1:
            raise self.make_refusal("makes a mask of its own")
        # Before the limit the mask is exactly causal: near the start, near the limit, at random.
        generator = torch.Generator().manual_seed(0)
        end = min(limit, DISTANCES)
        start = min(end, EDGE)
        queries = torch.randint(end, (PAIRS,), generator=generator)
        keys = torch.randint(end, (PAIRS,), generator=generator)
        # Each query near the limit with the eight keys around it.
        queries_near = torch.arange(max(end - EDGE, 0), end).repeat_interleave(8)
        keys_near = queries_near + torch.arange(8).repeat(len(queries_near) // 8) - 4
        # Each query near the start with eight keys there, in a cycle.
        queries_first = torch.arange(start).repeat_interleave(8)
        keys_first = torch.arange(start * 8) % start
        queries = torch.cat([queries, queries_near, queries_first])
        keys = torch.cat([keys, keys_near, keys_first]).clamp(0, end - 1)
        if not torch.equal(self.compute_visible(function, queries, keys), keys <= queries):
            raise self.make_refusal("hides or shows pairs in a way of its own")
        return limit

    def compute_visible(self, function: Callable, queries: Tensor, keys: Tensor) -> Tensor:
        """Return for each pair of a query's and a key's position whether the query sees the key."""
        device = self.model.device
        zero = torch.zeros((), dtype=torch.long, device=device)
        seen = function(zero, zero, queries.to(device), keys.to(device))
        return torch.as_tensor(seen, device=device).expand(len(queries)).cpu()

    def find_cache_limit(self) -> Support:
        """Return the limit set by the windows of the cache that transformers makes for the model.

        Refuses a model whose cache has states that are not pairs.
        """
        limits = [UNLIMITED]
        layers: list[Any] = DynamicCache(config=self.model.config).layers
        # Layers that share the pairs of others may have a place in it, which stays empty.
        if len(layers) == len(self.pair_layers):
            layers = layers[: len(self.windows)]
        windows = self.windows if len(layers) == len(self.windows) else [None] * len(layers)
        for layer, window in zip(layers, windows, strict=True):
            if getattr(layer, "is_sliding", False):
                if int(layer.sliding_window) != window:
                    limits.append(int(layer.sliding_window))
            elif window is not None:
                raise self.make_refusal(
                    "keeps whole texts in layers that are said to have a window"
                )
            elif type(layer) is not DynamicLayer:
                raise self.make_refusal(f"keeps {type(layer).__name__} besides keys and values")
        return _make_window_limit(min(limits))

    def find_rotation_limit(self, cache: Any) -> Support:
        """Return up to which position RoPE rotates keys as it did before.

        The kinds "dynamic" and "longrope" change the frequencies for longer texts, and with them
        all keys.
        """
        own = [layer.keys[0, :, :CACHED].float() for layer in cache.layers]
        try:
            keys = self.compute_keys(FAR)
        except Exception:  # a table of positions that ends
            keys = None
        if keys is not None:
            pairs = zip(own, keys, strict=True)
            if all(self.is_close(near[:, -1], far[:, -1]) for near, far in pairs):
                raise self.make_refusal("has no RoPE that follows the positions it is given")
            if self.are_keys_unchanged(own, keys):
                return Support()
        # Somewhere the keys change: at one of the numbers in the config.
        numbers = _collect_integers(self.model.config.to_dict())
        lengths = sorted(each for each in numbers if START + CACHED < each < FAR)
        exact = [each for each in lengths if self.are_keys_unchanged_at_length(own, each)]
        if not exact or exact != lengths[: len(exact)]:
            raise self.make_refusal("rotates keys in a way that depends on what follows them")
        limit = exact[-1]
        # After a longer text dynamic RoPE keeps its frequencies at exactly the limit, and changes
        # them back below it.
        if keys is not None:
            self.compute_keys(FAR)
        if not self.are_keys_unchanged_at_length(own, limit):
            limit -= 1
        self.compute_keys(START + CACHED)  # the first frequencies again
        return Support(
            limit,
            f"beyond {limit:,} positions RoPE changes the keys of all earlier tokens",
            changes_keys=True,
        )

    def find_scale_limit(self) -> Support:
        """Return up to which position queries do not depend on how many tokens the cache has seen.

        Llama 4 scales the queries of some layers by that number instead of their position, and the
        rows of a batch have one cache.
        """
        own = self.compute_queries(0)
        if self.are_queries_equal(own, self.compute_queries(FAR)):
            return Support()
        for length in sorted(_collect_integers(self.model.config.to_dict())):
            # The number may be the last position that is not scaled, or the first that is.
            if 1 < length < FAR and not self.are_queries_equal(own, self.compute_queries(length)):
                limit = length - 1
                return Support(limit, f"beyond {limit:,} positions layers scale their queries")
        raise self.make_refusal("scales its queries by what its cache has seen")

    def are_queries_equal(self, own: list[Tensor], others: list[Tensor]) -> bool:
        """Return whether the queries of every layer are equal."""
        return all(
            self.is_close(two, one, strict=True) for one, two in zip(own, others, strict=True)
        )

    def compute_queries(self, seen: int) -> list[Tensor]:
        """Return every layer's query (1, H * G, 1, D) of one token, at the same position always, if
        its cache has seen so many tokens.
        """
        cache = Cache(layers=[QueryOnlyLayer(seen) for _ in self.windows])
        with _record_pass(self.model) as record:
            self.backbone(
                input_ids=self.ids[:, :1],
                position_ids=self.positions[:, :1],
                use_cache=True,
                **pass_cache(self.backbone, cache),
            )
        return [call.query.float() for call in record.calls]

    def are_keys_unchanged_at_length(self, own: list[Tensor], length: int) -> bool:
        """Return whether a text of that length leaves the keys of its first tokens unchanged."""
        try:
            return self.are_keys_unchanged(own, self.compute_keys(length - 1))
        except Exception:  # a table of positions that ends
            return False

    def are_keys_unchanged(self, own: list[Tensor], others: list[Tensor]) -> bool:
        """Return whether all keys but the last token's are equal."""
        pairs = zip(own, others, strict=True)
        return all(self.is_close(two[:, :-1], one[:, :-1], strict=True) for one, two in pairs)

    def compute_keys(self, last: int) -> list[Tensor]:
        """Return every layer's keys (H, CACHED, D) if the last token's position is `last`."""
        positions = self.positions[:, :CACHED].clone()
        positions[:, -1] = last
        cache: Any = make_full_cache(self.model, margin=CACHED)
        self.backbone(
            input_ids=self.ids[:, :CACHED],
            position_ids=positions,
            use_cache=True,
            **pass_cache(self.backbone, cache),
        )
        return [layer.keys[0].float() for layer in cache.layers]


@contextmanager
def _record_pass(model: PreTrainedModel) -> Iterator[PassRecord]:
    """Record the calls of the attention function and the masks that are made in the block.

    Plain causal masks, which are otherwise left out, are made too.
    """
    record = PassRecord()

    def on_call(*arguments) -> None:
        call = AttentionCall(*arguments)
        _check_options(model, call)  # before attention is computed, which fails with some of them
        record.calls.append(call)

    def on_mask(mask: Tensor | None, function: Callable) -> None:
        record.masks.append((mask, function))

    with attention.inspect_attention(on_call, on_mask):
        yield record


@contextmanager
def _trace_attention(
    model: PreTrainedModel, replacements: Sequence[Tensor] | None = None
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record input and output (1, Q, d) of every layer's attention in this thread's pass in the
    block; `replacements` are the inputs that the layers get instead of their own.
    """
    trace: list[tuple[Tensor, Tensor]] = []
    inputs: list[Tensor] = []
    own_thread = threading.get_ident()

    def before_layer(module: nn.Module, args: tuple, kwargs: dict[str, Any] | None = None) -> Any:
        # Hooks see the passes of other threads too, and without kwargs while PyTorch is still
        # registering them.
        if kwargs is None or threading.get_ident() != own_thread:
            return None
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        if replacements is not None:
            hidden = replacements[len(inputs)]
            if "hidden_states" in kwargs:
                kwargs = {**kwargs, "hidden_states": hidden}
            else:
                args = (hidden, *args[1:])
        inputs.append(hidden)
        return args, kwargs

    def after_layer(module: nn.Module, args: tuple, output: Any) -> None:
        if threading.get_ident() == own_thread:
            attended = output[0] if isinstance(output, tuple) else output
            trace.append((inputs[len(trace)], attended))

    layers: Any = get_backbone(model).layers
    handles = []
    with HOOKS_LOCK:
        for layer in layers:
            attending = layer.self_attn
            handles.append(attending.register_forward_pre_hook(before_layer, with_kwargs=True))
            handles.append(attending.register_forward_hook(after_layer))
    try:
        yield trace
    finally:
        with HOOKS_LOCK:
            for handle in handles:
                handle.remove()


def _check_options(model: PreTrainedModel, call: AttentionCall) -> None:
    """Refuse settings of a layer's attention that the ragged attention lacks."""
    others = []
    for name, value in call.options.items():
        if name not in KNOWN_OPTIONS and value is not None:
            others.append(OPTION_PHRASES.get(name, name))
    if others:
        raise _make_refusal(model, f"computes its attention with {', '.join(sorted(others))}")
    sinks = call.options.get("s_aux")
    if sinks is not None and (
        not isinstance(sinks, Tensor) or tuple(sinks.shape) != (call.query.shape[1],)
    ):
        raise _make_refusal(model, "has sinks that are not one logit of each query head (s_aux)")
    if call.options.get("is_causal") is False:
        raise _make_refusal(model, "has layers that see later tokens")
    if call.mask is not None and call.mask.dtype != torch.bool:
        raise _make_refusal(model, "adds a bias to the logits of its attention, as ALiBi does")


def _is_close(one: Tensor, other: Tensor, dtype: torch.dtype, strict: bool = False) -> bool:
    """Return whether two results of a model are equal up to the rounding of its dtype."""
    steps = 8 if strict else 32
    tolerance = max(torch.finfo(dtype).eps * steps, 1e-4)
    error = (one.float() - other.float()).abs().max()
    return bool(error <= tolerance * other.float().abs().max() + 1e-9)


def _is_same_mask(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two masks are one, or views of the whole of one, which Gemma 4 makes."""
    if one is None or other is None:
        return one is other
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape


def _make_window_limit(limit: int, in_every_layer: bool = False) -> Support:
    """Return the limit that a window sets."""
    if in_every_layer:
        return Support(
            limit,
            f"every layer sees at most {limit:,} positions, so that nothing of a longer text is "
            "left to evict",
        )
    if limit < UNLIMITED:
        return Support(limit, f"layers see at most {limit:,} positions")
    return Support(limit)


def _collect_integers(value: object) -> set[int]:
    """Return the whole numbers anywhere in a config."""
    if type(value) is int:  # not a bool
        return {value}
    if isinstance(value, dict):
        value = list(value.values())
    found = set()
    if isinstance(value, list | tuple):
        for each in value:
            found |= _collect_integers(each)
    return found


@torch.no_grad()
def keys_follow_rope(model: PreTrainedModel, rotate: Callable[[Tensor, int], Tensor]) -> bool:
    """Return whether rotate(keys, p) gives the keys of one token p positions later in every layer.

    The token's queries have to keep their lengths at a far position too, because some models scale
    queries by their position.
    """
    backbone = get_backbone(model)
    first = _run_one_token(model, backbone, 0)
    near = _run_one_token(model, backbone, START)
    far = _run_one_token(model, backbone, FAR)
    for (keys, query), (near_keys, _), (_, far_query) in zip(first, near, far, strict=True):
        if not _is_close(rotate(keys, START).float(), near_keys.float(), model.dtype):
            return False
        if not _is_close(query.float().norm(dim=-1), far_query.float().norm(dim=-1), model.dtype):
            return False
    return True


def _run_one_token(
    model: PreTrainedModel, backbone: nn.Module, position: int
) -> list[tuple[Tensor, Tensor]]:
    """Return every layer's keys (1, H, 1, D) and queries (1, H * G, 1, D) of a single token at
    `position`.
    """
    positions = torch.tensor([[position]], device=model.device)
    options: dict[str, object] = {}
    # transformers 5.2 scales queries by it.
    if "cache_position" in inspect.signature(backbone.forward).parameters:
        options["cache_position"] = positions[0]
    with _record_pass(model) as record:
        backbone(
            input_ids=torch.tensor([IDS[:1]], device=model.device),
            position_ids=positions,
            use_cache=True,
            **pass_cache(backbone, DynamicCache()),
            **options,
        )
    layers = len(list_pair_layers(model.config))
    if len(record.calls) != layers:  # else nothing would be compared
        raise ModelError(
            f"{type(model).__name__} called its attention {len(record.calls)} times for "
            f"{layers} layers."
        )
    return [(call.key, call.query) for call in record.calls]
