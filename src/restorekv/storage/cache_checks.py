"""The checks that a cache file can be what `compress` wrote, and that all its parts agree with each
other.

A checksum proves that a file is unchanged since it was sealed, not that it is harmless. So types,
ranges, shapes, dtypes, offsets, ids, sums and finiteness are checked before a tensor is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from itertools import pairwise
from typing import Any, get_type_hints
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache import quantized
from restorekv.cache.quantized import KV_DTYPES, QUANTIZED_DTYPES, compute_scale_shapes
from restorekv.cache.ragged import RaggedCache
from restorekv.cache.states import KINDS
from restorekv.compression.budget import ON_SMALL_BUDGET, PREFIX_POLICIES, parse_ratio
from restorekv.errors import CacheFileError, RestoreKVError, make_printable, warn
from restorekv.files import matches_type
from restorekv.model.identity import identify_model
from restorekv.model.prefill import make_empty_cache
from restorekv.model.prompt import Context, encode_text, hash_template, split_template
from restorekv.model.rope import ROUNDED, describe_rotation
from restorekv.model.shape import (
    CacheShape,
    find_empty_layers,
    find_state_layers,
    get_dtype_name,
)
from restorekv.model.tokenize import hash_token_names
from restorekv.restore.choices import RESTORE_FROM
from restorekv.seal import largest_number
from restorekv.size_limits import (
    AROUND_LETTERS,
    AROUND_TOKENS,
    CELLS,
    LARGEST_NUMBER,
    LAYERS,
    NAME_LETTERS,
    POSITIONS,
    SYSTEM_LETTERS,
    WIDTH,
)
from restorekv.storage.manifest import Manifest, count_pairs_and_bytes, describe_states

SHAPE_NAMES = {field.name for field in fields(CacheShape)}
COUNT_FIELDS = (
    "prefix",
    "restore_tokens",
    "offset",
    "pairs",
    "pairs_of_prefix",
    "pairs_held",
    "bytes_full",
    "bytes_held",
    "earlier",
)
FIELD_CHOICES = {
    "dtype": ("float32", "bfloat16", "float16", "float64"),
    "kv_dtype": KV_DTYPES,
    "prefix_policy": PREFIX_POLICIES,
    "on_small_budget": ON_SMALL_BUDGET,
    "restore_from": RESTORE_FROM,
}
PAIR_PARTS = ("keys", "values")
LARGEST_COUNT = 2**62  # of pairs or bytes
STATE_DIMENSIONS = 4
# What `describe_states` returns for a model; for models in memory alone.
_states_by_model: WeakKeyDictionary[PreTrainedModel, dict[str, Any]] = WeakKeyDictionary()
# Texts of several lines, and how many characters they may have.
TEXT_LIMITS = {
    "separator": AROUND_LETTERS,
    "folded_separator": AROUND_LETTERS,
    "system": SYSTEM_LETTERS,
}
COUNTED_SIZES = ("layers", "heads", "groups")
SHAPE_LIMITS = dict.fromkeys(SHAPE_NAMES, WIDTH) | dict.fromkeys(COUNTED_SIZES, LAYERS)
# What a record of the adapter holds; the first two are in every one.
ADAPTER_ENTRIES: dict[str, Any] = {
    "hash": str,
    "restore_tokens": int,
    "source": str | None,
    "evictor": str | None,
    "prefix_policy": str | None,
    "ratio_range": list[float] | None,
    "allocation": str | None,
    "restore_from": str | None,
}


class ContradictionError(CacheFileError):
    """An error in a file's contents; its message completes a sentence that begins with the file's
    name.
    """


def require(condition: bool, problem: str) -> None:
    """Raise ContradictionError unless a condition holds.

    `problem` begins with a verb, since it completes a sentence that begins with the file's name.
    """
    if not condition:
        raise ContradictionError(problem)


def check_manifest(manifest: Manifest) -> None:
    """Check types and ranges of every field."""
    for name, hint in get_type_hints(type(manifest)).items():
        # Types first: everything after this computes with the values.
        value = getattr(manifest, name)
        require(matches_type(value, hint), f"has a {name} that is not of the type {hint}")
        if isinstance(value, str):
            max_chars = TEXT_LIMITS.get(name, NAME_LETTERS)
            require(
                len(value) <= max_chars,
                f"records {len(value):,} characters as its {name}, more than {max_chars:,}",
            )
            # Characters that cannot be printed may act on a terminal.
            require(
                name in TEXT_LIMITS or value.isprintable(),
                f"records {make_printable(value)} as its {name}",
            )
    for name, choices in FIELD_CHOICES.items():
        require(
            getattr(manifest, name) in choices,
            f"records the {name} {make_printable(getattr(manifest, name))}",
        )
    shape = manifest.shape
    fits = set(shape) == SHAPE_NAMES
    fits = fits and all(0 < size <= SHAPE_LIMITS[name] for name, size in shape.items())
    require(fits, f"records an impossible model shape ({make_printable(shape)})")
    for name in COUNT_FIELDS:
        count = getattr(manifest, name)
        require(0 <= count <= LARGEST_COUNT, f"records {count} as its {name}")
    positions = manifest.prefix + manifest.tokens + manifest.offset
    cells = shape["layers"] * shape["heads"] * (positions + manifest.earlier)
    fits = manifest.tokens > 0 and positions <= POSITIONS and cells <= CELLS
    require(
        fits, f"records {manifest.tokens} tokens at {positions} positions, which no context has"
    )
    if manifest.parts:
        require(min(manifest.parts) > 0, "records an appended part without tokens")
        in_parts = sum(manifest.parts)
        require(
            in_parts == manifest.tokens,
            f"records {manifest.tokens} tokens, but {in_parts} in its parts",
        )
    if manifest.folded_separator is not None:
        require(
            bool(manifest.parts) and not manifest.separator,
            "records a folded conversation that a question does not follow",
        )
    if manifest.streaming_chunk is not None:
        require(
            manifest.streaming_chunk > 0,
            f"records a streaming_chunk of {manifest.streaming_chunk} tokens",
        )
    require(
        all(seconds >= 0 for seconds in manifest.seconds.values()), "records a negative duration"
    )
    for name in ("versions", "seconds"):
        require(
            all(
                str(part).isprintable() for item in getattr(manifest, name).items() for part in item
            ),
            f"records {name} that cannot be printed",
        )
    check_windows(manifest)
    check_states(manifest)
    check_adapter(manifest.adapter)
    try:
        parse_ratio(manifest.ratio)
    except RestoreKVError as error:
        raise ContradictionError(f"has an invalid ratio: {error}") from None


def check_windows(manifest: Manifest) -> None:
    """Check the windows of a hybrid model's layers; an ordinary model has none."""
    windows = manifest.windows
    if not windows:
        require(not manifest.sliding_shape, "records a sliding_shape and no windows")
        return
    full = windows.count(0)
    # A hybrid model has at least one layer with a window and at least one without.
    fits = len(windows) <= LAYERS and full == manifest.shape["layers"] and full < len(windows)
    fits = fits and all(window == 0 or 2 <= window <= POSITIONS for window in windows)
    require(fits, "records windows that no model's layers have")
    own = manifest.sliding_shape
    if own:
        fits = set(own) == {"heads", "head_dim"} and all(
            0 < size <= SHAPE_LIMITS[name] for name, size in own.items()
        )
        require(fits, "records a sliding_shape that no model's layers have")
    cells = manifest.sliding_heads * sum(manifest.count_sliding_columns())
    require(cells <= CELLS, "records windows that no model's layers have")


