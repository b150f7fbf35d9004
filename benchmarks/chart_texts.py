"""Texts that benchmarks write into their panels: figures below points, labels where lines end."""

from collections.abc import Sequence

from matplotlib.axes import Axes

# Height of a line of a label at the right edge, as a share of the axes' height.
GAP = 0.085


def write_below(
    axes: Axes, points: Sequence[tuple[float, float]], texts: Sequence[str], color: str
) -> None:
    """Write a text below each point."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    for text, point in zip(texts, points, strict=True):
        look = {"ha": "center", "fontsize": 8, "color": color, "bbox": box}
        axes.annotate(text, point, (0, -13), textcoords="offset points", **look)


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write labels (y, text, color) at the right edge, each at its y or as close to it as there is
    room.
    """
    right = axes.get_xlim()[1]
    heights = []
    for y, _, _ in ends:
        point = axes.transData.transform((right, y))
        heights.append(axes.transAxes.inverted().transform(point)[1])
    places = spread_labels(heights, [text.count("\n") + 1 for _, text, _ in ends])
    for height, (_, text, color) in zip(places, ends, strict=True):
        axes.text(
            1.02, height, text, transform=axes.transAxes, va="center", fontsize=8, color=color
        )


def spread_labels(heights: Sequence[float], lines: Sequence[int]) -> list[float]:
    """Return the heights, moved only as far as needed so that no labels overlap.

    Args:
        heights: Where the labels belong, as shares of the axes' height.
        lines: The number of lines of each label.
    """
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    found = list(heights)
    floor = 0.0
    ceiling = 0.96
    for index in order:
        found[index] = max(heights[index], floor)
        floor = found[index] + GAP * lines[index]
    for index in reversed(order):
        found[index] = min(found[index], ceiling)
        ceiling = found[index] - GAP * lines[index]
    return found
