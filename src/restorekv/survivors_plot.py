"""One figure of what survives: heads that share the budget, layers, and the tokens along the context."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from restorekv.atomic import replacing
from restorekv.errors import RestoreKVError
from restorekv.survivors import Survivors

FORMATS = (".png", ".pdf", ".svg")
COLOURS = "cividis"  # reads alike with and without colour vision
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#BBBBBB"  # Okabe and Ito
BINS = 256


def save_plot(survivors: Survivors, path: Path, title: str) -> None:
    """PNG, PDF or SVG by the name's ending."""
    check_format(path)
    figure = draw(survivors, title)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=160)


def check_format(path: Path) -> None:
    """Refuses an ending that no writer is known for."""
    if path.suffix.lower() not in FORMATS:
        raise RestoreKVError(f"The plot {path} must end in {', '.join(FORMATS)}; give such a name.")


def draw(survivors: Survivors, title: str) -> Figure:
    """Heat map of layers and heads, beside it the layers, below both the positions."""
    m = survivors.manifest
    layers = survivors.keep.shape[0]
    figure = Figure(figsize=(9, 5.2 + 0.16 * layers), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, width_ratios=(2.4, 1), height_ratios=(1.6 + 0.08 * layers, 1.3))
    _heads(figure.add_subplot(grid[0, 0]), survivors)
    _layers(figure.add_subplot(grid[0, 1]), survivors)
    _positions(figure.add_subplot(grid[1, :]), survivors)
    restored = f" + {m.restore_tokens} restore tokens" if m.restore_tokens else ""
    figure.suptitle(
        f"{title}: {m.evictor}{restored}, r = {float(Fraction(m.ratio)):g}, T = {m.tokens:,} tokens, "
        f"{m.pairs_held:,} KV pairs held",
        fontsize=11, fontweight="bold",
    )  # fmt: skip
    return figure


def _heads(axes: Axes, survivors: Survivors) -> None:
    share = 100 * survivors.per_head.double().numpy() / max(survivors.manifest.tokens, 1)
    layers, heads = share.shape
    image = axes.imshow(share, cmap=COLOURS, aspect="auto", vmin=0, vmax=max(share.max(), 1e-9))
    axes.figure.colorbar(image, ax=axes, label="context tokens kept (%)", pad=0.02)
    if layers * heads <= 96:
        for (layer, head), value in np.ndenumerate(share):
            ink = "black" if value > share.max() / 2 else "white"
            axes.text(head, layer, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=8)
    axes.set(title="Tokens kept by each head", xlabel="KV head", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _layers(axes: Axes, survivors: Survivors) -> None:
    share = survivors.per_layer.numpy()
    axes.barh(np.arange(len(share)), share, color=BLUE)
    axes.axvline(1 / len(share), color=ORANGE, linestyle="--", linewidth=1.2, label="even split")
    axes.set(title="Share of the held pairs", xlabel="share of all context pairs", ylabel="layer")
    axes.set_ylim(len(share) - 0.5, -0.5)
    axes.set_xlim(0, max(share.max(), 1 / len(share)) * 1.35)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=8, loc="lower right")


def _positions(axes: Axes, survivors: Survivors) -> None:
    share, prefix = survivors.per_position.numpy(), survivors.context.prefix
    columns = np.arange(len(share))
    if len(share) > BINS:
        axes.plot(columns, share, ",", color=GREY, zorder=1)
        edges = np.linspace(0, len(share), BINS + 1).astype(int)
        means = np.add.reduceat(share, edges[:-1]) / np.diff(edges)
        axes.stairs(means, edges - 0.5, fill=True, color=BLUE, label=f"mean of {len(share) / BINS:.0f} tokens")
    else:
        axes.bar(columns, share, width=1.0, color=BLUE, label="token")
    if prefix:
        axes.axvspan(-0.5, prefix - 0.5, color=ORANGE, alpha=0.25, linewidth=0, label="chat prefix")
    average = float(share[prefix:].mean())
    axes.axhline(average, color=ORANGE, linestyle="--", linewidth=1.2, label=f"context mean {average:.1%}")
    axes.set(title="Heads that keep each token", xlabel="position (tokens)", ylabel="share of all heads")
    axes.set_xlim(-0.5, len(share) - 0.5)
    axes.set_ylim(0, min(1.02, 1.15 * max(share.max(), 0.01)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)