def check_states(manifest: Manifest) -> None:
    """Check the record of the layers without pairs; an ordinary model has none."""
    states = manifest.states
    shapes = manifest.state_shapes
    dtypes = manifest.state_dtypes
    empty = manifest.empty_layers
    if not states:
        require(not shapes and not dtypes, "records states and no layers with them")
        require(not empty, "records layers that hold nothing, which only a model with states has")
        return
    fits = not manifest.windows and set(shapes) == set(dtypes) and bool(shapes)
    # Each list in ascending order, and with the other layers no more than a model has.
    fits = fits and manifest.layers <= LAYERS and states == sorted(states)
    fits = fits and empty == sorted(empty) and len({*states, *empty}) == len(states) + len(empty)
    fits = fits and min(*states, *empty, manifest.layers) >= 0
    fits = fits and max(*states, *empty, 0) < manifest.layers
    # Each kind has the states 0, 1, ...
    for kind in KINDS:
        numbers = [name for name in shapes if name.startswith(f"{kind}.")]
        fits = fits and set(numbers) == {f"{kind}.{index}" for index in range(len(numbers))}
    fits = fits and all(name.partition(".")[0] in KINDS for name in shapes)
    cells = 0
    for name, shape in shapes.items():
        fits = fits and 1 <= len(shape) <= STATE_DIMENSIONS and min(shape) > 0
        fits = fits and max(shape) <= WIDTH and dtypes.get(name) in FIELD_CHOICES["dtype"]
        if fits:
            cells += len(states) * math.prod(shape)
    require(fits and cells <= CELLS, "records states that no model's layers keep")


