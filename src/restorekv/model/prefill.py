"""Filling a cache in chunks, and views of a filled cache that passes can read without changing it.

Only the decoder runs, never the LM head, and no gradient is recorded.
"""

import inspect
from itertools import pairwise
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from restorekv.cache.dense import (
    DenseLayer,
    LatentLayer,
    list_dense_layers,
    list_full_attention,
)
from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.cache.sliding import RecentLayer, SlidingLayer
from restorekv.cache.states import EmptyLayer, PairlessLayer, StateLayer, list_state_layers
from restorekv.cache.tail import CompressedLayer, count_queries
from restorekv.model.cache_argument import pass_cache
from restorekv.model.shape import (
    count_sharing_layers,
    find_empty_layers,
    find_state_layers,
    get_backbone,
    has_own_layers,
    is_latent_config,
    list_windows,
)

CHUNK = 4096
# The most entries of a chunk's mask, so that the mask takes no more memory for a million tokens
# than for 16,384.
MASK = 1 << 26
# The own pairs of a layer before a pass: Mllama asks every layer how many numbers it holds.
NOTHING = torch.empty(0)


AnyCache = TypeVar("AnyCache", bound=Cache)


@overload
def prefill(
    model: PreTrainedModel, ids: Tensor, chunk: int | None = None, *, whole: bool = False
) -> DynamicCache: ...


@overload
def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    chunk: int | None = None,
    *,
    into: AnyCache,
    whole: bool = False,
) -> AnyCache: ...


