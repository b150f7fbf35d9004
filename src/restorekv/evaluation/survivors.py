"""Which tokens of a compressed context survive, and how layers and heads share the budget."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor

from restorekv.errors import RestoreKVError, import_extra
from restorekv.files import replace_file
from restorekv.model.prompt import Context
from restorekv.storage.cache_file import open_cache_file
from restorekv.storage.manifest import Manifest

FORMATS = (".png", ".pdf", ".svg")


@dataclass(frozen=True)
class Survivors:
    """What a cache file holds: `keep` (L, H, S + T) bool marks the heads that hold each column of
    the full cache.
    """

    keep: Tensor
    context: Context
    manifest: Manifest

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a cache file; needs no model."""
        stored = open_cache_file(path)
        return cls(
            stored.make_cache().mark_held(stored.context.num_tokens),
            stored.context,
            stored.manifest,
        )

    @property
    def per_head(self) -> Tensor:
        """(L, H) int64: context tokens held, the chat prefix left out."""
        return self.keep[..., self.context.prefix_length :].sum(-1)

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
        """The number of context tokens that no head holds."""
        return int((self.per_position[self.context.prefix_length :] == 0).sum())

    def to_json(self) -> dict:
        """Return the manifest and all of the above as plain JSON values, shares with six digits."""
        layers = [round(share, 6) for share in self.per_layer.tolist()]
        positions = [round(share, 6) for share in self.per_position.tolist()]
        return {
            **self.manifest.to_json(),
            "kept_per_head": self.per_head.tolist(),
            "share_per_layer": layers,
            "share_per_position": positions,
            "tokens_no_head_holds": self.forgotten,
        }


def save_plot(survivors: Survivors, path: Path, title: str) -> None:
    """Write a chart of what survived as PNG, PDF or SVG, by the ending of the name."""
    if path.suffix.lower() not in FORMATS:
        raise RestoreKVError(f"The plot {path} must end in {', '.join(FORMATS)}; give such a name.")
    chart = import_extra("restorekv.evaluation.survivor_plots", "eval").plot_survivors(
        survivors, title
    )
    with replace_file(path) as temporary:
        temporary.write_bytes(chart.render(path.suffix[1:].lower()))
