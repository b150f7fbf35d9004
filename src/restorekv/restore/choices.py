"""What can be chosen for a restore pass; needs no PyTorch."""

from typing import Literal, get_args

# The linear layers that LoRA can adapt.
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Which cache the restore tokens read.
RestoreFrom = Literal["full", "evicted"]
RESTORE_FROM: tuple[str, ...] = get_args(RestoreFrom)
# Far above any alpha of LoRA that trains; no file of an adapter may have more.
LARGEST_ALPHA = 1e6
