"""The check of whether an adapter or a gate was made for these weights, for other weights of the
same model, or for another model.

A fingerprint identifies exact weights. A sketch, about a thousand values from all matrices, shows
how close two sets of weights are: copies of SmolLM2-135M-Instruct that were rounded to 8, 4, 3 and
2 bits have a cosine similarity of 1.000, 0.996, 0.99 and 0.95 with the model itself, and random
weights of the same scale have one of 0.03.
"""

import base64
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from restorekv.errors import RestoreKVError, make_printable, warn
from restorekv.model.identity import ModelIdentity

# From this similarity on, weights count as those of one model: a copy rounded to two bits is above
# it, and the weights of a different training are far below.
LEAST_SIMILARITY = 0.9


Found = TypeVar("Found")


class BaseCard(Protocol):
    """What the cards of adapters and gates say of the model that they were made for."""

    @property
    def model(self) -> str: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def rope(self) -> dict: ...

    @property
    def weights(self) -> dict | None: ...


def measure_similarity(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> float:
    """Return the cosine similarity of the sketches in two descriptions of weights.

    It is 0 if one is missing or damaged, or if the architectures differ.
    """
    if not one or not other or one.get("architecture") != other.get("architecture"):
        return 0.0
    try:
        first = decode_sketch(one["sketch"])
        second = decode_sketch(other["sketch"])
    except (KeyError, TypeError, ValueError, RuntimeError):
        return 0.0
    # A cosine needs the same number of values on both sides.
    if first.shape != second.shape:
        return 0.0
    return float(torch.cosine_similarity(first, second, dim=0))


def find_made_for(
    identity: ModelIdentity,
    candidates: Iterable[tuple[Found, str | None, Mapping[str, Any] | None]],
) -> Found | None:
    """Return the first candidate that was made for exactly these weights, else the first that was
    made for nearly these, such as a rounded copy; None if there is neither.

    Args:
        identity: The identity of the model to find a candidate for.
        candidates: The objects to choose from, each with the fingerprint and the description of the
            weights that it was made for.
    """
    similar = None
    for candidate, fingerprint, weights in candidates:
        if fingerprint == identity.fingerprint:
            return candidate
        if similar is None and measure_similarity(weights, identity.weights) >= LEAST_SIMILARITY:
            similar = candidate
    return similar


def decode_sketch(sketch: str) -> Tensor:
    """Return the values of a sketch as float32."""
    return torch.frombuffer(bytearray(base64.b64decode(sketch)), dtype=torch.bfloat16).float()


def describe_base(identity: ModelIdentity) -> dict[str, Any]:
    """Return what the card of an adapter or a gate says of the model that it is made for."""
    return {
        "model": identity.name,
        "fingerprint": identity.fingerprint,
        "rope": identity.rope,
        "weights": identity.weights,
    }


def check_base(
    what: str,
    card: BaseCard,
    identity: ModelIdentity,
    error: type[RestoreKVError],
    fix: str = "load that one",
) -> None:
    """Refuse an adapter or a gate that was made for a different model or RoPE; warn if it was made
    for other weights of the model.

    Args:
        what: The adapter or gate, for messages.
        card: Its card, which says what model it was made for.
        identity: The identity of the model that it is to be used with.
        error: The class of error to raise.
        fix: What a user can do about a different model.

    Raises:
        RestoreKVError: An `error`, if the card is of a different model or RoPE.
    """
    has_same_weights = card.fingerprint == identity.fingerprint
    has_same_rope = card.rope == identity.rope
    # Another RoPE changes the fingerprint as well. Without a sketch, only the name says that the
    # model is the card's.
    is_stretched = not (has_same_rope or card.weights) and card.model == identity.name
    if not (has_same_weights or is_stretched):
        _refuse_different_model(what, card, identity, error, fix)
    if not has_same_rope:
        raise error(
            f"The {what} was made with RoPE {make_printable(card.rope)}, "
            f"the model has {identity.rope}; load the model with the same RoPE configuration."
        )
    if not has_same_weights:
        _warn_about_other_weights(what, card, identity)


def _refuse_different_model(
    what: str, card: BaseCard, identity: ModelIdentity, error: type[RestoreKVError], fix: str
) -> None:
    """Refuse weights that are not even a rounded copy of the card's, which an adapter also fits."""
    similarity = 0.0
    if card.weights is not None:
        similarity = measure_similarity(card.weights, identity.weights)
    # Not "<": the similarity to a damaged sketch may be NaN, which is below no number.
    if similarity >= LEAST_SIMILARITY:
        return
    # float16 rounds differently from bfloat16, so it changes the fingerprint of a checkpoint.
    if identity.dtype == "float16" and not card.weights:
        raise error(
            f"The {what} cannot be told to fit this model in float16; if it is "
            f"{make_printable(card.model)}, load it in float32 or bfloat16."
        )
    raise error(f"The {what} was made for a different model ({make_printable(card.model)}); {fix}.")


def _warn_about_other_weights(what: str, card: BaseCard, identity: ModelIdentity) -> None:
    """Warn that the card is of another copy of the model, and name both copies if possible."""
    # A model that was made in memory has no name.
    name = make_printable(card.model) or "this model"
    message = f"The {what} was made for other weights of {name}"
    made = (card.weights or {}).get("source")
    if made:
        message += f", {make_printable(made)}"
    own = identity.weights["source"]
    if own:
        message += f", than these, {own}"
    warn(f"{message}; expect slightly worse answers.")
