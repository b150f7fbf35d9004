"""Texts that benchmarks write into their panels: figures below points, labels where lines end."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from restorekv.evaluation.charts import Line

GAP = 0.085  # between labels at the right edge, of the height of the axes and for each of their lines
Finish = Callable[[Axes], None]  # as a Panel takes it


def figures_below(line: Line, figures: Sequence[str]) -> Finish:
    """Writes a figure below each point of the line."""

    def finish(axes: Axes) -> None:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
        for figure, *point in zip(figures, line.x, line.y, strict=True):
            axes.annotate(figure, point, (0, -13), textcoords="offset points", ha="center", fontsize=8,
                          color=line.mark.color, bbox=box)  # fmt: skip

    return finish


def labels_at_ends(ends: Sequence[tuple[float, str, str]]) -> Finish:
    """Writes labels at the right edge, each (y, text, color) at its height or as near as there is room."""

    def finish(axes: Axes) -> None:
        right = axes.get_xlim()[1]
        heights = [axes.transAxes.inverted().transform(axes.transData.transform((right, y)))[1] for y, _, _ in ends]
        places = apart(heights, [text.count("\n") + 1 for _, text, _ in ends])
        for height, (_, text, color) in zip(places, ends, strict=True):
            axes.text(1.02, height, text, transform=axes.transAxes, va="center", fontsize=8, color=color)

    return finish


def apart(heights: Sequence[float], lines: Sequence[int]) -> list[float]:
    """Returns the heights, moved as little as keeps labels of so many lines from lying on each other."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    found, floor, ceiling = list(heights), 0.0, 0.96
    for index in order:
        found[index] = max(heights[index], floor)
        floor = found[index] + GAP * lines[index]
    for index in reversed(order):
        found[index] = min(found[index], ceiling)
        ceiling = found[index] - GAP * lines[index]
    return found