def check_adapter(adapter: dict[str, Any] | None) -> None:
    """Check the record of the adapter that a cache was made with, if there was one."""
    if adapter is None:
        return
    require(
        {"hash", "restore_tokens"} <= set(adapter), "does not say which adapter it was made with"
    )
    for name, value in adapter.items():
        # Unknown entries are refused: nothing checks them.
        known = name in ADAPTER_ENTRIES and matches_type(value, ADAPTER_ENTRIES[name])
        require(known, f"records an invalid adapter field {make_printable(name)}")
        fits = not isinstance(value, str) or (len(value) <= NAME_LETTERS and value.isprintable())
        require(fits, f"records an adapter's {name} that is too long or cannot be printed")
    require(0 < adapter["restore_tokens"] <= POSITIONS, "records an adapter without restore tokens")


def check_suffix(text: str, ids: Tensor) -> None:
    """Check the length of what follows every question, given as a text and its ids (1, P)."""
    limits = f"{AROUND_LETTERS:,} characters or {AROUND_TOKENS:,} tokens"
    fits = len(text) <= AROUND_LETTERS and ids.shape[-1] <= AROUND_TOKENS
    require(fits, f"has more than {limits} after every question")


def check_model(path: object, manifest: Manifest, model: PreTrainedModel) -> None:
    """Refuse a model if its weights, shape, dtype or rotation of keys differ from those of the
    model that the file was made with.
    """
    identity = identify_model(model)
    if manifest.dtype != get_dtype_name(model.dtype):
        raise CacheFileError(
            f"{path} holds {manifest.dtype}; load the model with dtype={manifest.dtype!r}."
        )
    recorded = manifest.shape, manifest.windows, manifest.sliding_shape
    own = vars(identity.shape), identity.windows, identity.sliding_shape
    rope = describe_rotation(model)
    # A model of another shape is another model, whose RoPE says nothing.
    if manifest.rope != rope and recorded == own:
        fix = "load the model with the same RoPE configuration"
        if manifest.rope.get(ROUNDED) != rope.get(ROUNDED):
            fix = "load the model with dtype=..., since model.to(...) rounds its RoPE"
        raise CacheFileError(
            f"{path} was made with RoPE {make_printable(manifest.rope)}, but the model has "
            f"{rope}; {fix}."
        )
    if manifest.fingerprint != identity.fingerprint:
        # A model that was built from a config has no name.
        name = f" ({make_printable(manifest.model)})" if manifest.model else ""
        raise CacheFileError(
            f"{path} was made with a different model{name}, or the same with other weights; load "
            "that one."
        )
    if recorded != own or not _has_same_states(manifest, model):
        raise CacheFileError(
            f"{path} records a shape that is not the model's; compress the context again."
        )


def _has_same_states(manifest: Manifest, model: PreTrainedModel) -> bool:
    """Return whether a model's layers without pairs are those that the manifest records, and keep
    states of the same shapes.
    """
    numbers = list(find_state_layers(model.config))
    if manifest.empty_layers != list(find_empty_layers(model.config)):
        return False
    if not numbers or manifest.states != numbers:
        return manifest.states == numbers
    if model not in _states_by_model:
        # Only a pass shows the shapes of the states.
        _states_by_model[model] = describe_states(make_empty_cache(model))
    own = _states_by_model[model]
    return all(getattr(manifest, name) == value for name, value in own.items())


