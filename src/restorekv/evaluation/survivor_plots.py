"""The charts of what a cache file kept: by head, by layer and by position."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from matplotlib.axes import Axes
from pandas import DataFrame

from restorekv.evaluation.charts import (
    BLUE,
    MUTED,
    NARROW,
    WIDE,
    Chart,
    Mark,
    make_figure,
    plot_level,
    plot_line,
    plot_map,
    set_ticks,
    with_style,
)
from restorekv.evaluation.survivors import Survivors
from restorekv.evaluation.tables import format_ratio

POSITIONS = 256  # the most points of a line along the context


@with_style
def plot_survivors(survivors: Survivors, title: str) -> Chart:
    """Return a chart of what each head, each layer and each stretch of the context keeps."""
    manifest = survivors.manifest
    share = survivors.per_position[survivors.context.prefix_length :]
    stretches = [float(part.mean()) for part in share.tensor_split(min(POSITIONS, len(share)))]
    kept = np.array(survivors.per_head.tolist()) / max(manifest.tokens, 1)
    figure, (heads, layers, positions) = make_figure(
        [
            ("Context tokens kept by each head", NARROW, get_heads_height(len(kept))),
            ("By layer", NARROW, 3.0),
            ("By position", WIDE, 3.0),
        ]
    )
    plot_heads(heads, kept)
    plot_layers(layers, {Mark("", BLUE, "o"): survivors.per_layer.tolist()})
    plot_positions(positions, {Mark("", BLUE): stretches})
    tokens = ""
    if manifest.restore_tokens:
        tokens = f" + {manifest.restore_tokens} restore tokens"
    made = f"{manifest.evictor}{tokens}, {format_ratio(float(Fraction(manifest.ratio)))}"
    held = f"T = {manifest.tokens:,} tokens, {manifest.pairs_held:,} KV pairs held"
    return Chart("survivors", f"{title}: {made}, {held}", figure)


def get_heads_height(layers: int) -> float:
    """Return the height of a map of that many layers, in inches."""
    return 1.3 + 0.2 * max(layers, 4)


def plot_heads(axes: Axes, kept: np.ndarray) -> None:
    """Draw a map of the share of the context's tokens that each head keeps: (layers, heads)."""
    plot_map(axes, DataFrame(100 * kept), max(100 * kept.max(), 1e-9))
    axes.set(xlabel="KV head (percent of tokens)", ylabel="layer")


def plot_layers(axes: Axes, shares: Mapping[Mark, Sequence[float]]) -> None:
    """Draw each layer's share of all held context pairs, next to an even split."""
    for mark, share in shares.items():
        plot_line(axes, mark, range(len(share)), [100 * each for each in share])
    layers = len(next(iter(shares.values())))
    plot_level(axes, Mark("even split", MUTED, dashed=True), 100 / layers)
    axes.set(xlabel="layer", ylabel="share of held pairs (%)", ylim=(0, None))
    set_ticks(axes, range(0, layers, -(-layers // 9)))


def plot_positions(axes: Axes, shares: Mapping[Mark, Sequence[float]]) -> None:
    """Draw the share of pairs kept in every stretch of the context."""
    for mark, share in shares.items():
        middles = 100 * (np.arange(len(share)) + 0.5) / len(share)
        plot_line(axes, mark, middles, [100 * each for each in share])
    axes.set(xlabel="position in the context (%)", ylabel="pairs kept (%)")
    axes.set(xlim=(0, 100), ylim=(0, None))
