"""Up to which position the cache computes what a model computes: the limits that a probe finds.

Which pairs a layer sees at any distance follows from the function that transformers makes its masks
from: it takes indices, so no long text has to be read. RestoreKV is exact up to the first position
that does not see the whole text. In a hybrid model, layers with a window alternate with others
(shape.py): the function of the windowed layers has to show exactly the window that the config
names, and only the other layers can limit the positions.

RoPE may rotate old keys again when a text gets long, and some models scale queries by the number of
tokens that their cache has seen. Passes over few tokens show both.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from restorekv.cache.states import PairlessLayer
from restorekv.errors import ModelError
from restorekv.model.cache_argument import pass_cache
from restorekv.model.prefill import QueryOnlyLayer, make_full_cache, make_hybrid_layers
from restorekv.model.probe_passes import (
    CACHED,
    IDS,
    START,
    PassRecord,
    ProbedModel,
    is_close,
    record_pass,
)
from restorekv.model.shape import get_backbone, list_attention_modules

UNLIMITED = sys.maxsize
FAR = 1 << 20  # a position beyond every length that configs mention
DISTANCES = 1 << 17  # positions whose view of the first column is computed one by one
PAIRS = 4096  # random pairs of positions whose visibility is computed
EDGE = 64  # positions near the start and near the limit whose visibility is computed


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
        has_cap: Whether layers have a cap on their logits (attention/caps.py).
    """

    positions: int = UNLIMITED
    beyond: str = ""
    changes_keys: bool = False
    has_sinks: bool = False
    has_cap: bool = False


def find_limit(probed: ProbedModel, record: PassRecord, cache: Any) -> Support:
    """Return the narrowest limit of a model.

    Args:
        probed: The model.
        record: The calls and masks of a pass over all tokens.
        cache: The pairs of that pass.
    """
    limits = [
        _find_window_limit(probed, record),
        _find_cache_limit(probed),
        _find_rotation_limit(probed, cache),
        _find_scale_limit(probed),
    ]
    return min(limits, key=lambda limit: limit.positions)


def _find_window_limit(probed: ProbedModel, record: PassRecord) -> Support:
    """Return up to which position every layer sees what RestoreKV assumes: the whole text or,
    in windowed layers of a hybrid model, their window.

    This follows from the masks, and from the windows that layers name.
    """
    limits = [UNLIMITED]
    functions: dict[int | None, set[Callable]] = {}  # by the window of the layers
    for call, source in zip(record.calls, probed.attended, strict=True):
        window = probed.windows[source]
        own = [function for mask, function in record.masks if _is_same_mask(mask, call.mask)]
        if call.mask is not None and not own:  # it may hide pairs of a longer text
            raise probed.make_refusal("makes a mask of its own")
        functions.setdefault(window, set()).update(own)
        named = call.options.get("sliding_window")
        if named is not None and window is None:
            limits.append(int(named))
    if not any(functions.values()):  # nothing says what its layers see of a longer text
        raise probed.make_refusal("calls attention without a mask")
    seen_whole = []
    for window, own in functions.items():
        for function in own:
            seen_whole.append(_count_seen_whole(probed, function))
            if window is None:
                limits.append(seen_whole[-1])
            else:
                _check_window(probed, function, window)
    limit = min(limits)
    has_limit = limit < UNLIMITED
    return _make_window_limit(limit, in_every_layer=has_limit and max(seen_whole) == limit)


def _check_window(probed: ProbedModel, function: Callable, window: int) -> None:
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
        if not torch.equal(_compute_visible(probed, function, rows, keys), expected):
            raise probed.make_refusal("hides or shows pairs in a way of its own")


def _count_seen_whole(probed: ProbedModel, function: Callable) -> int:
    """Return how many positions, from the first on, see everything before them by a mask
    function; UNLIMITED if nothing is ever hidden.
    """
    # Near positions one by one; far ones around the config's numbers, and at powers of two.
    later = {1 << power for power in range(18, 31)}
    for number in _collect_integers(probed.model.config.to_dict()):
        later.update((number - 1, number, number + 1))
    later = sorted(each for each in later if DISTANCES <= each < 1 << 31)
    far = torch.cat([torch.arange(DISTANCES), torch.tensor(later)])
    sees_first = _compute_visible(probed, function, far, torch.zeros_like(far))
    limit = UNLIMITED
    if not sees_first.all():
        limit = int(far[sees_first.long().argmin()])
    if limit <= 1:
        raise probed.make_refusal("makes a mask of its own")
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
    if not torch.equal(_compute_visible(probed, function, queries, keys), keys <= queries):
        raise probed.make_refusal("hides or shows pairs in a way of its own")
    return limit


