"""One figure of what survives: heads that share the budget, layers, and the tokens along the context."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from restorekv.errors import RestoreKVError
from restorekv.evaluation.survivors import Survivors
from restorekv.files import replacing

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
    axes.figure.colorbar(image, ax=axes, label="tokens kept (%)", pad=0.02)
    if layers * heads <= 96:
        for (layer, head), value in np.ndenumerate(share):
            ink = "black" if value > share.max() / 2 else "white"
            axes.text(head, layer, f"{value:.3g}", ha="center", va="center", color=ink, fontsize=8)
    axes.set(title="Context tokens kept by each head", xlabel="KV head", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _layers(axes: Axes, survivors: Survivors) -> None:
    share = survivors.per_layer.numpy()
    axes.barh(np.arange(len(share)), share, color=BLUE)
    axes.axvline(1 / len(share), color=ORANGE, linestyle="--", linewidth=1.4)
    axes.set(title="Pairs by layer", xlabel="share of all (dashed: even split)", ylabel="layer")
    axes.set_ylim(len(share) - 0.5, -0.5)
    axes.set_xlim(0, max(share.max(), 1 / len(share)) * 1.1)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _positions(axes: Axes, survivors: Survivors) -> None:
    prefix = survivors.context.prefix
    share = survivors.per_position[prefix:].numpy()
    edges = np.linspace(0, len(share), min(BINS, len(share)) + 1).astype(int)
    means = np.add.reduceat(share, edges[:-1]) / np.diff(edges)
    width = len(share) / (len(edges) - 1)
    bars = "one token" if width == 1 else f"mean of {width:.3g} tokens"
    axes.stairs(means, prefix + edges - 0.5, fill=True, color=BLUE, label=bars)
    if prefix:
        axes.axvspan(-0.5, prefix - 0.5, color=GREY, linewidth=0, label="chat prefix")
    axes.axhline(share.mean(), color=ORANGE, linestyle="--", linewidth=1.4, label=f"mean {share.mean():.1%}")
    axes.set(title="Heads that keep each token", xlabel="position (tokens)", ylabel="share of all heads")
    axes.set_xlim(-0.5, prefix + len(share) - 0.5)
    axes.set_ylim(0, 1.25 * max(means.max(), 0.01))  # room for the legend
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.legend(frameon=False, fontsize=8, loc="upper right", ncols=3)
