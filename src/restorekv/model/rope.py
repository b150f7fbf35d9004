"""RoPE: its settings, how many positions it is made for, and keys moved to other positions.

Keys can be moved because RoPE depends on differences of positions alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from restorekv.errors import ModelError, RestoreKVError
from restorekv.model import support
from restorekv.model.shape import FULL_ATTENTION, get_backbone, get_dtype_name

# The kinds of RoPE whose frequencies do not change with the length of the text.
SHIFTABLE = ("default", "linear", "yarn", "llama3")
# The kinds of RoPE that already reach beyond the positions of the training.
STRETCHED = ("yarn", "longrope", "dynamic", "linear", "llama3")
MOST_YARN = 64  # the largest factor of YaRN that is accepted
ROUNDED = "rounded_to"
COUNTS = ("original_max_position_embeddings",)  # settings that are whole numbers
NO_LIMIT = sys.maxsize  # positions of a model that names no limit


def get_rope_settings(config: PretrainedConfig) -> dict[str, Any]:
    """Return what determines the rotation of keys, YaRN included, as plain JSON values."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    if not rope:
        # Older configs name the base, and in a second entry how it is stretched.
        rope = {"rope_theta": getattr(config, "rope_theta", None)}
        rope |= getattr(config, "rope_scaling", None) or {}
    plain = {key: value for key, value in rope.items() if value is not None}
    return json.loads(json.dumps(plain, sort_keys=True, default=str))


def write_rope_settings(config: PretrainedConfig) -> str:
    """Return the RoPE settings as JSON in which equal numbers are written alike: a config may name
    the base as 10000 or as 10000.0.
    """
    return json.dumps(_unify_numbers(get_rope_settings(config)), sort_keys=True)


def _unify_numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with whole numbers as floats, except for numbers of positions."""
    unified = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            unified[name] = _unify_numbers(value)
        elif type(value) is int and name not in COUNTS:
            unified[name] = float(value)
        else:
            unified[name] = value
    return unified


def describe_rotation(model: PreTrainedModel) -> dict[str, Any]:
    """Return what determines the rotation of keys in a model as it is now: the settings of its
    config, and under ROUNDED the dtype of frequencies that a cast has rounded to 16 bits.
    """
    settings = get_rope_settings(model.config)
    for name, buffer in model.named_buffers():
        # `model.to(dtype)` casts them, and loading a model in that dtype does not.
        rounding = _find_rounding(buffer) if "inv_freq" in name else None
        if rounding is not None:
            settings[ROUNDED] = get_dtype_name(rounding)
    return settings


def _find_rounding(frequencies: Tensor) -> torch.dtype | None:
    """Return the dtype of 16 bits that frequencies (D / 2,) were rounded to, None if they were not.

    The values tell it too, since a cast back to float32 does not bring the lost bits back.
    """
    if frequencies.dtype.itemsize < torch.float32.itemsize:
        return frequencies.dtype
    if frequencies.is_meta:
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(frequencies, frequencies.to(dtype).to(frequencies.dtype)):
            return dtype
    return None


def count_positions(config: PretrainedConfig) -> int:
    """Return how many positions the model was made for, NO_LIMIT if its config does not say.

    A stretched RoPE (YaRN) multiplies the original number. A config with a RoPE for each kind of
    layers already has the number that results from all of them.
    """
    config = config.get_text_config()
    configured = getattr(config, "max_position_embeddings", None) or 0
    rope = get_rope_settings(config)
    if FULL_ATTENTION in rope:
        rope = {}
    return _multiply_positions(rope, configured)


def count_unstretched_positions(config: PretrainedConfig) -> int:
    """Return the positions that the factor of a YaRN multiplies; NO_LIMIT if that is not known."""
    settings = get_rope_settings(config)
    settings = settings.get(FULL_ATTENTION, settings)
    original = None
    # Other kinds of RoPE, such as Llama 3's, have such a number for a different purpose.
    if settings.get("rope_type") == "yarn":
        original = settings.get("original_max_position_embeddings")
    return int(original or count_positions(config))


def _multiply_positions(rope: Mapping[str, Any], configured: int) -> int:
    """Return how many positions a RoPE reaches if its config names `configured` ones (0: none)."""
    # Llama 3's kind also has a factor and an original number, to say which frequencies it changes
    # by how much. Its configs name the positions that result.
    if rope.get("rope_type") == "llama3":
        return configured or NO_LIMIT
    original = rope.get("original_max_position_embeddings")
    # These two name no original number: they stretch the configured one.
    if rope.get("rope_type") in ("linear", "dynamic"):
        original = original or configured
    stretched = float(rope.get("factor") or 0) * float(original or 0)
    return max(configured, int(stretched)) or NO_LIMIT


def explain_unstretchable(config: PretrainedConfig) -> str | None:
    """Return why no YaRN stretches a model's RoPE, as part of a sentence; None if one can."""
    text = config.get_text_config()
    if not _has_rope(text):
        return f"{text.model_type} has no RoPE"
    settings = get_rope_settings(text)
    kind = settings.get(FULL_ATTENTION, settings).get("rope_type") or "default"
    # In Gemma 4, for example, only some numbers of a head are rotated, and YaRN is for all.
    if kind != "default" and kind not in STRETCHED:
        return f"{text.model_type} has a RoPE of the kind {kind!r}"
    return None