def check_tokenizer(
    path: object, manifest: Manifest, context: Context, tokenizer: Tokenizer
) -> None:
    """Refuse a tokenizer that would decode the text's ids differently, or a chat template that
    writes something else around the text and its questions. Warn if the template differs elsewhere.

    Args:
        path: The file, for the message.
        manifest: Its record.
        context: The text in the file and what surrounds it. A portable file has no ids of the text,
            so that only what follows a question and the template's hash can be compared.
        tokenizer: The one that will encode questions.

    Raises:
        CacheFileError: The model would read other words than the cache was made for.
    """
    has_text = context.num_tokens > 0
    if has_text:
        decodes_equally = manifest.tokens_hash == hash_token_names(tokenizer, context.ids)
    else:
        suffix_ids = encode_text(tokenizer, after=context.suffix_text)
        decodes_equally = suffix_ids.equal(context.suffix_ids)
    if not decodes_equally:
        raise CacheFileError(
            f"{path} was made with a different tokenizer; use the one that belongs to the model."
        )
    if manifest.template == hash_template(tokenizer):
        return
    # The hash also covers the template's default system message, which does not matter to a text
    # with its own one. So compare what is really around this text.
    if not has_text or not _has_same_surroundings(manifest, context, tokenizer):
        raise CacheFileError(
            f"{path} was made with a different chat template; use the tokenizer that it was made "
            "with, or compress the text again."
        )
    warn(
        f"{path} was made with a different chat template, which writes the same around this text "
        "and its questions; conversations may suffer."
    )


def _has_same_surroundings(manifest: Manifest, context: Context, tokenizer: Tokenizer) -> bool:
    """Return whether a tokenizer's template writes the same around a text and its questions as is
    around them in the file.
    """
    try:
        before, after = split_template(tokenizer, manifest.system)
    except RestoreKVError:  # it does not allow a system message
        return False
    prefix = context.ids[:, : context.prefix_length]
    return after == context.suffix_text and encode_text(tokenizer, before=before).equal(prefix)


def check_tensors(tensors: Mapping[str, Tensor], manifest: Manifest) -> None:
    """Check names, dtypes, shapes and contents of all tensors against the manifest."""
    layers, heads, dim = (manifest.shape[name] for name in ("layers", "heads", "head_dim"))
    columns = manifest.prefix + manifest.tokens
    dtype = getattr(torch, manifest.dtype)
    check_tensor(tensors, "context_ids", torch.int32, (1, columns))
    check_tensor(tensors, "suffix_ids", torch.int32, (1, None))
    columns += manifest.earlier  # restore pairs of earlier parts have positions after the text's
    check_tensor(tensors, "offsets", torch.int32, (layers, heads + 1))
    expected = {"context_ids", "suffix_ids", "offsets", "restore_keys", "restore_values"}
    for name in ("restore_keys", "restore_values"):
        check_tensor(tensors, name, dtype, (layers, heads, manifest.restore_tokens, dim))
    for name in ("context_ids", "suffix_ids"):
        require(bool((tensors[name] >= 0).all()), "has token ids below zero")
    for index, offsets in enumerate(tensors["offsets"].tolist()):
        expected |= check_layer(tensors, f"layers.{index}", offsets, manifest, columns)
    for index, held in enumerate(manifest.count_sliding_columns()):
        for name, length in (
            ("keys", held),
            ("values", held),
            ("restore_keys", manifest.restore_tokens),
            ("restore_values", manifest.restore_tokens),
        ):
            size = manifest.sliding_heads, length, manifest.sliding_head_dim
            check_tensor(tensors, f"sliding.{index}.{name}", dtype, size)
            expected.add(f"sliding.{index}.{name}")
    for index in range(len(manifest.states)):
        for name, shape in manifest.state_shapes.items():
            state_dtype = getattr(torch, manifest.state_dtypes[name])
            check_tensor(tensors, f"states.{index}.{name}", state_dtype, tuple(shape))
            expected.add(f"states.{index}.{name}")
    require(set(tensors) == expected, "has tensors that do not belong to a cache of its shape")