def _compute_visible(
    probed: ProbedModel, function: Callable, queries: Tensor, keys: Tensor
) -> Tensor:
    """Return for each pair of a query's and a key's position whether the query sees the key."""
    device = probed.model.device
    zero = torch.zeros((), dtype=torch.long, device=device)
    seen = function(zero, zero, queries.to(device), keys.to(device))
    return torch.as_tensor(seen, device=device).expand(len(queries)).cpu()


def _find_cache_limit(probed: ProbedModel) -> Support:
    """Return the limit set by the windows of the cache that transformers makes for the model.

    Refuses a model whose cache has states that are not pairs.
    """
    limits = [UNLIMITED]
    layers: list[Any] = DynamicCache(config=probed.model.config).layers
    # Layers that share the pairs of others may have a place in it, which stays empty.
    if len(layers) == len(probed.pair_layers):
        layers = layers[: len(probed.windows)]
    # `StateLayer` stands for the first class alone, and `EmptyLayer` for the second.
    known = dict.fromkeys(probed.states, "LinearAttentionLayer")
    known |= dict.fromkeys(probed.empty, "DummyLayer")
    # A state that is beside pairs is in the same layer here.
    known |= dict.fromkeys(probed.parallel, "LinearAttentionAndFullAttentionLayer")
    for index, name in known.items():
        if index < len(layers) and type(layers[index]).__name__ != name:
            raise probed.make_refusal(f"keeps {type(layers[index]).__name__} of its own")
    windows = probed.windows if len(layers) == len(probed.windows) else [None] * len(layers)
    for index, (layer, window) in enumerate(zip(layers, windows, strict=True)):
        if index in known:
            continue
        if getattr(layer, "is_sliding", False):
            if int(layer.sliding_window) != window:
                limits.append(int(layer.sliding_window))
        elif window is not None:
            raise probed.make_refusal("keeps whole texts in layers that are said to have a window")
        elif type(layer) is not DynamicLayer:
            raise probed.make_refusal(f"keeps {type(layer).__name__} besides keys and values")
    return _make_window_limit(min(limits))


def _find_rotation_limit(probed: ProbedModel, cache: Any) -> Support:
    """Return up to which position RoPE rotates keys as it did before.

    The kinds "dynamic" and "longrope" change the frequencies for longer texts, and with them
    all keys.
    """
    own = [layer.keys[0, :, :CACHED].float() for layer in _list_with_pairs(cache)]
    try:
        keys = _compute_keys(probed, FAR)
    except Exception:  # a table of positions that ends
        keys = None
    if keys is not None:
        pairs = zip(own, keys, strict=True)
        if all(probed.is_close(near[:, -1], far[:, -1]) for near, far in pairs):
            # Layers with states see the order of tokens, so that some models rotate nothing.
            if probed.states:
                return Support()
            raise probed.make_refusal("has no RoPE that follows the positions it is given")
        if _are_keys_unchanged(probed, own, keys):
            return Support()
    # Somewhere the keys change: at one of the numbers in the config.
    numbers = _collect_integers(probed.model.config.to_dict())
    lengths = sorted(each for each in numbers if START + CACHED < each < FAR)
    exact = [each for each in lengths if _are_keys_unchanged_at_length(probed, own, each)]
    if not exact or exact != lengths[: len(exact)]:
        raise probed.make_refusal("rotates keys in a way that depends on what follows them")
    limit = exact[-1]
    # After a longer text dynamic RoPE keeps its frequencies at exactly the limit, and changes
    # them back below it.
    if keys is not None:
        _compute_keys(probed, FAR)
    if not _are_keys_unchanged_at_length(probed, own, limit):
        limit -= 1
    _compute_keys(probed, START + CACHED)  # the first frequencies again
    return Support(
        limit,
        f"beyond {limit:,} positions RoPE changes the keys of all earlier tokens",
        changes_keys=True,
    )


