"""Decides whether an adapter or a gate was made for these weights, other weights of the model, or
another model.

A fingerprint identifies exact weights. A sketch, about a thousand values from all matrices, measures how close two sets
of weights are: copies of SmolLM2-135M-Instruct that were rounded to 8, 4, 3 and 2 bits have a cosine similarity of
1.000, 0.996, 0.99 and 0.95 with the model itself, random weights of the same scale one of 0.03.
"""

import base64
from collections.abc import Mapping
from dataclasses import asdict
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv.errors import RestoreKVError, make_printable, warn
from restorekv.model import load
from restorekv.model.shape import CacheShape

NUMBERS = 1024
# The least similarity of one model's weights: below rounding to two bits, far above another
# training.
ALIKE = 0.9
DESCRIPTIONS: WeakKeyDictionary[PreTrainedModel, dict] = WeakKeyDictionary()  # of remembered models


class Record(Protocol):
    """What the records of adapters and gates share."""

    model: str
    fingerprint: str
    rope: dict
    weights: dict | None


def describe(model: PreTrainedModel) -> dict[str, object]:
    """Returns plain JSON values: the source of the weights if known, the architecture, and the
    sketch in base64.

    The sketch holds the same number of evenly spaced values from every matrix, in bfloat16, in the
    order of the sorted names, without LoRA layers.
    """
    if model in DESCRIPTIONS:
        return DESCRIPTIONS[model]
    config = model.config.get_text_config()
    names = ("model_type", "vocab_size", "intermediate_size")
    matrices = [weight for _, weight in load.base_parameters(model) if weight.ndim > 1]
    count = max(NUMBERS // len(matrices), 1)
    values = torch.cat([load.samples(weight, count) for weight in matrices])
    return {
        "source": load.WEIGHTS.get(model),
        "architecture": {name: getattr(config, name, None) for name in names}
        | asdict(CacheShape.of(model)),
        "sketch": base64.b64encode(values.view(torch.uint8).numpy().tobytes()).decode("ascii"),
    }


def remember(model: PreTrainedModel) -> None:
    """Keeps fingerprint and description, which cannot be computed once the weights are sharded over
    processes.
    """
    load.FINGERPRINTS[model], DESCRIPTIONS[model] = load.model_fingerprint(model), describe(model)


def similarity(one: Mapping[str, object] | None, other: Mapping[str, object] | None) -> float:
    """Returns the cosine similarity of two sketches, or 0 if one is missing or the architectures
    differ.
    """
    if not one or not other or one.get("architecture") != other.get("architecture"):
        return 0.0
    try:
        first, second = (decoded(each["sketch"]) for each in (one, other))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return 0.0
    return (
        float(torch.cosine_similarity(first, second, dim=0)) if first.shape == second.shape else 0.0
    )


def decoded(sketch: str) -> Tensor:
    """Returns the values of a sketch as float32."""
    return torch.frombuffer(bytearray(base64.b64decode(sketch)), dtype=torch.bfloat16).float()


def origin(model: PreTrainedModel) -> dict[str, object]:
    """Returns what the record of an adapter or a gate says of the model that it is made for."""
    name = load.model_name(model)
    fingerprint = load.model_fingerprint(model)
    rope = load.rope_fingerprint(model.config)
    return {"model": name, "fingerprint": fingerprint, "rope": rope, "weights": describe(model)}


def check(
    what: str,
    card: Record,
    model: PreTrainedModel,
    error: type[RestoreKVError],
    fix: str = "load that one",
) -> None:
    """Refuses what was made for another model or another rotation of its keys; warns of other
    weights of the model.
    """
    if card.rope != (rope := load.rope_fingerprint(model.config)):
        raise error(
            f"The {what} was made with RoPE {make_printable(card.rope)}, the model has {rope}; "
            "load the model with the same RoPE configuration."
        )
    if card.fingerprint == load.model_fingerprint(model):
        return
    own = describe(model)
    if not similarity(card.weights, own) >= ALIKE:
        fix = (
            "load it in float32 or bfloat16"
            if model.dtype == torch.float16 and not card.weights
            else fix
        )
        raise error(f"The {what} was made for another model ({make_printable(card.model)}); {fix}.")
    message = f"The {what} was made for other weights of {make_printable(card.model)}"
    made = card.weights.get("source")
    message += f", {make_printable(made)}" if made else ""
    message += f", than these, {own['source']}" if own["source"] else ""
    warn(f"{message}; expect slightly worse answers.")
