"""Sealed safetensors: how restorekv writes its own tensors, and how it reads any tensors.

Context caches, portable caches, gates, checkpoints and the other files of a training are sealed.
The metadata of such a file holds its `format` and `version` (see `FileKind`), the entries that this
kind of file needs, and a `checksum`: the SHA-256 of the whole file, computed with 64 zeros in place
of the checksum. So one altered byte anywhere is noticed, header included. A checksum proves that a
file is as somebody wrote it, not that it is harmless: the code that uses a file checks what it
holds.

The files of an adapter are in PEFT's format and have no seal, so that others can read and write
them. The record next to them, a JSON object, holds their checksums and its own (`seal_record`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from restorekv.errors import RestoreKVError, explain_write_errors, make_printable, summarize_error
from restorekv.files import (
    FETCH_AGAIN,
    check_replaceable,
    open_with_size,
    parse_record,
    read_exactly,
    refuse_other_kind,
    replace_file,
)
from restorekv.size_limits import HEADER_BYTES, LARGEST_NUMBER

CHECKSUM = "checksum"
BLANK = "0" * 64  # in the checksum's place while it is computed
BLOCK = 1 << 22  # numbers that are converted to float32 at once
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
Sizes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape by name


@dataclass(frozen=True)
class FileKind:
    """A kind of sealed file.

    `format` and `version` are in its metadata. Error messages call it `name`, as in "a gate of
    restorekv", and end in `fix`, which says how to get a good one.
    """

    format: str
    version: str
    name: str
    fix: str


# Writing


def write_sealed(
    path: Path,
    kind: FileKind,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    *,
    follow: bool = True,
) -> None:
    """Write a sealed file that survives a power cut; on any failure, Ctrl-C included, the old one
    stays.

    Args:
        path: The file, which is replaced if it exists; if a user chose it (follow=True), only if it
            is of the same kind.
        kind: What it is.
        tensors: What it holds, on any device.
        metadata: Further entries of its metadata.
        follow: False for a name that the package chose; see `replace_file`.

    Raises:
        RestoreKVError: The file cannot be written, or would replace one of another kind.
    """
    if follow:
        check_replaceable(path, kind.name, kind.format)
    header, body = seal_tensors(kind, tensors, metadata or {})
    with (
        explain_write_errors(path),
        replace_file(path, follow) as temporary,
        temporary.open("wb") as file,
    ):
        file.write(header)
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def seal_tensors(
    kind: FileKind, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[bytes, memoryview]:
    """Return the header and the rest of a sealed file; the same contents always give the same
    bytes.
    """
    entries = {**metadata, "format": kind.format, "version": kind.version, CHECKSUM: BLANK}
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    payload = safetensors.torch.save(plain, entries)
    end = 8 + int.from_bytes(payload[:8], "little")
    header = _sort_metadata(payload[8:end])
    body = memoryview(payload)[end:]
    digest = hashlib.sha256(header)
    digest.update(body)
    # In quotation marks: inside of an entry that is JSON itself, these are escaped.
    return header.replace(f'"{BLANK}"'.encode(), f'"{digest.hexdigest()}"'.encode(), 1), body


def _sort_metadata(header: bytes) -> bytes:
    """Return a header with sorted metadata, preceded by its length; safetensors writes metadata in
    random order.
    """
    entries = json.loads(header)
    entries["__metadata__"] = dict(sorted(entries["__metadata__"].items()))
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # Padded to 8 bytes, as safetensors does, so that the tensors are aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# Reading


def read_sealed(
    path: Path, kind: FileKind, what: str | None = None, *, finite: bool = False
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a sealed file, only once, so that what was checked is what is returned.

    Args:
        path: The file.
        kind: What it must be.
        what: What error messages call this file; its path unless given.
        finite: Whether to refuse numbers that are not finite.

    Returns:
        Its metadata, and its tensors on the CPU.

    Raises:
        RestoreKVError: The file cannot be read, or is not exactly what `write_sealed` wrote.
    """
    what = what or str(path)
    try:
        raw = read_tensor_bytes(path, what)
        metadata, tensors = parse_tensors(raw, what)
    except RestoreKVError as error:
        # The functions that read any file do not know how to make one of this kind again.
        raise RestoreKVError(str(error).replace(FETCH_AGAIN, kind.fix)) from error
    _check_kind(metadata, kind, what)
    _check_seal(raw, metadata, kind, what)
    if finite:
        _check_finite(tensors, what, kind.fix)
    return metadata, tensors


def _check_kind(metadata: Mapping[str, str], kind: FileKind, what: str) -> None:
    """Refuse files of other kinds and versions."""
    if metadata.get("format") != kind.format:
        raise RestoreKVError(f"{what} is a safetensors file but not {kind.name}; {kind.fix}.")
    version = metadata.get("version")
    if version != kind.version:
        raise RestoreKVError(
            f"{what} has format version '{make_printable(version)}', this restorekv reads "
            f"{kind.version}; {kind.fix}."
        )