def _find_scale_limit(probed: ProbedModel) -> Support:
    """Return up to which position queries do not depend on how many tokens the cache has seen.

    Llama 4 scales the queries of some layers by that number instead of their position, and the
    rows of a batch have one cache.
    """
    own = _compute_queries(probed, 0)
    # Texts are read in pieces without positions, so a model has to number the tokens of a piece
    # from the end of what its cache holds.
    if not _are_queries_equal(probed, own, _compute_queries(probed, START, numbered=False)):
        raise probed.make_refusal("numbers the tokens after those in its cache from 0 again")
    if _are_queries_equal(probed, own, _compute_queries(probed, FAR)):
        return Support()
    for length in sorted(_collect_integers(probed.model.config.to_dict())):
        # The number may be the last position that is not scaled, or the first that is.
        if not 1 < length < FAR:
            continue
        if not _are_queries_equal(probed, own, _compute_queries(probed, length)):
            limit = length - 1
            return Support(limit, f"beyond {limit:,} positions layers scale their queries")
    raise probed.make_refusal("scales its queries by what its cache has seen")


def _are_queries_equal(probed: ProbedModel, own: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether the queries of every layer are equal."""
    return all(probed.is_close(two, one, strict=True) for one, two in zip(own, others, strict=True))


def _compute_queries(probed: ProbedModel, seen: int, numbered: bool = True) -> list[Tensor]:
    """Return every layer's query (1, H * G, 1, D) of one token, at the position START always, if
    its cache has seen so many tokens.

    With `numbered` false, the model is not told the position.
    """
    layers = make_hybrid_layers(probed.model)
    for index, layer in enumerate(layers):
        if not isinstance(layer, PairlessLayer):
            layers[index] = QueryOnlyLayer(seen)
    cache = Cache(layers=layers)
    with record_pass(probed.model) as record:
        probed.read_tokens(probed.backbone, cache, slice(1), numbered=numbered)
    return [call.query.float() for call in record.calls]


def _are_keys_unchanged_at_length(probed: ProbedModel, own: list[Tensor], length: int) -> bool:
    """Return whether a text of that length leaves the keys of its first tokens unchanged."""
    try:
        return _are_keys_unchanged(probed, own, _compute_keys(probed, length - 1))
    except Exception:  # a table of positions that ends
        return False


def _are_keys_unchanged(probed: ProbedModel, own: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether all keys but the last token's are equal."""
    pairs = zip(own, others, strict=True)
    return all(probed.is_close(two[:, :-1], one[:, :-1], strict=True) for one, two in pairs)


def _compute_keys(probed: ProbedModel, last: int) -> list[Tensor]:
    """Return every layer's keys (H, CACHED, D) if the last token's position is `last`."""
    positions = probed.positions[:, :CACHED].clone()
    positions[:, -1] = last
    cache: Any = make_full_cache(probed.model, margin=CACHED)
    probed.read_tokens(probed.backbone, cache, slice(CACHED), positions)
    return [layer.keys[0].float() for layer in _list_with_pairs(cache)]


def _list_with_pairs(cache: Any) -> list[Any]:
    """Return the layers of a cache that have pairs."""
    return [layer for layer in cache.layers if not isinstance(layer, PairlessLayer)]


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
        if not is_close(rotate(keys, START).float(), near_keys.float(), model.dtype):
            return False
        if not is_close(query.float().norm(dim=-1), far_query.float().norm(dim=-1), model.dtype):
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
    with record_pass(model) as record:
        backbone(
            input_ids=torch.tensor([IDS[:1]], device=model.device),
            position_ids=positions,
            use_cache=True,
            **pass_cache(backbone, make_full_cache(model)),
            **options,
        )
    layers = len(list_attention_modules(model))
    if len(record.calls) != layers:  # else nothing would be compared
        raise ModelError(
            f"{type(model).__name__} called its attention {len(record.calls)} times for "
            f"{layers} layers."
        )
    return [(call.key, call.query) for call in record.calls]
