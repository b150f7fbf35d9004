"""A compressed cache as one safetensors file: tensors, and a manifest in the header with every
setting it was made with.

Files are sealed (see seal.py), written to a temporary file next to the target and then moved into
place. A file is read once, so what is used is what was checked.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from restorekv import seal
from restorekv.cache import quantized
from restorekv.cache.quantized import QuantizedRows
from restorekv.cache.ragged import ContextLayer, RaggedCache, RaggedLayer
from restorekv.cache.sliding import SlidingLayer
from restorekv.cache.states import EmptyLayer, StateLayer
from restorekv.errors import CacheFileError, RestoreKVError, reraise_as
from restorekv.files import parse_path, parse_record
from restorekv.model.prompt import Context
from restorekv.seal import FileKind
from restorekv.storage.cache_checks import (
    ContradictionError,
    check_counts,
    check_manifest,
    check_suffix,
    check_tensors,
    require,
)
from restorekv.storage.manifest import Manifest

FIX = "compress the context again"
KIND = FileKind("restorekv-cache", "6", "a restorekv cache", FIX)


def hash_cache(cache: RaggedCache, context: Context) -> str:
    """Hash the cache, its context and where questions begin: the first 16 hex digits of SHA-256."""
    question_start = (
        context.suffix_text,
        context.separator,
        context.prefix_length,
        cache.get_seq_length(),
    )
    sha256 = hashlib.sha256(repr(question_start).encode())
    # Tensor by tensor in the order of their names, so that the hash does not depend on the order of
    # packing.
    for name, tensor in sorted(pack_cache(cache, context).items()):
        sha256.update(name.encode())
        sha256.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()[:16]


@dataclass(frozen=True)
class CacheFile:
    """A cache file that was read and checked, before a model is loaded."""

    path: Path
    manifest: Manifest
    context: Context
    tensors: dict[str, Tensor]

    def make_cache(self, device: str | torch.device = "cpu") -> RaggedCache:
        """Make a new cache from the tensors, on a device."""
        # Everything was checked on the CPU; only then does it move to a device.
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        seen = self.context.num_tokens + self.manifest.offset
        return unpack_cache(tensors, seen, self.manifest)


def write_cache_file(
    path: str | Path, cache: RaggedCache, context: Context, manifest: Manifest
) -> None:
    """Write a sealed file (seal.py), all of it or nothing."""
    manifest_json = json.dumps({**manifest.to_json(), "suffix_text": context.suffix_text})
    with reraise_as(CacheFileError):
        seal.write_sealed(
            parse_path(path), KIND, pack_cache(cache, context), {"manifest": manifest_json}
        )


def open_cache_file(path: str | Path) -> CacheFile:
    """Read what `write_cache_file` wrote, once, and refuse anything else."""
    with refuse_contradictions(path, FIX):
        manifest, extra_values, tensors = read_with_manifest(path, KIND, {"suffix_text": str})
        # First shapes, dtypes and ranges, then the template's suffix after a question, then the
        # counts: each check relies on the ones before it.
        check_tensors(tensors, manifest)
        check_suffix(extra_values["suffix_text"], tensors["suffix_ids"])
        context = Context(
            ids=tensors["context_ids"].long(),
            prefix_length=manifest.prefix,
            suffix_ids=tensors["suffix_ids"].long(),
            suffix_text=extra_values["suffix_text"],
            separator=manifest.separator,
        )
        stored = CacheFile(Path(path), manifest, context, tensors)
        check_counts(manifest, stored.make_cache())
    return stored


@contextmanager
def refuse_contradictions(path: str | Path, fix: str) -> Iterator[None]:
    """Raise every error of the block as a CacheFileError about the file at `path`.

    The message about a file that contradicts itself ends with `fix`.
    """
    try:
        yield
    except ContradictionError as error:
        raise CacheFileError(f"{path} {error}; {fix}.") from None
    except CacheFileError:
        raise
    except RestoreKVError as error:
        raise CacheFileError(str(error)) from None


def read_with_manifest(
    path: str | Path, kind: FileKind, extra_fields: Mapping[str, type]
) -> tuple[Manifest, dict[str, Any], dict[str, Tensor]]:
    """Read a sealed file that has a manifest.

    Args:
        path: The file.
        kind: What it must be.
        extra_fields: Names and types of the fields that this kind of file adds to the manifest's
            JSON.

    Returns:
        The checked manifest, the values of `extra_fields`, and the tensors, which are not checked.
    """
    metadata, tensors = seal.read_sealed(parse_path(path), kind)
    entries = parse_record(str(metadata.get("manifest")), str(path))
    require(isinstance(entries, dict), "has a damaged manifest")
    # `extra_fields` are in the same JSON; they are taken out before the rest is compared.
    values = {name: entries.pop(name, None) for name in extra_fields}
    for name, type_ in extra_fields.items():
        require(type(values[name]) is type_, "has a damaged manifest")
    try:
        # Unknown fields are refused too: no check knows them.
        manifest = Manifest(**entries)
    except TypeError:
        raise ContradictionError("has a manifest with missing or unknown fields") from None
    check_manifest(manifest)
    return manifest, values, tensors


def pack_cache(cache: RaggedCache, context: Context) -> dict[str, Tensor]:
    """Return the tensors of a cache file by name.

    Layers without an additive bias have no tensor for it, and only 8-bit keys and values have
    scales.
    """
    layers = cache.full_attention
    tensors = {
        "context_ids": context.ids.to(torch.int32),
        "suffix_ids": context.suffix_ids.to(torch.int32),
        # (L, H + 1): offsets of all layers in one tensor.
        "offsets": torch.stack([layer.offsets for layer in layers]),
        "restore_keys": torch.stack([layer.restore_keys[0] for layer in layers]),
        "restore_values": torch.stack([layer.restore_values[0] for layer in layers]),
    }
    # Layers with a window are dense, so their columns are stored directly.
    for index, layer in enumerate(cache.sliding):
        tensors[f"sliding.{index}.keys"] = layer.context_keys[0]
        tensors[f"sliding.{index}.values"] = layer.context_values[0]
        tensors[f"sliding.{index}.restore_keys"] = layer.restore_keys[0]
        tensors[f"sliding.{index}.restore_values"] = layer.restore_values[0]
    # States are stored without their batch dimension: there is one row.
    for index, layer in enumerate(cache.with_states):
        for name, state in layer.named_tensors.items():
            tensors[f"states.{index}.{name}"] = state[0]
    for index, layer in enumerate(layers):
        for name, rows in (("keys", layer.context_keys), ("values", layer.context_values)):
            if name == "values" and layer.shares_pairs:
                continue
            parts = quantized.list_tensors(rows)
            tensors[f"layers.{index}.{name}"] = parts[0]
            # Codes of 8 bits have scales. An int8 key also has the starts of its groups, which are
            # not stored because they follow from the offsets.
            if len(parts) > 1:
                tensors[f"layers.{index}.{name}.scales"] = parts[1]
        tensors[f"layers.{index}.positions"] = layer.positions
        if layer.bias is not None:
            tensors[f"layers.{index}.bias"] = layer.bias
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def unpack_cache(tensors: dict[str, Tensor], seen: int, manifest: Manifest) -> RaggedCache:
    """Return the cache that `pack_cache` made the tensors from.

    `seen` is the number of positions that the context occupied, the offset included.
    """
    # A manifest without windows is of a model in which no layer has one.
    windows = manifest.windows or [0] * manifest.layers
    ragged_index = 0
    sliding_index = 0
    state_index = 0
    layers: list[ContextLayer] = []
    for index, window in enumerate(windows):
        if index in manifest.states:
            layers.append(unpack_state_layer(tensors, state_index, manifest))
            state_index += 1
        elif index in manifest.empty_layers:
            layers.append(EmptyLayer())
        elif window:
            layers.append(unpack_sliding_layer(tensors, sliding_index, window, seen, manifest))
            sliding_index += 1
        else:
            layers.append(unpack_layer(tensors, ragged_index, seen, manifest))
            ragged_index += 1
    return RaggedCache(layers)


def unpack_layer(
    tensors: dict[str, Tensor], index: int, seen: int, manifest: Manifest
) -> RaggedLayer:
    """Return the layer with this index among the layers that see the whole text."""
    offsets = tensors["offsets"][index]
    keys, values = unpack_context(tensors, index, offsets, manifest)
    return RaggedLayer(
        context_keys=keys,
        context_values=values,
        offsets=offsets,
        positions=tensors[f"layers.{index}.positions"],
        seen=seen,
        restore_keys=tensors["restore_keys"][index][None],
        restore_values=tensors["restore_values"][index][None],
        bias=tensors.get(f"layers.{index}.bias"),
    )


def unpack_sliding_layer(
    tensors: dict[str, Tensor], index: int, window: int, seen: int, manifest: Manifest
) -> SlidingLayer:
    """Return the layer with this index among the layers that have a window."""
    keys = tensors[f"sliding.{index}.keys"][None]
    return SlidingLayer(
        context_keys=keys,
        context_values=tensors[f"sliding.{index}.values"][None],
        first=manifest.prefix + manifest.tokens - keys.shape[-2],
        window=window,
        seen=seen,
        restore_keys=tensors[f"sliding.{index}.restore_keys"][None],
        restore_values=tensors[f"sliding.{index}.restore_values"][None],
    )


def unpack_state_layer(tensors: dict[str, Tensor], index: int, manifest: Manifest) -> StateLayer:
    """Return the layer with this index among the layers that keep states."""
    states = {name: tensors[f"states.{index}.{name}"][None] for name in manifest.state_shapes}
    return StateLayer.from_tensors(states)


def unpack_context(
    tensors: dict[str, Tensor], index: int, offsets: Tensor, manifest: Manifest
) -> tuple[Tensor, Tensor] | tuple[QuantizedRows, QuantizedRows]:
    """Return keys and values of a layer's context."""
    keys_name = f"layers.{index}.keys"
    if manifest.shares_pairs:
        return tensors[keys_name], tensors[keys_name]
    values_name = f"layers.{index}.values"
    rows = tensors[keys_name], tensors[values_name]
    if manifest.kv_dtype == "model":
        return rows
    return quantized.from_codes(
        rows,
        (tensors[f"{keys_name}.scales"], tensors[f"{values_name}.scales"]),
        offsets.tolist(),
        manifest.kv_dtype,
        getattr(torch, manifest.dtype),
    )
