"""Safetensors files of a training, with a checksum that an altered number does not pass; older ones lack it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from restorekv import files
from restorekv.errors import RestoreKVError, first_sentence
from restorekv.files import replacing
from restorekv.seal import SIGNATURE, check_signed, digest, signed_with_key

SUM, KIND = "sum", "restorekv-training"
Sizes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes the file completely or not at all."""
    sha256 = checksum(tensors, metadata)
    seals = {SUM: sha256, **signed_with_key(KIND, sha256)}
    try:
        with replacing(path, follow=False) as temporary:
            safetensors.torch.save_file(tensors, temporary, {**metadata, **seals})
    except (OSError, SafetensorError) as error:
        why = f"Cannot write {path} ({first_sentence(error)})"
        raise RestoreKVError(f"{why}; free some space or choose another place.") from error


def read(path: Path, what: str, fix: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Returns metadata and tensors, on the CPU; refuses altered files and numbers that are not finite."""
    try:
        metadata, tensors = files.read_tensors(path, "it")
    except RestoreKVError as error:
        raise RestoreKVError(f"{what} is damaged ({str(error).partition(';')[0]}); {fix}.") from error
    expected, signature = metadata.pop(SUM, None), metadata.pop(SIGNATURE, None)
    check_signed(KIND, expected or "", signature, path)
    if expected is not None and expected != checksum(tensors, metadata):
        raise RestoreKVError(f"{what} is damaged, its checksum does not match; {fix}.")
    if not all(tensor.isfinite().all() for tensor in tensors.values()):
        raise RestoreKVError(f"{what} is damaged, it has numbers that are not finite; {fix}.")
    return metadata, tensors


def checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Returns the SHA-256 of the metadata and the tensors."""
    return digest(tensors, json.dumps(metadata, sort_keys=True))


def fit(tensors: dict[str, Tensor], sizes: Sizes) -> bool:
    """Returns whether the tensors have exactly these names, dtypes and shapes."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == dict(sizes)
