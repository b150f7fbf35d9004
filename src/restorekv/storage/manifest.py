"""What a cache file records of its cache: how it was made, and what it holds."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypedDict

import torch

from restorekv.cache.ragged import AnyTailLayer, RaggedCache, RaggedLayer
from restorekv.cache.states import EmptyLayer, StateLayer
from restorekv.model.prompt import Context
from restorekv.model.shape import get_dtype_name


class CacheCounts(TypedDict):
    """The manifest fields about a cache's pairs and bytes."""

    pairs: int
    pairs_of_prefix: int
    pairs_held: int
    bytes_full: int
    bytes_held: int
    shares_pairs: bool


def count_pairs_and_bytes(
    cache: RaggedCache, prefix: int, columns: int, prefix_policy: str
) -> CacheCounts:
    """Return the manifest fields about a cache's pairs and bytes.

    `columns` is S + T, those of the full cache, and `prefix` is S.
    """
    first = cache.full_attention[0]
    prefix_pairs = cache.count_prefix_pairs(prefix)
    # In a layer with a window, even a full cache holds no more than that.
    numbers = len(cache.full_attention) * columns * _count_column_numbers(first)
    for layer in cache.sliding:
        numbers += min(layer.window - 1, columns) * _count_column_numbers(layer)
    of_states = 0
    for state_layer in cache.with_states:
        of_states += sum(tensor.nbytes for tensor in state_layer.list_tensors())
    return {
        "pairs": cache.pairs_held - (prefix_pairs if prefix_policy == "free" else 0),
        "pairs_of_prefix": prefix_pairs,
        "pairs_held": cache.pairs_held,
        "bytes_full": numbers * first.dtype.itemsize + of_states,
        "bytes_held": cache.nbytes,
        "shares_pairs": first.shares_pairs,
    }


def describe_states(cache: RaggedCache) -> dict[str, Any]:
    """Return the manifest fields about the layers without pairs, which are empty for a cache
    without such layers. The states of one model's layers have the same shapes.
    """
    layers = list(enumerate(cache.layers))
    tensors = {}
    if cache.with_states:
        tensors = cache.with_states[0].named_tensors
    return {
        "states": [index for index, layer in layers if isinstance(layer, StateLayer)],
        "empty_layers": [index for index, layer in layers if isinstance(layer, EmptyLayer)],
        "state_shapes": {name: list(state.shape[1:]) for name, state in tensors.items()},
        "state_dtypes": {name: get_dtype_name(state.dtype) for name, state in tensors.items()},
    }


def _count_column_numbers(layer: AnyTailLayer) -> int:
    """Return how many numbers one column of a layer has: keys and values of every head, which are
    the same numbers in latent attention.
    """
    shares_pairs = isinstance(layer, RaggedLayer) and layer.shares_pairs
    return (1 if shares_pairs else 2) * layer.heads * layer.restore_keys.shape[-1]


