"""Scores and a count -> the pairs that stay (Eq. 3: Evict(C, s, B) keeps exactly B)."""

import torch
from torch import Tensor

from restorekv.errors import RestoreKVError


def exact_top(scores: Tensor, pairs: int) -> Tensor:
    """The `pairs` highest of all scores (L, H, T) as a mask of the same shape.

    One ranking over all layers and heads; of equal scores the lower (layer, head, position) wins, so that ties
    can neither miss the budget nor differ between devices.
    """
    flat = scores.reshape(-1)
    if not 0 <= pairs <= flat.numel():
        raise ValueError(f"cannot keep {pairs} of {flat.numel()} pairs")
    if flat.isnan().any():
        raise RestoreKVError("The scores are not numbers (NaN); load the model in bfloat16 or float32.")
    if pairs == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    threshold = flat.kthvalue(flat.numel() - pairs + 1).values
    keep = flat > threshold
    ties = (flat == threshold).nonzero().squeeze(-1)
    keep[ties[: pairs - int(keep.sum())]] = True
    return keep.view_as(scores)
