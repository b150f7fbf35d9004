"""Whether an adapter or a gate fits the weights at hand: made for these, for others of the same model, or for another.

A fingerprint tells exact weights apart. A sketch, about a thousand values from all matrices, tells how near two sets of
weights are: of SmolLM2-135M-Instruct, copies rounded to 8, 4, 3 and 2 bits have a cosine similarity of 1.000, 0.996,
0.99 and 0.95 with the model itself, and random weights of the same scale one of 0.03.
"""

import base64
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv.errors import RestoreKVWarning
from restorekv.model.load import WEIGHTS, base_parameters, samples
from restorekv.model.shape import CacheShape

NUMBERS = 1024
ALIKE = 0.9  # below a rounding to two bits, far above an unrelated training
DESCRIBED: WeakKeyDictionary[PreTrainedModel, dict] = WeakKeyDictionary()  # models spread over processes


class Record(Protocol):
    """What the records of adapters and gates have in common."""

    model: str
    fingerprint: str
    weights: dict | None


def describe(model: PreTrainedModel) -> dict[str, object]:
    """Plain JSON values: where the weights came from if that is known, the architecture, and the sketch in base64.

    The sketch holds the same number of evenly spaced values of every matrix, in bfloat16, in the order of the sorted
    names; LoRA layers are left out.
    """
    if model in DESCRIBED:
        return DESCRIBED[model]
    config = model.config.get_text_config()
    names = ("model_type", "vocab_size", "intermediate_size")
    matrices = [weight for _, weight in base_parameters(model) if weight.ndim > 1]
    count = max(NUMBERS // len(matrices), 1)
    values = torch.cat([samples(weight, count) for weight in matrices])
    return {
        "source": WEIGHTS.get(model),
        "architecture": {name: getattr(config, name, None) for name in names} | asdict(CacheShape.of(model)),
        "sketch": base64.b64encode(values.view(torch.uint8).numpy().tobytes()).decode("ascii"),
    }


def similarity(one: Mapping[str, object] | None, other: Mapping[str, object] | None) -> float:
    """Cosine similarity of two descriptions' sketches; 0 where there is none or the architectures differ."""
    if not one or not other or one.get("architecture") != other.get("architecture"):
        return 0.0
    try:
        first, second = (decoded(each["sketch"]) for each in (one, other))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return 0.0
    return float(torch.cosine_similarity(first, second, dim=0)) if first.shape == second.shape else 0.0


def decoded(sketch: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(sketch)), dtype=torch.bfloat16).float()


def fits(what: str, card: Record, own: Record) -> bool:
    """Whether `what` was made for the model of `own`; warns if it was for other weights of that model."""
    if card.fingerprint == own.fingerprint:
        return True
    if not similarity(card.weights, own.weights) >= ALIKE:
        return False
    trained, here = ((each.weights or {}).get("source") for each in (card, own))
    told = f"The {what} was made for other weights of {card.model}" + (f", {trained}" if trained else "")
    told += f", than these, {here}" if here else ""
    warnings.warn(f"{told}; expect slightly worse answers.", RestoreKVWarning, stacklevel=4)
    return True