def _check_seal(raw: bytes, metadata: Mapping[str, str], kind: FileKind, what: str) -> None:
    """Refuse an altered file."""
    checksum = metadata.get(CHECKSUM, "")
    end = 8 + int.from_bytes(raw[:8], "little")
    # The checksum was computed with BLANK in its place.
    header = raw[:end].replace(f'"{checksum}"'.encode(), f'"{BLANK}"'.encode(), 1)
    digest = hashlib.sha256(header)
    digest.update(memoryview(raw)[end:])
    if digest.hexdigest() != checksum:
        raise RestoreKVError(f"{what} is damaged, its checksum does not match; {kind.fix}.")


def read_tensors(path: Path, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors of any safetensors file, never those of a pickle."""
    return parse_tensors(read_tensor_bytes(path, what), what)


def read_tensor_bytes(path: Path, what: str) -> bytes:
    """Return the bytes of a safetensors file after comparing its size with what its header says."""
    with open_with_size(path, what) as (file, size):
        start = file.read(8) or b""  # None if nothing is there yet, as in /proc/kmsg
        start += file.read(_header_length(start, size, what))
        _parse_header(start, size, what)
        file.seek(0)
        return read_exactly(file, size, what)


def parse_tensors(raw: bytes, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the metadata and the tensors, on the CPU, that the bytes of a safetensors file
    hold.
    """
    header = _parse_header(raw, len(raw), what)
    try:
        tensors = safetensors.torch.load(raw)
    except Exception as error:  # what the library raises for a bad entry has no common class
        raise RestoreKVError(
            f"{what} is damaged or not a safetensors file ({summarize_error(error)}); "
            f"{FETCH_AGAIN}."
        ) from error
    return header.get("__metadata__") or {}, tensors


def _header_length(raw: bytes, size: int, what: str) -> int:
    """Return the length of the header from the first 8 bytes of a file of `size` bytes."""
    refuse_other_kind(raw, what)
    length = int.from_bytes(raw[:8], "little")
    if len(raw) < 8 or not 2 <= length <= min(size - 8, HEADER_BYTES):
        raise RestoreKVError(f"{what} is cut short or not a safetensors file; {FETCH_AGAIN}.")
    return length


def _parse_header(raw: bytes, size: int, what: str) -> dict[str, Any]:
    """Return the header at the start of `raw`; refuse it if its tensors do not end where the file
    does.
    """
    length = _header_length(raw, size, what)
    header = parse_record(raw[8 : 8 + length], what)
    try:
        entries = [entry for name, entry in header.items() if name != "__metadata__"]
        end = max((entry["data_offsets"][1] for entry in entries), default=0)
        is_whole = 8 + length + end == size
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise RestoreKVError(f"{what} is not a safetensors file; {FETCH_AGAIN}.") from error
    if not is_whole:
        raise RestoreKVError(f"{what} is cut short or too long; {FETCH_AGAIN}.")
    return header


# What a file holds


def has_sizes(tensors: Mapping[str, Tensor], sizes: Sizes) -> bool:
    """Return whether the tensors have exactly these names, dtypes and shapes."""
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    return found == dict(sizes)


def _check_finite(tensors: Mapping[str, Tensor], what: str, fix: str) -> None:
    """Refuse numbers that are not finite."""
    for name, tensor in tensors.items():
        if not math.isfinite(largest_number(tensor)):
            raise RestoreKVError(
                f"{what} has numbers in {make_printable(name)} that are not finite; {fix}."
            )


def check_weights(tensors: Mapping[str, Tensor], what: str, fix: str) -> None:
    """Refuse tensors that cannot be trained weights: not floating-point, not finite, or with
    numbers beyond LARGEST_NUMBER.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise RestoreKVError(
                f"{what} has numbers of the kind {tensor.dtype} in {make_printable(name)}; {fix}."
            )
    _check_finite(tensors, what, fix)
    for name, tensor in tensors.items():
        if largest_number(tensor) > LARGEST_NUMBER:
            raise RestoreKVError(
                f"{what} has numbers in {make_printable(name)} beyond {LARGEST_NUMBER:,.0f}; {fix}."
            )


def largest_number(tensor: Tensor) -> float:
    """Return the largest absolute value of a floating-point tensor, NaN if it has any; 0 for other
    dtypes and empty tensors.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    parts = []
    for part in tensor.flatten().split(BLOCK):
        wide = part if part.dtype == torch.float64 else part.float()
        parts.append(wide.abs().max())
    return float(torch.stack(parts).max())


def short_hash(content: str | bytes) -> str:
    """Return the first 16 hex digits of the SHA-256 of a text or of bytes."""
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:16]


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of every tensor's name, dtype, shape and bytes, which does not depend on
    the file that holds them.
    """
    sha256 = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        sha256.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a regular file; others, which may never end, are refused."""
    with open_with_size(path, str(path)) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


# Records: JSON objects that seal files of other formats


def seal_record(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a JSON object together with their checksum."""
    return {**entries, CHECKSUM: _record_checksum(entries)}


def is_sealed_record(entries: Mapping[str, Any]) -> bool:
    """Return whether a JSON object has the checksum of its other entries."""
    return entries.get(CHECKSUM) == _record_checksum(entries)


def _record_checksum(entries: Mapping[str, Any]) -> str:
    others = {name: value for name, value in entries.items() if name != CHECKSUM}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()
