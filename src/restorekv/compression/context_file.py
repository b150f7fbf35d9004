"""A compressed cache as one safetensors file: tensors, and in its header every convention it was made with.

Files are sealed (see seal.py), written beside the target and moved into place when complete, and read once: what was
checked is what is used.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from restorekv import seal
from restorekv.cache import quantized
from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.compression.budget import from_file, to_file
from restorekv.compression.context_checks import (
    ContradictionError,
    check_around,
    check_manifest,
    check_sums,
    check_tensors,
    require,
    sums,
)
from restorekv.errors import CacheFileError, RestoreKVError, raised_as, shown
from restorekv.files import open_tensors, parse_record, read_tensor_bytes
from restorekv.model.prompt import Context

FORMAT = "restorekv-cache"
VERSION = 3
READ = ("2", "3")  # versions that are read


@dataclass(frozen=True)
class Manifest:
    """How a cache was made and what it holds."""

    model: str  # name or path, for people
    fingerprint: str  # of the base weights; must match on load
    rope: dict[str, Any]  # must match on load
    template: str  # hash of the chat template's surroundings
    dtype: str
    shape: dict[str, int]  # layers, heads, groups, head_dim, hidden
    prefix: int  # S
    tokens: int  # T
    restore_tokens: int  # n
    ratio: str  # exact fraction, as "1/20"
    prefix_policy: str
    on_small_budget: str  # in files: on_tight
    allocation: str
    restore_from: str
    offset: int
    evictor: str
    adapter: dict[str, Any] | None  # source and hash of the restore adapter
    pairs: int  # what the budget counts
    pairs_of_prefix: int  # kept pairs that came from the chat prefix
    pairs_held: int  # everything, prefix and restore cache included
    bytes_full: int  # of the full cache, S + T columns
    bytes_held: int  # of every tensor of the compressed cache
    seconds: dict[str, float]  # per phase
    versions: dict[str, str]  # of the libraries
    storage: str = "model"  # of the retained pairs: the model's dtype, or "int8", "fp8"; new in version 3
    streaming: int | None = None  # tokens of a part when it was compressed as the prefill went; new in version 3
    between: str = ""  # what stands before every question; files that do not say it were asked without
    cut: int = 0  # tokens of the text's end that were left out because the model has no positions for them
    system: str = ""  # the system message before the text, where one was given
    parts: list[int] = field(default_factory=list)  # tokens of each text of a context that grew or was composed
    earlier: int = 0  # restore pairs of earlier parts in every head, among the retained pairs

    def described(self) -> dict:
        """Returns the manifest as files hold it."""
        return to_file(asdict(self))

    def of_other(self, context: Context, cache: RaggedCache, **changed: Any) -> "Manifest":
        """Returns the record of a cache that was made from this one's; `changed` are fields that nothing else tells."""
        counted = sums(cache, context.prefix, context.positions, self.prefix_policy)
        size = {"prefix": context.prefix, "tokens": context.tokens, "restore_tokens": cache.restore}
        return replace(self, **size, **counted, **changed)


def digest(cache: RaggedCache, context: Context) -> str:
    """Returns 16 hex digits that stand for everything that a cache file would hold of the text."""
    sha256 = hashlib.sha256(context.suffix_text.encode())
    for name, tensor in sorted(pack(cache, context).items()):
        sha256.update(name.encode())
        sha256.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()[:16]


@dataclass(frozen=True)
class CacheFile:
    """A cache file that was read and checked, before a model is at hand."""

    path: Path
    manifest: Manifest
    context: Context
    tensors: dict[str, Tensor]

    def cache(self, device: str | torch.device = "cpu") -> RaggedCache:
        """Returns the cache on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return unpack(tensors, self.context.positions + self.manifest.offset, self.manifest)


def write(path: str | Path, cache: RaggedCache, context: Context, manifest: Manifest, key: bytes | None = None) -> None:
    """Writes all or nothing, with a key a signed file; see seal.py."""
    described = json.dumps({**manifest.described(), "suffix_text": context.suffix_text})
    metadata = {"format": FORMAT, "version": str(VERSION), "manifest": described}
    with raised_as(CacheFileError):
        seal.write(Path(path), pack(cache, context), metadata, key)


def read(path: str | Path, key: bytes | None = None) -> CacheFile:
    """Reads what `write` wrote, once, and refuses anything else; with a key, also a file that it did not sign."""
    with refusing(path, "compress the context again"):
        manifest, others, tensors = read_sealed(path, check_format, {"suffix_text": str}, key)
        check_tensors(tensors, manifest)
        check_around(others["suffix_text"], tensors["suffix_ids"])
        ids, suffix = (tensors[name].long() for name in ("context_ids", "suffix_ids"))
        context = Context(ids, manifest.prefix, suffix, others["suffix_text"], manifest.between)
        stored = CacheFile(Path(path), manifest, context, tensors)
        check_sums(manifest, stored.cache())
    return stored


@contextmanager
def refusing(path: str | Path, fix: str) -> Iterator[None]:
    """Raises whatever is wrong with a file as a CacheFileError; a contradiction's sentence ends in `fix`."""
    try:
        yield
    except ContradictionError as error:
        raise CacheFileError(f"{path} {error}; {fix}.") from None
    except CacheFileError:
        raise
    except RestoreKVError as error:
        raise CacheFileError(str(error)) from None


