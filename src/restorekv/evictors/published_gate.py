"""Converts gates that their authors published.

Fast KVzip  Jang-Hyun/Fast-KVzip: a torch pickle {"module": [state dict of every layer], ...} for each model. It is read
            with weights_only plus numpy arrays, which the published files hold; anything else is refused. The authors'
            training adds the bias b twice and inference once; its value is not changed.
KVzap       nvidia/KVzap-linear-<model>, nvidia/KVzap-mlp-<model>: config.json and safetensors, layers.<l>.weight or
            layers.<l>.0.weight, layers.<l>.2.weight and biases.
"""

import io
import zipfile
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import hf_hub_download, snapshot_download
from torch import Tensor
from transformers import PreTrainedModel

from restorekv import files
from restorekv.errors import GateError
from restorekv.evictors.gate_file import (
    TARGETS,
    Gate,
    GateCard,
    check_numbers,
    check_shapes,
    split_layers,
)
from restorekv.model.shape import CacheShape
from restorekv.seal import read_tensors

FAST_KVZIP = "Jang-Hyun/Fast-KVzip"
PICKLE_LIMIT = 1 << 30  # bytes; the published files have a few megabytes
Layers = list[dict[str, Tensor]]


def convert_gate(source: str, model: PreTrainedModel) -> Gate:
    """Converts a pickle of Fast KVzip, a folder of KVzap, or the hub id of either; raises
    GateError.
    """
    path = Path(source) if Path(source).exists() else _download_gate(source, model)
    if not path.is_file() and not path.is_dir():
        raise GateError(
            f"{path} is not a regular file; give a file of Fast KVzip or a folder of KVzap."
        )
    if path.is_file() and path.suffix == ".safetensors":
        raise GateError(
            f"{path} is not a pickle of Fast KVzip; if it is a gate of restorekv, use it with gate={path}."
        )
    kind, layers = _read_folder(path) if path.is_dir() else ("fastkvzip", _read_pickle(path))
    for index, layer in enumerate(layers):
        check_numbers(source, {f"layers.{index}.{name}": tensor for name, tensor in layer.items()})
    check_shapes(source, kind, layers, CacheShape.from_model(model))
    return Gate(layers, GateCard.for_model(model, kind, TARGETS[kind], settings={"source": source}))


def _download_gate(source: str, model: PreTrainedModel) -> Path:
    """Downloads the file for `model`, by its name, from Fast KVzip's repository, or a whole KVzap
    repository.
    """
    name = Path(str(model.config.name_or_path)).name.lower()
    file = f"{name}/q{CacheShape.from_model(model).groups}_dim16_sink16.pt"
    try:
        if source == FAST_KVZIP:
            return Path(hf_hub_download(source, file))
        return Path(snapshot_download(source, allow_patterns=["config.json", "*.safetensors"]))
    except Exception as error:  # a malformed id, no network, no such file: many kinds
        what = f"{file} of {source}" if source == FAST_KVZIP else repr(source)
        raise GateError(
            f"The gate {what} is not here and cannot be fetched from the hub; check its name."
        ) from error


def _read_pickle(path: Path) -> Layers:
    """Reads tensors only: code in a pickle is never run."""
    rebuild = np.empty(0).__reduce__()[0]
    arrays = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    arrays += [np.ndarray, np.dtype, np.dtypes.Float64DType, np.dtypes.Float32DType]
    try:
        with torch.serialization.safe_globals(arrays):
            raw = io.BytesIO(files.read_bytes(path, str(path), PICKLE_LIMIT))
            _check_archive(raw)
            layers = torch.load(raw, map_location="cpu", weights_only=True)["module"]
        plain = all(isinstance(tensor, Tensor) for layer in layers for tensor in layer.values())
    except Exception as error:  # damaged pickles and those with code raise many kinds
        raise GateError(
            f"{path} is not a Fast KVzip gate that can be read without running code; fetch it again from {FAST_KVZIP}."
        ) from error
    if not plain or not isinstance(layers, list):
        raise GateError(f"{path} holds more than tensors; fetch it again from {FAST_KVZIP}.")
    return [dict(layer) for layer in layers]


def _check_archive(raw: io.BytesIO) -> None:
    """Refuses an archive, which a file of torch.save is, that unfolds to much more than it has
    bytes.
    """
    if zipfile.is_zipfile(raw):
        with zipfile.ZipFile(raw) as archive:
            unfolded = sum(entry.file_size for entry in archive.infolist())
        if unfolded > PICKLE_LIMIT:
            raise GateError(f"it unfolds to {unfolded:,} bytes")
    raw.seek(0)


def _read_folder(folder: Path) -> tuple[str, Layers]:
    """Reads a KVzap gate, which is linear if its config has no hidden_dim."""
    try:
        config = files.read_record(folder / "config.json", f"{folder / 'config.json'}")
        kind = "kvzap-linear" if config.get("hidden_dim") is None else "kvzap-mlp"
        known = config.get("model_type") == "kvzap"
        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= read_tensors(file, str(file))[1]
    except (ValueError, AttributeError) as error:
        raise GateError(
            f"{folder} is damaged or not a KVzap gate; give a folder with its config.json."
        ) from error
    if not known:
        raise GateError(
            f"{folder} is not a KVzap gate according to its config.json; give a folder of one."
        )
    return kind, split_layers(folder, tensors)
