"""What a page is made of: sections of paragraphs, tables and charts. Data only; `folder` turns it into files.

Text is plain: the page escapes it. A `Markup` of markupsafe is taken as it is, for what needs emphasis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from matplotlib.axes import Axes

MINUS = "\u2212"
NARROW, WIDE = 4.1, 7.4  # inches: a panel that a phone shows whole, one that takes a page's width


@dataclass(frozen=True)
class Cell:
    """A cell of a table: a text in a tone, below it a smaller line, above it perhaps a plain one.

    Tones: up, down, even (gains); holds, fails, open (verdicts); full (a reference); muted; note. Every tone that has a
    colour has a sign too, which the maker of the cell writes.
    """

    text: str
    small: str = ""
    tone: str = ""
    strong: bool = False
    above: str = ""
    columns: int = 1


@dataclass(frozen=True)
class Row:
    """Cells of a line; `strong` for the line that is looked for, `rule` for a line above it."""

    cells: Sequence[Cell | str | int | float]
    strong: bool = False
    rule: bool = False


@dataclass(frozen=True)
class Table:
    """`head` is one row or several; columns in `left` hold words. The CSV's rows are `data`, or the texts."""

    name: str
    title: str
    head: Sequence[Sequence[Cell | str]]
    rows: Sequence[Row]
    note: str = ""
    data: Sequence[Mapping[str, object]] = ()
    left: Collection[int] = (0,)


@dataclass(frozen=True)
class Mark:
    """How a series is drawn, in chart and legend: `marker` as in matplotlib, "" for none; `band` for an area.

    `hatch` is for bars, one of draw.HATCHES, so that their parts can be told without colour; None for what is no bar.
    """

    label: str
    colour: str
    marker: str = ""
    dashed: bool = False
    hollow: bool = False
    band: bool = False
    hatch: str | None = None


@dataclass(frozen=True)
class Panel:
    """One pair of axes; `draw` fills them. A page shows panels side by side, a phone below each other."""

    draw: Callable[[Axes], None]
    title: str = ""
    width: float = NARROW
    height: float = 3.0


@dataclass(frozen=True)
class Chart:
    """Panels that share a legend: an inline SVG each on the page, one PNG of all, and the figures as CSV.

    `alt` says in words what is to be seen.
    """

    name: str
    title: str
    panels: Sequence[Panel]
    alt: str
    data: Sequence[Mapping[str, object]]
    note: str = ""
    legend: Sequence[Mark] = ()


@dataclass(frozen=True)
class Points:
    """A list."""

    items: Sequence[str]


@dataclass(frozen=True)
class Details:
    """Blocks that open on a click (in print they are open)."""

    summary: str
    blocks: Sequence[Block]


Block: TypeAlias = "str | Points | Table | Chart | Details"


@dataclass(frozen=True)
class Section:
    """A heading, a paragraph, blocks; `verdict` stands beside the heading."""

    title: str
    intro: str = ""
    blocks: Sequence[Block] = ()
    verdict: Cell | None = None


def table(
    name: str,
    title: str,
    head: Sequence[Cell | str] | Sequence[Sequence[Cell | str]],
    rows: Sequence[Row | Sequence[Cell | str | int | float]],
    note: str = "",
    data: Sequence[Mapping[str, object]] = (),
    left: Collection[int] = (0,),
) -> Table:
    """A Table from plain lists."""
    heads = [head] if head and isinstance(head[0], (Cell, str)) else head
    return Table(name, title, heads, [row if isinstance(row, Row) else Row(row) for row in rows], note, data, left)


def chart(
    draw: Callable[[Axes], None],
    name: str,
    title: str,
    alt: str,
    data: Sequence[Mapping[str, object]],
    note: str = "",
    legend: Sequence[Mark] = (),
    width: float = NARROW,
    height: float = 3.0,
) -> Chart:
    """A Chart of one panel."""
    return Chart(name, title, [Panel(draw, "", width, height)], alt, data, note, legend)


def number(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """With a true minus; an en dash for what is not known."""
    if value is None or math.isnan(value):
        return "–"
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    if not text.strip("+-0."):
        text = text.lstrip("+-")  # no sign on what rounds to zero
    return text.replace("-", MINUS)


def percent(share: float | None, digits: int = 1, sign: bool = False) -> str:
    """13.7 %, of 0.137; an en dash for what is not known."""
    return "–" if share is None else f"{number(100 * share, digits, sign)} %"


def at(ratio: float) -> str:
    """r = 0.05."""
    return f"r = {ratio:g}"


def score(value: float, low: float | None = None, high: float | None = None, digits: int = 1) -> Cell:
    """91.4, and its interval below."""
    return Cell(number(value, digits), "" if low is None else f"{number(low, digits)} to {number(high, digits)}")


def gain(value: float, low: float | None = None, high: float | None = None, digits: int = 1, of: str = "") -> Cell:
    """A difference: arrow, sign, colour; bold where its interval excludes zero. `of` is the score that was gained."""
    shown = number(value, digits, sign=True)
    tone = "even" if shown[0] not in f"+{MINUS}" else "up" if value > 0 else "down"
    arrow = {"up": "▲", "down": "▼", "even": "="}[tone]
    small = "" if low is None else f"{number(low, digits, True)} to {number(high, digits, True)}"
    return Cell(f"{arrow} {shown}", small, tone, low is not None and (low > 0 or high < 0), of)


def running(done: int, of: int | None) -> Cell:
    """In place of a figure that is not there yet."""
    return Cell(f"running ({done} of {of if of else '?'} contexts)", tone="muted")


def verdict(holds: bool | None, text: str = "", small: str = "") -> Cell:
    """Whether a claim holds; None where the data does not decide or is not there."""
    tone = {True: "holds", False: "fails", None: "open"}[holds]
    sign, word = {"holds": ("✓", "holds"), "fails": ("✗", "does not hold"), "open": ("○", "open")}[tone]
    return Cell(f"{sign} {text or word}", small, tone)
