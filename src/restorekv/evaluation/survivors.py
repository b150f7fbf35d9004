"""Which tokens of a compressed context survive, and how the budget falls on layers and heads, as figures and charts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Self

import numpy as np
from torch import Tensor

from restorekv.compression.context_file import Manifest, read
from restorekv.errors import RestoreKVError
from restorekv.evaluation import draw
from restorekv.evaluation.charts import BLUE, MUTED, WIDE, Axis, Chart, Heat, Level, Line, Mark, Panel, heat, index_axis
from restorekv.files import replacing
from restorekv.model.prompt import Context

FORMATS = (".png", ".pdf", ".svg")
BINS = 256  # positions that a line along the context shows at most


@dataclass(frozen=True)
class Survivors:
    """`keep` (L, H, S + T) bool says which heads hold which column of the full cache."""

    keep: Tensor
    context: Context
    manifest: Manifest

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Read a cache file; needs no model."""
        stored = read(path)
        return cls(stored.cache().kept(stored.context.positions), stored.context, stored.manifest)

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
        """The number of context tokens that no head holds."""
        return int((self.per_position[self.context.prefix :] == 0).sum())

    def figures(self) -> dict:
        """Returns all of the above as plain JSON values, shares with six digits."""
        layers, positions = (
            [round(share, 6) for share in each.tolist()] for each in (self.per_layer, self.per_position)
        )
        return {
            **self.manifest.described(),
            "kept_per_head": self.per_head.tolist(),
            "share_per_layer": layers,
            "share_per_position": positions,
            "tokens_no_head_holds": self.forgotten,
        }

    def chart(self, title: str) -> Chart:
        """Returns what each head, each layer and each stretch of the context keeps."""
        m, mark = self.manifest, Mark("", BLUE)
        share = self.per_position[self.context.prefix :]
        stretches = [float(part.mean()) for part in share.tensor_split(min(BINS, len(share)))]
        restored = f" + {m.restore_tokens} restore tokens" if m.restore_tokens else ""
        panels = [
            heads_panel("Context tokens kept by each head", (self.per_head / max(m.tokens, 1)).tolist()),
            layers_panel({Mark("", BLUE, "o"): self.per_layer.tolist()}),
            positions_panel({mark: stretches}, WIDE),
        ]
        made = f"{m.evictor}{restored}, r = {float(Fraction(m.ratio)):g}, T = {m.tokens:,} tokens"
        return Chart("survivors", f"{title}: {made}, {m.pairs_held:,} KV pairs held", panels)


def save_plot(survivors: Survivors, path: Path, title: str) -> None:
    """Writes the chart as PNG, PDF or SVG, by the ending of the name."""
    check_format(path)
    with replacing(path) as temporary:
        temporary.write_bytes(draw.image(survivors.chart(title), path.suffix[1:].lower()))


def check_format(path: Path) -> None:
    """Refuses an ending that no writer is known for."""
    if path.suffix.lower() not in FORMATS:
        raise RestoreKVError(f"The plot {path} must end in {', '.join(FORMATS)}; give such a name.")


def heads_panel(title: str, kept: Sequence[Sequence[float]]) -> Panel:
    """Returns a map of the share (layers, heads) of the context's tokens that each head keeps, in percent."""
    share = 100 * np.array(kept)
    rows, columns = ([str(index) for index in range(size)] for size in share.shape)
    return heat(
        Heat(share.tolist(), rows, columns, max(share.max(), 1e-9)), "KV head (percent of tokens)", "layer", title
    )


def layers_panel(shares: Mapping[Mark, Sequence[float]]) -> Panel:
    """Returns each layer's share of all held context pairs, beside an even split."""
    lines = [Line(mark, range(len(share)), [100 * each for each in share]) for mark, share in shares.items()]
    even = Level(Mark("even split", MUTED, dashed=True), 100 / len(lines[0].x))
    return Panel(
        [*lines, even], index_axis("layer", len(lines[0].x)), Axis("share of held pairs (%)", low=0), "By layer"
    )


def positions_panel(shares: Mapping[Mark, Sequence[float]], width: float = WIDE / 2) -> Panel:
    """Returns the share of pairs kept in every stretch of the context."""
    lines = [
        Line(mark, [100 * (index + 0.5) / len(share) for index in range(len(share))], [100 * each for each in share])
        for mark, share in shares.items()
    ]
    x = Axis("position in the context (%)", low=0, high=100)
    return Panel(lines, x, Axis("pairs kept (%)", low=0), "By position", width)