@torch.no_grad()
def prefill(
    model: PreTrainedModel,
    ids: Tensor,
    chunk: int | None = None,
    into: Cache | None = None,
    whole: bool = False,
) -> Cache:
    """Return a cache with keys and values (1, H, S + T, D) of every layer.

    A layer with a sliding window W holds only its last W - 1 columns. Layers with states keep those
    after the last token, and copies where they are marked (cache/states.py).

    Args:
        model: The model; only its decoder runs, chunk by chunk.
        ids: (1, S + T).
        chunk: Tokens of a chunk, which bounds the memory of activations; the default bounds the
            memory of the mask, too.
        into: A cache to append to; a new one by default.
        whole: Whether layers that leave no pairs are computed for every token too, for an observer.
    """
    # A hybrid model has windows in some layers, which keep fewer columns.
    full = make_full_cache(model) if into is None else into
    # The mask of a chunk has chunk * columns entries, which bounds the chunk of a long text.
    chunk = chunk or max(min(CHUNK, MASK // ids.shape[-1]), 1)
    backbone = get_backbone(model)
    options = {} if whole else skip_sharing_layers(backbone)
    states = list_state_layers(full.layers)
    position = full.get_seq_length() if states else 0
    for piece in ids.to(model.device).split(
        _list_sizes(ids.shape[-1], chunk, position, states), -1
    ):
        backbone(input_ids=piece, **pass_cache(backbone, full), use_cache=True, **options)
        position += piece.shape[-1]
        for layer in states:
            layer.copy_if_marked(position)
    return full


def _list_sizes(tokens: int, chunk: int, first: int, states: list[StateLayer]) -> list[int]:
    """Return the sizes of the pieces in which tokens are read: `chunk` each, and the rest. A piece
    also ends where a state is to be copied.

    `first` is the position of the first token.
    """
    ends = set(range(chunk, tokens, chunk)) | {tokens}
    last = tokens - 1
    # Some classes compute the states of a token alone in another way than those of several, as
    # Nemotron-H does, so that a last token is not left alone.
    if states and chunk > 2 and last in ends:
        ends ^= {last, last - 1}
    for layer in states:
        ends |= {mark - first for mark in layer.marks if 0 < mark - first < tokens}
    in_order = [0, *sorted(ends)]
    return [end - start for start, end in pairwise(in_order)]


def skip_sharing_layers(backbone: nn.Module) -> dict[str, int]:
    """Return the keyword argument of a pass of which only the cached pairs are used: the layers
    that share the pairs of earlier ones then compute the last token alone.

    They are 18 of the 42 layers of Gemma 4 E4B. Nothing for models without such layers, and for
    classes that cannot leave out tokens in them (Gemma 3n).
    """
    called: Any = backbone
    if not count_sharing_layers(called.config):
        return {}
    if "logits_to_keep" not in inspect.signature(called.forward).parameters:
        return {}
    return {"logits_to_keep": 1}


def make_full_cache(model: PreTrainedModel, margin: int = 0) -> DynamicCache:
    """Return an empty cache for a model's own passes.

    A layer with a sliding window W will hold only its last W - 1 + `margin` columns, so that the
    last `margin` columns can be read a second time.
    """
    full = DynamicCache()
    if has_own_layers(model):
        full.layers += make_hybrid_layers(model, margin)
    return full


def make_hybrid_layers(model: PreTrainedModel, margin: int = 0) -> list[Any]:
    """Return the empty layers of a full cache, one for each layer of a model, except for those that
    share the pairs of others.

    `margin` is how many more columns than W - 1 a layer with a window holds.
    """
    config = model.config.get_text_config()
    states = find_state_layers(config)
    empty = find_empty_layers(config)
    count = getattr(config, "number_of_conv_states", 1)
    is_latent = is_latent_config(config)
    layers: list[Any] = []
    for index, window in enumerate(list_windows(config)):
        if index in states:
            layers.append(StateLayer(count))
        elif index in empty:
            layers.append(EmptyLayer())
        elif window is None:
            layers.append(LatentLayer() if is_latent else DynamicLayer())
        else:
            layers.append(RecentLayer(window, margin))
    return layers


@torch.no_grad()
def make_empty_cache(model: PreTrainedModel) -> RaggedCache:
    """Return the ragged cache of a context without tokens, to which passes append from position 0.

    A pass over one token gives the shapes of all layers; nothing of it is kept.
    """
    full = prefill(model, torch.zeros(1, 1, dtype=torch.long))
    layers = list_dense_layers(full)
    nothing = [(layer.keys[:, :, :0], layer.values[:, :, :0]) for layer in layers]
    full_attention = list_full_attention(full)
    heads = full_attention[0].keys.shape[1]
    keep = torch.zeros(len(full_attention), heads, 0, dtype=torch.bool)
    empty = RaggedCache.from_kept_pairs(full, keep, nothing)
    for index, layer in enumerate(empty.layers):
        if isinstance(layer, StateLayer):
            # The token that was read is not part of the context; before any token, states are zero.
            nothing_read = {name: state * 0 for name, state in layer.named_tensors.items()}
            empty.layers[index] = StateLayer.from_tensors(nothing_read)
    return empty


class ReadOnlyLayer(DynamicLayer):
    """A view of a dense layer, which shows its pairs followed by those of the current pass.

    `keys` and `values` hold only the pairs of the pass. Nothing has to be removed after a pass, and
    only one layer at a time holds the joined copy. The dense layer is not touched before the pass
    reaches it, because until then an offloaded layer is not in memory.
    """

    def __init__(self, dense: DenseLayer, columns: int | None = None) -> None:
        super().__init__()
        self.dense = dense
        self.columns = columns
        self.is_sliding = dense.is_sliding
        self.is_initialized = True
        self.keys = NOTHING
        self.values = NOTHING

    @property
    def first(self) -> int:
        """Position of the first column that the dense layer holds."""
        return self.dense.first if isinstance(self.dense, RecentLayer) else 0

    def get_seq_length(self, *_: object) -> int:
        if self.columns is None:
            return self.dense.get_seq_length()
        return self.columns

    # transformers 5.2 names the parameter `cache_position`.
    def get_mask_sizes(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, query: int | Tensor
    ) -> tuple[int, int]:
        """Return the mask's width and the position of its first column."""
        return self.get_seq_length() - self.first + count_queries(query), self.first

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return all pairs (1, H, S + T + Q, D), the new ones (1, H, Q, D) last."""
        # Kept because a restore pass returns the pairs that it made.
        self.keys = key_states
        self.values = value_states
        keys, values = self._get_cached_pairs()
        return torch.cat([keys, key_states], -2), torch.cat([values, value_states], -2)

    def _get_cached_pairs(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a pass reads."""
        # A layer with a window shows all columns that it holds, which must include what a query
        # here can see.
        if isinstance(self.dense, RecentLayer):
            end = self.get_seq_length()
            start = max(end - self.dense.window + 1, 0)
            self.dense.take_columns(start, end)  # refuses what is no longer held
            return self.dense.take_columns(self.first, end)
        return self.dense.keys[..., : self.columns, :], self.dense.values[..., : self.columns, :]


def read_only_view(full: Cache, columns: int | None = None) -> Cache:
    """Return a cache for passes that read `full`, or its first `columns`, and never change it.

    For a ragged cache, `columns` counts columns of its tail; its whole context is always read. The
    states of layers that keep them are those after these columns, which have to be marked.
    """
    dropped = 0
    position = columns
    if columns is not None and isinstance(full, RaggedCache):
        dropped = full.columns - columns
        position = full.get_seq_length() - dropped
    layers: list[Any] = []
    for layer in list_dense_layers(full):
        if isinstance(layer, PairlessLayer):
            layers.append(layer.copy_at(position))
        else:
            layers.append(_make_read_only_layer(layer, columns, dropped))
    return Cache(layers=layers)


def _make_read_only_layer(
    layer: DenseLayer, columns: int | None, dropped: int = 0
) -> ReadOnlyLayer | RaggedLayer | SlidingLayer:
    """Return the read-only view of one layer, with its first `columns` columns or all for None.

    The tail of a layer with a window may begin later than other tails, so it is given without its
    last `dropped` columns instead.
    """
    if not isinstance(layer, RaggedLayer | SlidingLayer):
        return ReadOnlyLayer(layer, columns)
    keys, values = layer.keys_and_values
    if isinstance(layer, SlidingLayer):
        end = layer.columns - dropped
        return layer.with_restore_cache((keys[..., :end, :], values[..., :end, :]))
    return RaggedLayer(
        layer.context_keys,
        layer.context_values,
        layer.offsets,
        layer.positions,
        layer.seen,
        keys[..., :columns, :],
        values[..., :columns, :],
        layer.bias,
    )


class QueryOnlyLayer(CompressedLayer):
    """A layer that shows a pass only its own pairs, at positions after `seen` cached ones.

    KVzip's passes attend to chosen columns of the cache, so their observer reads the full cache and
    computes attention itself.
    """

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen
        self.is_initialized = True
        self.keys = NOTHING
        self.values = NOTHING

    @property
    def columns(self) -> int:
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return (1, H, Q, D) unchanged."""
        return key_states, value_states


def query_only_view(full: Cache) -> Cache:
    """Return a cache for passes whose observer reads `full` itself; nothing of it is copied.

    Layers with a window or with states are not observed: the pass reads them as in a read-only
    view, so that every such pass begins with what they hold at the end of the text.
    """
    seen = full.get_seq_length()
    layers: list[Any] = []
    for layer in list_dense_layers(full):
        if isinstance(layer, PairlessLayer):
            layers.append(layer.copy())
        elif layer.is_sliding:
            layers.append(_make_read_only_layer(layer, None))
        else:
            layers.append(QueryOnlyLayer(seen))
    return Cache(layers=layers)
