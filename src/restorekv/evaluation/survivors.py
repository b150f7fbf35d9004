"""Which tokens of a compressed context survive, and how the budget falls on layers and heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.context_file import Manifest, read
from restorekv.model.prompt import Context


@dataclass(frozen=True)
class Survivors:
    """`keep` (L, H, S + T) bool: which heads hold which column of the full cache."""

    keep: Tensor
    context: Context
    manifest: Manifest

    @classmethod
    def of_file(cls, path: Path) -> Survivors:
        """From a cache file; needs no model."""
        cache, context, manifest = read(path)
        return cls(kept_columns(cache, context.positions), context, manifest)

    @property
    def per_head(self) -> Tensor:
        """(L, H) int64: context tokens held, the chat prefix left out."""
        return self.keep[..., self.context.prefix :].sum(-1)

    @property
    def per_layer(self) -> Tensor:
        """(L,) float: share of all held context pairs that lie in each layer."""
        counts = self.per_head.sum(-1).float()
        return counts / counts.sum().clamp(min=1)

    @property
    def per_position(self) -> Tensor:
        """(S + T,) float: share of the L*H heads that hold each column."""
        return self.keep.float().mean((0, 1))

    @property
    def forgotten(self) -> int:
        """Context tokens that no head holds."""
        return int((self.per_position[self.context.prefix :] == 0).sum())

    def figures(self) -> dict:
        """Everything above as plain JSON values."""
        return {
            **self.manifest.described(),
            "kept_per_head": self.per_head.tolist(),
            "share_per_layer": rounded(self.per_layer),
            "share_per_position": rounded(self.per_position),
            "tokens_no_head_holds": self.forgotten,
        }


def kept_columns(cache: RaggedCache, columns: int) -> Tensor:
    """The inverse of `RaggedCache.from_dense`: (L, H, S + T) bool."""
    layers = len(cache.layers)
    keep = torch.zeros(layers, cache.layers[0].heads, columns, dtype=torch.bool)
    for index, layer in enumerate(cache.layers):
        heads = torch.repeat_interleave(torch.arange(layer.heads), layer.offsets.diff().long().cpu())
        keep[index, heads, layer.positions.long().cpu()] = True
    return keep


def rounded(values: Tensor) -> list[float]:
    """Six digits are more than enough for a share."""
    return [round(value, 6) for value in values.tolist()]
