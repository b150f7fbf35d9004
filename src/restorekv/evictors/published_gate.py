"""Converts gates that their authors published.

Fast KVzip  Jang-Hyun/Fast-KVzip: a torch pickle {"module": [state dict of every layer], ...} for
            each model. It is read with weights_only plus numpy arrays, which the published files
            hold; anything else is refused. The authors' training adds the bias b twice and
            inference once; its value is not changed.
KVzap       nvidia/KVzap-linear-<model>, nvidia/KVzap-mlp-<model>: config.json and safetensors,
            layers.<l>.weight or layers.<l>.0.weight, layers.<l>.2.weight and biases.
"""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download, snapshot_download
from torch import Tensor
from transformers import PreTrainedModel

from restorekv import files
from restorekv.errors import GateError
from restorekv.evictors.gate_file import (
    Gate,
    GateCard,
    check_numbers,
    check_shapes,
    split_layers,
)
from restorekv.model.gate_kinds import FAST_KVZIP, TARGETS
from restorekv.model.shape import CacheShape
from restorekv.seal import read_tensors

PICKLE_LIMIT = 1 << 30  # bytes; the published files have a few megabytes
Layers = list[dict[str, Tensor]]


def convert_gate(source: str, model: PreTrainedModel) -> Gate:
    """Convert a pickle of Fast KVzip, a folder of KVzap, or the hub id of either; raise
    GateError.
    """
    # A path first, then the hub: a folder of that name may exist.
    path = Path(source)
    if not path.exists():
        path = _download_gate(source, model)
    if path.is_dir():
        kind, layers = _read_folder(path)
    elif not path.is_file():
        raise GateError(
            f"{path} is not a regular file; pass a file of Fast KVzip or a folder of KVzap."
        )
    elif path.suffix == ".safetensors":
        raise GateError(
            f"{path} is not a pickle of Fast KVzip; "
            f"if it is a gate of restorekv, use it with gate={path}."
        )
    else:
        kind, layers = "fastkvzip", _read_pickle(path)
    # Before anything is computed with them: a published file may hold NaN.
    for index, layer in enumerate(layers):
        check_numbers(source, {f"layers.{index}.{name}": tensor for name, tensor in layer.items()})
    check_shapes(source, kind, layers, CacheShape.from_model(model))
    card = GateCard.for_model(model, kind, TARGETS[kind], settings={"source": source})
    return Gate(layers, card)


def _download_gate(source: str, model: PreTrainedModel) -> Path:
    """Download the file for `model`, by its name, from Fast KVzip's repository, or a whole KVzap
    repository.
    """
    name = Path(str(model.config.name_or_path)).name.lower()
    file = f"{name}/q{CacheShape.from_model(model).groups}_dim16_sink16.pt"
    is_fast_kvzip = source == FAST_KVZIP
    try:
        if is_fast_kvzip:
            return Path(hf_hub_download(source, file))
        return Path(snapshot_download(source, allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:  # a malformed id, no network, no such file: many kinds
        gate = f"{file} of {source}" if is_fast_kvzip else repr(source)
        raise GateError(
            f"The gate {gate} is not here and cannot be fetched from the hub; check its name."
        ) from error


def _read_pickle(path: Path) -> Layers:
    """Read tensors only: code in a pickle is never run."""
    # What a pickle needs to build a numpy array, under the names of numpy 1 and 2.
    # numpy 1 and 2 name the same function differently, and files of both are published.
    rebuild = np.empty(0).__reduce__()[0]
    allowed: list[Any] = [
        (rebuild, "numpy.core.multiarray._reconstruct"),
        (rebuild, "numpy._core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        np.dtypes.Float64DType,
        np.dtypes.Float32DType,
    ]
    try:
        # weights_only refuses to build objects of other classes, so no code of the file runs.
        with torch.serialization.safe_globals(allowed):
            raw = io.BytesIO(files.read_bytes(path, str(path), PICKLE_LIMIT))
            _check_archive(raw)
            layers = torch.load(raw, map_location="cpu", weights_only=True)["module"]
        # Fails on a file of another layout, which then counts as damaged.
        values = [value for layer in layers for value in layer.values()]
    except Exception as error:  # damaged pickles and those with code raise many kinds
        raise GateError(
            f"{path} is not a Fast KVzip gate that can be read without running code; "
            f"fetch it again from {FAST_KVZIP}."
        ) from error
    # Numbers of numpy and nested lists also load; a gate is tensors only.
    is_plain = all(isinstance(value, Tensor) for value in values)
    if not is_plain or not isinstance(layers, list):
        raise GateError(f"{path} holds more than tensors; fetch it again from {FAST_KVZIP}.")
    return [dict(layer) for layer in layers]


def _check_archive(raw: io.BytesIO) -> None:
    """Refuse a zip archive, as torch.save writes, that unpacks to more than a gate can have."""
    if zipfile.is_zipfile(raw):
        with zipfile.ZipFile(raw) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > PICKLE_LIMIT:
            raise GateError(f"it unpacks to {unpacked:,} bytes")
    # torch.load reads from the start.
    raw.seek(0)


def _read_folder(folder: Path) -> tuple[str, Layers]:
    """Read a KVzap gate, which is linear if its config has no hidden_dim."""
    try:
        config = files.read_record(folder / "config.json", f"{folder / 'config.json'}")
        kind = "kvzap-mlp"
        if config.get("hidden_dim") is None:
            kind = "kvzap-linear"
        is_kvzap = config.get("model_type") == "kvzap"
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= read_tensors(file, str(file))[1]
    except (ValueError, AttributeError) as error:
        raise GateError(
            f"{folder} is damaged or not a KVzap gate; pass a folder with its config.json."
        ) from error
    if not is_kvzap:
        raise GateError(
            f"{folder} is not a KVzap gate according to its config.json; pass a folder of one."
        )
    return kind, split_layers(folder, tensors)
