"""What every figure of a model is made with, as plain JSON values: whether two of them may be compared."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version

import torch
from transformers import PreTrainedModel

from restorekv.compression.prepared import CompressionConfig
from restorekv.model.load import model_fingerprint, model_name, rope_fingerprint
from restorekv.model.shape import CacheShape

PACKAGES = ("restorekv", "torch", "transformers", "peft")


def facts(model: PreTrainedModel, conventions: CompressionConfig) -> dict:
    """Model, conventions, device and versions."""
    return {
        "model": model_name(model),
        "fingerprint": model_fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "rope": rope_fingerprint(model.config),
        "shape": asdict(CacheShape.of(model)),
        **conventions.described(),
        "budget": "B = floor(r T L H), exact",
        "decoding": "greedy",
        "device": model.device.type,
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES},
    }
