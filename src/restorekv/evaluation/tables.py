"""One table for every page, terminal and file: `Table` is data, and this module renders it.

A terminal prints a table as it is (`Table.__rich__`), `records` makes the rows of its CSV file and report/page.html its
HTML. The module also holds what the paper calls the methods, and how numbers are written.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Self

from rich import table as rich_table
from rich.text import Text

MINUS, UNKNOWN = "\u2212", "–"
NAMES = {
    "kvzip": "KVzip", "kvzip+": "KVzip+", "contrastkv": "ContrastKV", "contrastkv-simple": "ContrastKV (simplified)",
    "snapkv": "SnapKV", "h2o": "H2O", "fastkvzip": "Fast KVzip", "am-fast": "AM-fast", "kvzap": "KVzap",
    "expected-attention": "Expected Attention", "keydiff": "KeyDiff", "knorm": "Knorm", "streaming": "StreamingLLM",
    "tova": "TOVA", "random": "Random", "full": "Full cache",
}  # fmt: skip
RESTORED = {"kvzip": "RestoreKV", "kvzip+": "RestoreKV+"}


def name(evictor: str, restored: bool) -> str:
    """Returns what the paper calls a method."""
    base = NAMES.get(evictor, evictor)
    return RESTORED.get(evictor, f"{base} + RestoreKV") if restored else base


def evictor_name(spec: str) -> str:
    """Returns the paper's name, with the evictor's settings."""
    name, _, settings = spec.partition(":")
    return NAMES.get(name, name) + (f" ({settings})" if settings else "")


def slug(*words: str) -> str:
    """Joins words to a name for files and ids."""
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(words).lower().replace("+", "-plus")).strip("-.")


@dataclass(frozen=True)
class TableCell:
    """A text, with a smaller line below it (`small`) and perhaps a plain one above it.

    Tones: up, down, even (gains); holds, fails, open (verdicts); full (the full cache); muted; note. A tone never
    speaks alone: whoever makes the cell also writes a sign, for readers who do not see the color. In a head, a cell may
    span several `columns`.
    """

    text: str
    small: str = ""
    tone: str = ""
    strong: bool = False
    above: str = ""
    columns: int = 1

    @property
    def plain(self) -> str:
        """The cell on one line, without its tone."""
        small = self.small.replace("\n", "; ")
        return " ".join(filter(None, (self.above, self.text, small and f"({small})")))


Value = TableCell | str | int | float
ABSENT = TableCell(UNKNOWN, tone="muted")


def as_cell(value: Value) -> TableCell:
    """Returns the cell itself, or one that shows the text or number."""
    return value if isinstance(value, TableCell) else TableCell(value if isinstance(value, str) else f"{value:,}")


@dataclass(frozen=True)
class TableRow:
    """A line of cells; `strong` emphasizes it, `rule` draws a line above it."""

    cells: Sequence[Value]
    strong: bool = False
    rule: bool = False


@dataclass(frozen=True)
class Table:
    """A titled table; `name` becomes the name of its CSV file and its id on a page.

    `head` has one row or several, and plain rows become TableRows; the columns in `left` hold words. `data` are the
    rows of the CSV file, with figures unrounded; without it, the CSV file holds the texts.
    """

    name: str
    title: str
    head: Sequence[TableCell | str] | Sequence[Sequence[TableCell | str]]
    rows: Sequence[TableRow | Sequence[Value]]
    note: str = ""
    data: Sequence[Mapping[str, object]] = ()
    left: Collection[int] = (0,)

    def __post_init__(self) -> None:
        if self.head and isinstance(self.head[0], (TableCell, str)):
            object.__setattr__(self, "head", [self.head])
        rows = [row if isinstance(row, TableRow) else TableRow(row) for row in self.rows]
        object.__setattr__(self, "rows", rows)

    @classmethod
    def of(
        cls, name: str, title: str, records: Sequence[Mapping],
        columns: Mapping[str, str | Callable[[Mapping], Value]], note: str = "", left: Collection[int] = (0,),
    ) -> Self:  # fmt: skip
        """Returns a table with a row for each record, which goes to the CSV file; a column is a key or a function."""
        shows = [itemgetter(what) if isinstance(what, str) else what for what in columns.values()]
        rows = [[show(record) for show in shows] for record in records]
        return cls(name, title, list(columns), rows, note, records, left)

    @property
    def titles(self) -> list[str]:
        """What the head says of each column, from the top down, as one text."""
        spread = [[cell.text for cell in map(as_cell, row) for _ in range(cell.columns)] for row in self.head]
        return [" ".join(dict.fromkeys(filter(None, texts))) for texts in zip(*spread, strict=True)]

    def __rich__(self) -> rich_table.Table:
        shown = rich_table.Table(title=Text(self.title), caption=Text(self.note), title_justify="left", min_width=72)
        for index, title in enumerate(self.titles):
            justify = "left" if index in self.left else "right"
            shown.add_column(Text(title), justify=justify, no_wrap=index == 0, overflow="fold")
        for row, following in zip(self.rows, [*self.rows[1:], None], strict=True):
            cells = [
                Text("\n".join(filter(None, (cell.above, cell.text, cell.small)))) for cell in map(as_cell, row.cells)
            ]
            shown.add_row(*cells, style="bold" if row.strong else None, end_section=bool(following and following.rule))
        return shown


def records(table: Table) -> Sequence[Mapping[str, object]]:
    return table.data or [
        dict(zip(table.titles, (as_cell(value).plain for value in row.cells), strict=True)) for row in table.rows
    ]


def number(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """Returns the number with a true minus sign; an en dash for one that is not known."""
    if value is None or math.isnan(value):
        return UNKNOWN
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    if not text.strip("+-0."):
        text = text.lstrip("+-")  # no sign on what rounds to zero
    return text.replace("-", MINUS)


def percent(share: float | None, digits: int = 1) -> str:
    """Returns 0.137 as "13.7 %"; an en dash for a share that is not known."""
    return UNKNOWN if share is None else f"{number(100 * share, digits)} %"


def at(ratio: float) -> str:
    """Returns "r = 0.05"."""
    return f"r = {ratio:g}"


def between(low: float, high: float, digits: int = 1, sign: bool = False) -> str:
    """Returns an interval as "88.5 to 94.0"."""
    return f"{number(low, digits, sign)} to {number(high, digits, sign)}"


def score(value: float, low: float | None = None, high: float | None = None, digits: int = 1) -> TableCell:
    """Returns a figure with its interval below."""
    return TableCell(number(value, digits), "" if low is None else between(low, high, digits))


def gain(
    value: float, low: float | None = None, high: float | None = None, digits: int = 1, of: str = "", more: str = ""
) -> TableCell:
    """Returns a difference with arrow, sign and color, bold where its interval excludes zero.

    `of` stands above it, `more` on a line below.
    """
    shown = number(value, digits, sign=True)
    tone = "even" if shown[0] not in f"+{MINUS}" else "up" if value > 0 else "down"
    arrow = {"up": "▲", "down": "▼", "even": "="}[tone]
    small = "\n".join(filter(None, (low is not None and between(low, high, digits, True), more)))
    return TableCell(f"{arrow} {shown}", small, tone, low is not None and (low > 0 or high < 0), of)
