"""A compressed cache as one safetensors file: tensors, and in its header every convention it was made with.

The header's `checksum` is the SHA-256 of the whole file with that field zeroed, so one altered byte anywhere,
header included, is noticed. Files are written beside the target and moved into place when complete.
"""

import hashlib
import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from restorekv.cache import quantized
from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.compression.budget import from_file, to_file
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.files import replacing
from restorekv.model.prompt import Context

FORMAT = "restorekv-cache"
VERSION = 3
READ = ("2", "3")  # versions that are read
BLANK = "0" * 64
BLOCK = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """How a cache was made and what it holds."""

    model: str  # name or path, for people
    fingerprint: str  # of the base weights; must match on load
    rope: dict  # must match on load
    template: str  # hash of the chat template's surroundings
    dtype: str
    shape: dict  # layers, heads, groups, head_dim, hidden
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
    adapter: dict | None  # source and hash of the restore adapter
    pairs: int  # what the budget counts
    pairs_of_prefix: int  # kept pairs that came from the chat prefix
    pairs_held: int  # everything, prefix and restore cache included
    bytes_full: int  # of the full cache, S + T columns
    bytes_held: int  # of every tensor of the compressed cache
    seconds: dict  # per phase
    versions: dict  # of the libraries
    storage: str = "model"  # of the retained pairs: the model's dtype, or "int8", "fp8"; new in version 3
    streaming: int | None = None  # tokens of a part when it was compressed as the prefill went; new in version 3
    between: str = ""  # what stands before every question; files that do not say it were asked without

    def described(self) -> dict:
        """Returns the manifest as files hold it."""
        return to_file(asdict(self))


def write(path: str | Path, cache: RaggedCache, context: Context, manifest: Manifest) -> None:
    """Writes all or nothing: on any failure, Ctrl-C included, the target is as before."""
    try:
        with replacing(Path(path)) as temporary, open(temporary, "wb") as file:
            file.write(encoded(cache, context, manifest))
            file.flush()
            os.fsync(file.fileno())
    except RestoreKVError as error:
        raise CacheFileError(str(error)) from None
    except OSError as error:
        why = f"Cannot write {path}: {error.strerror}"
        raise CacheFileError(f"{why}; free some space or choose another place.") from error


def encoded(cache: RaggedCache, context: Context, manifest: Manifest) -> bytes:
    """Returns the bytes of the whole file."""
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "checksum": BLANK,
        "manifest": json.dumps({**manifest.described(), "suffix_text": context.suffix_text}),
    }
    payload = safetensors.torch.save(pack(cache, context), metadata)
    return payload.replace(BLANK.encode(), hashlib.sha256(payload).hexdigest().encode(), 1)


def read(path: str | Path, device: str | torch.device = "cpu") -> tuple[RaggedCache, Context, Manifest]:
    """Reads what `write` wrote, and refuses anything else."""
    path = Path(path)
    defaults = {field.name: field.default for field in fields(Manifest) if field.default is not MISSING}
    manifest = defaults | from_file(verify(path))
    suffix_text = manifest.pop("suffix_text", "")
    if set(manifest) != {field.name for field in fields(Manifest)}:
        raise CacheFileError(f"{path} lacks fields this version needs; compress the context again.")
    try:
        tensors = safetensors.torch.load_file(path, device=str(device))
    except (SafetensorError, OSError) as error:
        raise CacheFileError(f"{path} cannot be read: {error}.") from error
    known = Manifest(**manifest)
    ids, suffix = (tensors[name].cpu().long() for name in ("context_ids", "suffix_ids"))
    context = Context(ids, known.prefix, suffix, suffix_text, known.between)
    return unpack(tensors, context.positions + known.offset, known), context, known


def verify(path: Path) -> dict:
    """Returns the manifest of an intact file."""
    metadata = read_header(path).get("__metadata__", {})
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise CacheFileError(f"{path} is a safetensors file but not a restorekv cache; give a file made by compress.")
    if metadata.get("version") not in READ:
        raise CacheFileError(
            f"{path} has format version {metadata.get('version')}, this restorekv reads {' and '.join(READ)}; "
            "compress the context again."
        )
    checksum = str(metadata.get("checksum"))
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        start = file.read(8)
        start += file.read(int.from_bytes(start, "little"))
        digest.update(start.replace(checksum.encode(), BLANK.encode(), 1))
        while block := file.read(BLOCK):
            digest.update(block)
    if digest.hexdigest() != checksum:
        raise CacheFileError(f"{path} is damaged, its checksum does not match; compress the context again.")
    return json.loads(metadata["manifest"])


def read_header(path: Path) -> dict:
    """Returns the JSON header of a safetensors file whose size fits it."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 8 + length <= size else b""
    except FileNotFoundError:
        raise CacheFileError(f"There is no file {path}; make it with compress.") from None
    except OSError as error:
        raise CacheFileError(f"Cannot read {path}: {error.strerror}; give a file made by compress.") from error
    try:
        header = json.loads(text)
        expected = 8 + length + max(entry["data_offsets"][1] for name, entry in header.items() if name[:2] != "__")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        raise CacheFileError(f"{path} is not a restorekv cache, or cut short; give a file made by compress.") from None
    if size != expected:
        raise CacheFileError(f"{path} is truncated or too long; copy it again or compress the context again.")
    return header


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