def read_sealed(
    path: str | Path, check: Callable[[dict[str, str], str], None], others: Mapping[str, type], key: bytes | None
) -> tuple[Manifest, dict[str, Any], dict[str, Tensor]]:
    """Returns a checked manifest, the `others` that its JSON holds beside it, and the tensors, which are not checked.

    `check` refuses files of another format by their metadata.
    """
    what = str(path)
    raw = read_tensor_bytes(Path(path), what)
    metadata, tensors = open_tensors(raw, what)
    check(metadata, what)
    seal.check_seal(raw, metadata, what, key)
    entries = parse_record(str(metadata.get("manifest")), what)
    require(isinstance(entries, dict), "has a damaged manifest")
    beside = {name: entries.pop(name, None) for name in others}
    require(all(type(beside[name]) is kind for name, kind in others.items()), "has a damaged manifest")
    manifest = known_manifest(from_file(entries))
    check_manifest(manifest)
    return manifest, beside, tensors


def check_format(metadata: dict[str, str], what: str) -> None:
    """Refuses files of other kinds and versions."""
    if metadata.get("format") != FORMAT:
        raise CacheFileError(f"{what} is a safetensors file but not a restorekv cache; give a file made by compress.")
    if (version := metadata.get("version")) not in READ:
        raise CacheFileError(
            f"{what} has format version '{shown(version)}', this restorekv reads {' and '.join(READ)}; "
            "compress the context again."
        )


def known_manifest(entries: dict) -> Manifest:
    """Returns the manifest; files of earlier versions lack the fields that have defaults."""
    names = {each.name for each in fields(Manifest)}
    needed = {each.name for each in fields(Manifest) if each.default is MISSING and each.default_factory is MISSING}
    require(needed <= set(entries) <= names, "lacks fields this version needs, or has others")
    return Manifest(**entries)


def pack(cache: RaggedCache, context: Context) -> dict[str, Tensor]:
    """Tensors by name; only layers with an additive bias have one, and only keys and values of 8 bits have scales."""
    tensors = {
        "context_ids": context.ids.to(torch.int32),
        "suffix_ids": context.suffix.to(torch.int32),
        "offsets": torch.stack([layer.offsets for layer in cache.layers]),
        "restore_keys": torch.stack([layer.restore_keys[0] for layer in cache.layers]),
        "restore_values": torch.stack([layer.restore_values[0] for layer in cache.layers]),
    }
    for index, layer in enumerate(cache.layers):
        for name, rows in (("keys", layer.context_keys), ("values", layer.context_values)):
            parts = quantized.tensors_of(rows)
            tensors[f"layers.{index}.{name}"] = parts[0]
            if len(parts) > 1:
                tensors[f"layers.{index}.{name}.scales"] = parts[1]
        tensors[f"layers.{index}.positions"] = layer.positions
        if layer.bias is not None:
            tensors[f"layers.{index}.bias"] = layer.bias
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def unpack(tensors: dict[str, Tensor], seen: int, manifest: Manifest) -> RaggedCache:
    """Inverts `pack`."""
    layers = []
    for index, offsets in enumerate(tensors["offsets"]):
        restored = (tensors[name][index][None] for name in ("restore_keys", "restore_values"))
        rows, positions = context_of(tensors, index, offsets, manifest), tensors[f"layers.{index}.positions"]
        layers.append(RaggedLayer(*rows, offsets, positions, seen, *restored, tensors.get(f"layers.{index}.bias")))
    return RaggedCache(layers)


def context_of(tensors: dict[str, Tensor], index: int, offsets: Tensor, manifest: Manifest) -> tuple:
    """Returns keys and values of a layer's context."""
    names = [f"layers.{index}.keys", f"layers.{index}.values"]
    rows = tuple(tensors[name] for name in names)
    if manifest.storage == "model":
        return rows
    scales = tuple(tensors[f"{name}.scales"] for name in names)
    return quantized.unpack(rows, scales, offsets.tolist(), manifest.storage, getattr(torch, manifest.dtype))