# To add a field: set it in `pipeline.make_manifest`, and where caches are derived from others
# (`for_derived_cache` and its callers); check it in cache_checks.py; and raise the version of KIND
# in cache_file.py and in portable.py, whose files hold the same record.
@dataclass(frozen=True)
class Manifest:
    """How a cache was made and what it holds."""

    model: str  # name or path, for people
    fingerprint: str  # of the base weights; must match on load
    rope: dict[str, Any]  # must match on load
    template: str  # hash of the chat template's text around the user's words
    tokens_hash: str  # of the names of the text's tokens (tokenize.py); must match on load
    dtype: str
    shape: dict[str, int]  # layers, heads, groups, head_dim, hidden
    prefix: int  # S
    tokens: int  # T
    restore_tokens: int  # n
    ratio: str  # exact fraction, as "1/20"
    prefix_policy: str
    on_small_budget: str
    allocation: str
    restore_from: str
    offset: int
    evictor: str
    # The record of the restore adapter: the fields of cache_checks.ADAPTER_ENTRIES.
    adapter: dict[str, Any] | None
    pairs: int  # what the budget counts: all that are held; under "free", without the prefix's
    pairs_of_prefix: int  # kept pairs that came from the chat prefix
    pairs_held: int  # everything, prefix and restore cache included
    bytes_full: int  # of the full cache, S + T columns
    bytes_held: int  # of every tensor of the compressed cache
    seconds: dict[str, float]  # per phase
    versions: dict[str, str]  # of the libraries
    kv_dtype: str  # of the retained pairs: "model" for the model's dtype, or "int8", "fp8"
    streaming_chunk: int | None  # tokens of a chunk, if the context was evicted during its prefill
    separator: str  # what is before every question
    # Tokens of the text's end that were left out because the model has no positions for them.
    cut: int
    system: str  # the system message before the text, if one was given
    parts: list[int]  # tokens of each text of a context that grew or was composed
    earlier: int  # restore pairs of earlier parts in every head, among the retained pairs
    # For a hybrid model: the window of every layer, or 0 if it sees the whole text; `layers` of the
    # shape counts only these. Files of other models do not have this field.
    windows: list[int] = field(default_factory=list)
    # For a hybrid model whose layers with a window have other heads than those of `shape`: their
    # heads and head_dim. Other files do not have this field.
    sliding_shape: dict[str, int] = field(default_factory=dict)
    # For a model with layers that keep states: the numbers of these layers, which `layers` of the
    # shape does not count, and shapes and dtypes of the states of each, by name, without the batch.
    # Other files do not have these fields.
    states: list[int] = field(default_factory=list)
    state_shapes: dict[str, list[int]] = field(default_factory=dict)
    state_dtypes: dict[str, str] = field(default_factory=dict)
    # The numbers of the layers that keep neither pairs nor states. Other files do not have this
    # field.
    empty_layers: list[int] = field(default_factory=list)
    # Whether the keys of the context are its values too and are held once, as for latent attention.
    # Files in which they are not do not have this field.
    shares_pairs: bool = False
    # For a text that ends with a folded conversation, which the next question follows directly: the
    # separator that questions have again once a text is appended. Other files do not have this
    # field.
    folded_separator: str | None = None

    def to_json(self) -> dict:
        """Return the manifest as files hold it."""
        entries = asdict(self)
        if not self.windows:
            del entries["windows"]
        if not self.sliding_shape:
            del entries["sliding_shape"]
        if not self.states:
            for name in ("states", "state_shapes", "state_dtypes"):
                del entries[name]
        if not self.empty_layers:
            del entries["empty_layers"]
        if not self.shares_pairs:
            del entries["shares_pairs"]
        if self.folded_separator is None:
            del entries["folded_separator"]
        return entries

    @property
    def layers(self) -> int:
        """The layers of a model without windows, whatever they keep."""
        return self.shape["layers"] + len(self.states) + len(self.empty_layers)

    @property
    def positions(self) -> int:
        """How many positions the context takes, evicted tokens and restore tokens included; the
        first token of a question has this position.
        """
        return self.prefix + self.tokens + self.offset + self.restore_tokens

    def count_sliding_columns(self) -> list[int]:
        """Return how many columns of the text each layer with a window holds, in every head."""
        columns = self.prefix + self.tokens
        # A layer with a window holds its last W - 1 columns, or the whole text if that is shorter.
        return [min(window - 1, columns) for window in self.windows if window]

    @property
    def sliding_heads(self) -> int:
        """The KV heads of a layer with a window."""
        return (self.sliding_shape or self.shape)["heads"]

    @property
    def sliding_head_dim(self) -> int:
        """The head dim of a layer with a window."""
        return (self.sliding_shape or self.shape)["head_dim"]

    @property
    def sliding_pairs(self) -> int:
        """Pairs of the layers with a window, restore cache included, which no budget counts."""
        held = self.count_sliding_columns()
        return self.sliding_heads * (sum(held) + len(held) * self.restore_tokens)

    @property
    def sliding_bytes(self) -> int:
        """Bytes of these pairs, which are always in the model's dtype."""
        width = self.sliding_head_dim * getattr(torch, self.dtype).itemsize
        return 2 * self.sliding_pairs * width

    @property
    def state_bytes(self) -> int:
        """Bytes of all states."""
        each = 0
        for name, shape in self.state_shapes.items():
            each += math.prod(shape) * getattr(torch, self.state_dtypes[name]).itemsize
        return len(self.states) * each

    def for_derived_cache(self, context: Context, cache: RaggedCache, **changed: Any) -> Manifest:
        """Return the manifest of a cache that was derived from this one's cache (grown, composed).

        The cache gives all counts; pass every other field that differs as `changed`.
        """
        counted = count_pairs_and_bytes(
            cache, context.prefix_length, context.num_tokens, self.prefix_policy
        )
        return replace(
            self,
            prefix=context.prefix_length,
            tokens=context.text_tokens,
            restore_tokens=cache.restore_length,
            **counted,
            **changed,
        )
