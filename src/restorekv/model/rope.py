"""Keys as if their tokens stood at other positions: RoPE depends on differences of positions alone."""

import sys

import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv.errors import RestoreKVError
from restorekv.model import support
from restorekv.model.shape import decoder

# The kinds of RoPE whose frequencies do not change with the length of the text.
SHIFTABLE = ("default", "linear", "yarn", "llama3")


def shift_keys(model: PreTrainedModel, keys: Tensor, positions: int) -> Tensor:
    """Return keys (..., D) as if their tokens stood `positions` later, computed in float64."""
    rotary = getattr(decoder(model), "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if kind not in SHIFTABLE:
        raise RestoreKVError(
            f"Keys of a model with RoPE of the kind {kind!r} cannot be moved; use one of {', '.join(SHIFTABLE)}."
        )
    frequencies = rotary.inv_freq.double()
    shifted = _rotate_pairs(keys.double(), frequencies * positions)
    _check_layout(model, rotary)
    support.check_moves(model, lambda own, count: _rotate_pairs(own.double(), frequencies * count))
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


def _check_layout(model: PreTrainedModel, rotary: torch.nn.Module) -> None:
    """Refuse a model that pairs the numbers of a key in another way than `_rotate_pairs`."""
    apply_rope = getattr(sys.modules[type(rotary).__module__], "apply_rotary_pos_emb", None)
    expected = None
    device = rotary.inv_freq.device
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
        raise RestoreKVError(
            f"{type(model).__name__} rotates keys in an order that restorekv does not know, so they cannot be moved."
        )