def _has_rope(text: PretrainedConfig) -> bool:
    """Return whether a config names a RoPE that its model uses."""
    # Granite with state-space layers names one in any case, and then whether it is used.
    used = getattr(text, "position_embedding_type", "rope") not in (None, "nope")
    return used and bool(get_rope_settings(text))


def stretch_rope(config: PretrainedConfig, rope: Mapping[str, object] | float) -> None:
    """Change the RoPE of a config and its number of positions.

    A mapping changes entries of the RoPE; a number is the factor of a YaRN over the model's
    positions.
    """
    text = config.get_text_config()
    unstretchable = explain_unstretchable(text)
    # All settings of another kind may be given, but not those of a RoPE that is not there.
    if unstretchable is not None and not (isinstance(rope, Mapping) and _has_rope(text)):
        raise ModelError(
            f"{unstretchable}, which YaRN does not stretch; leave out rope (in the shell --yarn), "
            "or use another model."
        )
    settings = get_rope_settings(text)
    # Models with a RoPE for each kind of layers have settings by the kind's name. Layers with a
    # window never see far, so only the others are stretched.
    by_kind = FULL_ATTENTION in settings
    own = settings[FULL_ATTENTION] if by_kind else settings
    if not isinstance(rope, Mapping):
        if not isinstance(rope, int | float) or not 1 < rope <= MOST_YARN:
            raise RestoreKVError(
                f"YaRN's factor must be more than 1 and at most {MOST_YARN}, not {rope!r}."
            )
        if own.get("rope_type") in STRETCHED:
            raise RestoreKVError(
                "The model's RoPE is stretched already; give all of its settings to load_model."
            )
        rope = {
            "rope_type": "yarn",
            "factor": float(rope),
            "original_max_position_embeddings": count_positions(text),
        }
    if not by_kind:
        # The number of positions follows from the new settings, so they are set first.
        text.rope_parameters = _change_settings(own, rope)
        text.max_position_embeddings = count_positions(text)
        return
    changed: dict[str, Any] = dict(rope) if FULL_ATTENTION in rope else {FULL_ATTENTION: rope}
    unknown = sorted(changed.keys() - settings.keys())
    if unknown:
        raise RestoreKVError(
            f"The model has no RoPE of the kind {unknown[0]!r}; give settings of "
            f"{' or '.join(settings)}."
        )
    text.rope_parameters = {
        kind: _change_settings(settings[kind], changed.get(kind, {})) for kind in settings
    }
    stretched = text.rope_parameters[FULL_ATTENTION]
    # A RoPE that was stretched before does not say how many positions it had originally, unless the
    # new settings do.
    if own.get("rope_type") not in STRETCHED or "original_max_position_embeddings" in stretched:
        text.max_position_embeddings = _multiply_positions(stretched, count_positions(text))