def check_layer(
    tensors: Mapping[str, Tensor], layer: str, offsets: list[int], manifest: Manifest, columns: int
) -> set[str]:
    """Check the context of one layer; return the names of its tensors."""
    lengths = [end - start for start, end in pairwise(offsets)]
    require(
        offsets[0] == 0 and min(lengths) >= 0 and max(lengths) <= columns,
        "has impossible head offsets",
    )
    rows = offsets[-1]
    dim = manifest.shape["head_dim"]
    kv_dtype = manifest.kv_dtype
    parts = PAIR_PARTS
    if manifest.shares_pairs:
        require(kv_dtype == "model", "records pairs of 8 bits that are keys and values at once")
        parts = PAIR_PARTS[:1]
    names = {f"{layer}.positions", *(f"{layer}.{part}" for part in parts)}
    for part in parts:
        check_tensor(
            tensors,
            f"{layer}.{part}",
            QUANTIZED_DTYPES.get(kv_dtype) or getattr(torch, manifest.dtype),
            (rows, dim),
        )
    check_tensor(tensors, f"{layer}.positions", torch.int32, (rows,))
    positions = tensors[f"{layer}.positions"]
    check_positions(positions, offsets, columns)
    # Restore pairs of earlier parts have the positions after the text, and every head has the same
    # number of them.
    is_restore_pair = positions >= manifest.prefix + manifest.tokens
    counts = torch.nn.functional.pad(is_restore_pair.cumsum(0), (1, 0))[offsets].diff()
    require(
        bool((counts == manifest.earlier).all()),
        "does not have the restore pairs of earlier texts that its manifest lists",
    )
    if kv_dtype != "model":
        scale_shapes = compute_scale_shapes(offsets, kv_dtype, dim)
        for part, shape in zip(PAIR_PARTS, scale_shapes, strict=True):
            check_tensor(tensors, f"{layer}.{part}.scales", torch.float32, shape)
            check_scales(tensors[f"{layer}.{part}.scales"], kv_dtype)
            names.add(f"{layer}.{part}.scales")
    if f"{layer}.bias" in tensors:
        # A bias has the model's dtype or float32; anything else is compared with float32, and so
        # refused.
        bias_dtype = torch.float32
        model_dtype = getattr(torch, manifest.dtype)
        if tensors[f"{layer}.bias"].dtype == model_dtype:
            bias_dtype = model_dtype
        check_tensor(tensors, f"{layer}.bias", bias_dtype, (rows,))
        names.add(f"{layer}.bias")
    return names


def check_tensor(
    tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    """Check that a tensor is there, has a dtype and a shape (None: any size), and holds only finite
    numbers that are at most LARGEST_NUMBER.
    """
    require(name in tensors, f"lacks the tensor {name}")
    tensor = tensors[name]
    fits = tensor.ndim == len(shape) and all(
        size in (None, own) for size, own in zip(shape, tensor.shape, strict=True)
    )
    require(
        tensor.dtype == dtype and fits,
        f"has a tensor {name} of {tensor.dtype} and shape {tuple(tensor.shape)}",
    )
    largest = largest_number(tensor)
    require(math.isfinite(largest), f"has numbers in {name} that are not finite")
    limit = f"{LARGEST_NUMBER:,.0f}"
    require(
        largest <= LARGEST_NUMBER, f"has numbers in {name} beyond {limit}, which no model computes"
    )


def check_scales(scales: Tensor, kv_dtype: str) -> None:
    """Check that all scales are above 0, and so small that no 8-bit code means a number beyond
    LARGEST_NUMBER.
    """
    if not scales.numel():
        return
    # A code means code * scale, and codes go up to 127 or 448. The factor allows for scales that
    # were rounded to float32.
    max_scale = LARGEST_NUMBER / quantized.LARGEST_CODE[QUANTIZED_DTYPES[kv_dtype]] * (1 + 1e-6)
    fits = float(scales.min()) > 0 and float(scales.max()) <= max_scale
    require(fits, f"has scales of {kv_dtype} numbers that no cache has")


def check_positions(positions: Tensor, offsets: list[int], columns: int) -> None:
    """Check that each head's positions grow and lie inside the context."""
    require(
        bool(((positions >= 0) & (positions < columns)).all()),
        "has positions outside its context",
    )
    # Inside a head positions grow; at a head's first row they begin again.
    grows = positions.diff() > 0
    grows[[start - 1 for start in offsets[1:-1] if 0 < start < len(positions)]] = True
    require(bool(grows.all()), "has positions that are not strictly increasing")


def check_counts(manifest: Manifest, cache: RaggedCache) -> None:
    """Check that the recorded pairs and bytes are those of the cache."""
    columns = manifest.prefix + manifest.tokens
    for name, value in count_pairs_and_bytes(
        cache, manifest.prefix, columns, manifest.prefix_policy
    ).items():
        recorded = getattr(manifest, name)
        require(
            recorded == value, f"records {name.replace('_', ' ')} as {recorded:,} and has {value:,}"
        )