def _change_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a RoPE with changes; refuse a factor that nothing would use."""
    changed = {**settings, **changes}
    # Model cards and older configs call the kind "type".
    if "type" in changes:
        changed["rope_type"] = changed.pop("type")
    if changed.get("rope_type", "default") == "default" and "factor" in changes:
        raise RestoreKVError(
            "A RoPE of the kind 'default' has no factor; name the kind too, such as "
            "'rope_type': 'yarn'."
        )
    return changed


def compute_rotation(
    model: PreTrainedModel, like: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines (1, Q, D) for positions (1, Q), in the dtype of `like`.

    If layers with a window rotate differently, the result holds for the layers that see the whole
    text.
    """
    backbone: Any = get_backbone(model)
    # LFM2 with experts has another name for it.
    rotary: Any = getattr(backbone, "rotary_emb", None) or backbone.pos_emb
    if isinstance(getattr(rotary, "rope_type", None), dict):
        return rotary(like, positions, FULL_ATTENTION)
    return rotary(like, positions)


def shift_keys(model: PreTrainedModel, keys: Tensor, positions: int) -> Tensor:
    """Return keys (..., D) as if their tokens stood `positions` later, computed in float64."""
    rotary: Any = getattr(get_backbone(model), "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if kind not in SHIFTABLE:
        raise ModelError(
            f"Keys of a model with RoPE of the kind {kind!r} cannot be moved; "
            f"use one of {', '.join(SHIFTABLE)}."
        )
    # Turning by `positions` adds their angle to each pair of numbers: angles of RoPE add up.
    frequencies = rotary.inv_freq.double()
    shifted = _rotate_pairs(keys.double(), frequencies * positions)
    # Both checks compare the same arithmetic with the model's own rotation.
    _check_layout(model, rotary)
    support.check_keys_movable(
        model, lambda own, count: _rotate_pairs(own.double(), frequencies * count)
    )
    return shifted.to(keys.dtype)


def _rotate_pairs(keys: Tensor, angles: Tensor) -> Tensor:
    """Rotate the first 2 * len(angles) numbers of keys (..., D).

    Number i is rotated together with number i + len(angles); the rest, which partial RoPE leaves
    alone, stays.
    """
    cos = angles.cos().to(keys.device)
    sin = angles.sin().to(keys.device)
    half = len(angles)
    first, second, rest = keys.split([half, half, keys.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _check_layout(model: PreTrainedModel, rotary: Any) -> None:
    """Refuse a model that pairs the numbers of a key in a way other than `_rotate_pairs`."""
    apply_rope = getattr(sys.modules[type(rotary).__module__], "apply_rotary_pos_emb", None)
    expected = None
    device = rotary.inv_freq.device
    # Any numbers do, as long as no two are alike: a wrong order then shows.
    keys = torch.linspace(-1, 1, 2 * len(rotary.inv_freq), dtype=torch.float64, device=device)
    keys = keys[None, None, None]
    if apply_rope is not None:
        cos, sin = rotary(keys, torch.tensor([[3]], device=device))
        # YaRN scales cosines and sines; a rotation alone does not.
        cos = cos / rotary.attention_scaling
        sin = sin / rotary.attention_scaling
        expected = apply_rope(keys, keys, cos, sin)[1]
    ours = _rotate_pairs(keys, rotary.inv_freq.double() * 3)
    if expected is None or not torch.allclose(expected, ours, atol=1e-4):
        raise ModelError(
            f"{type(model).__name__} rotates keys in an order that restorekv does not know, "
            "so they cannot be moved; compress the whole text at once."
        )
