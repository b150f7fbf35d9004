"""Tables of texts for terminals, Markdown and pages, with their figures as a pandas DataFrame.

Whatever a reader must notice is in the text itself: ▲, ▼ and ≈ before a gain, ✓, ✗ and ○ before a
verdict. A page only adds colors to these signs. pandas is part of the extra `eval` and is imported
when a DataFrame is asked for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rich import table as rich_table
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from restorekv.errors import import_extra

if TYPE_CHECKING:
    from pandas import DataFrame

MINUS = "\u2212"
UNKNOWN = "–"
METHOD_NAMES = {
    "kvzip": "KVzip",
    "kvzip+": "KVzip+",
    "contrastkv": "ContrastKV",
    "contrastkv-simple": "ContrastKV (simplified)",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "fastkvzip": "Fast KVzip",
    "am-fast": "AM-fast",
    "kvzap": "KVzap",
    "expected-attention": "Expected Attention",
    "keydiff": "KeyDiff",
    "knorm": "Knorm",
    "streaming": "StreamingLLM",
    "tova": "TOVA",
    "random": "Random",
    "full": "Full cache",
}
RESTORED_NAMES = {"kvzip": "RestoreKV", "kvzip+": "RestoreKV+"}
# Where a terminal continues a cell on the next line: before a gain, and before an interval.
LINE_BREAK = re.compile(r" (?=[▲▼≈] |= \d|\([+−\d])")
BREAKABLE = 12  # characters of a word without digits, after which it may continue on the next line


def name_evictor(spec: str) -> str:
    """Return the paper's name of an evictor, with the evictor's settings."""
    evictor, _, settings = spec.partition(":")
    name = METHOD_NAMES.get(evictor, evictor)
    return f"{name} ({settings})" if settings else name


def name_method(spec: str, restored: bool) -> str:
    """Return what the paper calls a method: KVzip, or RestoreKV for KVzip restored."""
    name = name_evictor(spec)
    if restored:
        return RESTORED_NAMES.get(spec, f"{name} + RestoreKV")
    return name


def make_slug(*words: str) -> str:
    """Join words to a name for files and HTML ids."""
    text = "-".join(words).lower().replace("+", "-plus")
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-.")


def format_number(value: float | None, digits: int = 1, sign: bool = False) -> str:
    """Write a number with a true minus sign; an en dash for one that is not known."""
    if value is None or math.isnan(value):
        return UNKNOWN
    text = f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"
    if not text.strip("+-0."):
        text = text.lstrip("+-")  # no sign on what rounds to zero
    return text.replace("-", MINUS)


def format_percent(share: float | None, digits: int = 1) -> str:
    """Write 0.137 as "13.7 %"; an en dash for a share that is not known."""
    if share is None:
        return UNKNOWN
    return f"{format_number(100 * share, digits)} %"


def format_ratio(ratio: float) -> str:
    """Write a ratio as "r = 0.05"."""
    return f"r = {ratio:g}"


def format_range(low: float, high: float, digits: int = 1, sign: bool = False) -> str:
    """Write an interval as "88.5 to 94.0"."""
    return f"{format_number(low, digits, sign)} to {format_number(high, digits, sign)}"


def format_score(
    value: float,
    low: float | None = None,
    high: float | None = None,
    digits: int = 1,
) -> str:
    """Write a figure with its interval, if it has one: "91.4 (88.5 to 94.0)"."""
    text = format_number(value, digits)
    if low is None or high is None:
        return text
    return f"{text} ({format_range(low, high, digits)})"


def format_gain(
    value: float,
    low: float | None = None,
    high: float | None = None,
    more: str = "",
    few: bool = False,
) -> str:
    """Write a difference as "▲ +1.0 (+0.5 to +1.5; 9 % back)"; `more` ends the parentheses.

    The arrow becomes ≈ if the interval includes zero, or for a `few` texts, which have no interval.
    """
    text = format_number(value, sign=True)
    arrow = {"+": "▲", MINUS: "▼"}.get(text[0], "=")
    interval = ""
    is_sure = not few
    if low is not None and high is not None:
        interval = format_range(low, high, sign=True)
        is_sure = not low <= 0 <= high
    if not is_sure and arrow != "=":
        arrow = "≈"
    details = "; ".join(part for part in (interval, more) if part)
    if details:
        return f"{arrow} {text} ({details})"
    return f"{arrow} {text}"


@dataclass(frozen=True)
class Table:
    """Rows of texts under one line of titles.

    `name` is the name of its CSV file and its id on a page. `figures` are the rows of the CSV file,
    not rounded; without them the CSV file holds the texts. The columns in `left` hold words.
    `strong` rows stand out. The first `keys` columns name a row; a terminal that is too narrow for
    the table gets several, each with these columns, so that no number is broken or cut.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    figures: Sequence[Mapping[str, object]] = ()
    left: Collection[int] = (0,)
    strong: Collection[int] = ()
    keys: int = 1

    @classmethod
    def from_figures(
        cls,
        name: str,
        title: str,
        figures: Sequence[Mapping[str, object]],
        columns: Mapping[str, Callable[[Mapping[str, object]], str]],
        note: str = "",
        left: Collection[int] = (0,),
        keys: int = 1,
    ) -> Self:
        """Return a table with a line for each row of `figures`; empty columns are left out.

        `columns` are functions that write a row's cell, by the title of the column. The other
        arguments are those of a `Table`.
        """
        # Column by column, so that a column without any text can be left out.
        texts = {title: [show(row) for row in figures] for title, show in columns.items()}
        texts = {title: cells for title, cells in texts.items() if any(cells)}
        rows = list(zip(*texts.values(), strict=True))
        remaining_keys = sum(title in texts for title in list(columns)[:keys])
        return cls(name, title, list(texts), rows, note, figures, left, keys=remaining_keys)

    def to_frame(self) -> DataFrame:
        """Return the figures, or the texts if there are no figures, as a DataFrame."""
        pandas = import_extra("pandas", "eval")
        if self.figures:
            return pandas.DataFrame(list(self.figures))
        return pandas.DataFrame(self.rows, columns=self.columns)

    def to_markdown(self) -> str:
        """Return the rows as Markdown, without title and note."""
        rules = ["---" if index in self.left else "---:" for index in range(len(self.columns))]
        lines = [list(self.columns), rules]
        for index, row in enumerate(self.rows):
            first = f"**{row[0]}**" if index in self.strong else row[0]
            lines.append([cell.replace("|", "\\|") for cell in (first, *row[1:])])
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[rich_table.Table]:
        width = options.max_width
        # The first cell of a row names it and keeps one line.
        texts = [[row[0], *(LINE_BREAK.sub("\n", cell) for cell in row[1:])] for row in self.rows]
        sizes = [
            measure_cells([title, *(row[column] for row in texts)])
            for column, title in enumerate(self.columns)
        ]
        groups = self._group_columns([min_width for min_width, _ in sizes], width)
        for number, group in enumerate(groups):
            drawn = rich_table.Table(
                title=Text(self.title) if self.title and number == 0 else None,
                caption=Text(self.note) if self.note and number == len(groups) - 1 else None,
                title_justify="left",
                min_width=min(72, width),
            )
            widths = fit_widths([sizes[each] for each in group], _count_chars(width, group))
            for column, own_width in zip(group, widths, strict=True):
                justify = "left" if column in self.left else "right"
                title = Text(self.columns[column])
                drawn.add_column(title, justify=justify, overflow="fold", width=own_width)
            for index, row in enumerate(texts):
                cells = [Text(row[column]) for column in group]
                drawn.add_row(*cells, style="bold" if index in self.strong else None)
            yield drawn

    def _group_columns(self, min_widths: Sequence[int], width: int) -> list[list[int]]:
        """Return the columns of each table that a terminal shows: as many as have room for their
        longest words, which take `min_widths` characters.
        """
        keys = list(range(self.keys))
        groups: list[list[int]] = [keys]
        for column in range(self.keys, len(self.columns)):
            group = [*groups[-1], column]
            fits = sum(min_widths[each] for each in group) <= _count_chars(width, group)
            if fits or groups[-1] == keys:
                groups[-1] = group
            else:
                groups.append([*keys, column])
        return groups


def measure_cells(cells: Sequence[str]) -> tuple[int, int]:
    """Return how many characters a column needs, so that no word with digits is broken, and how
    many its longest line takes.
    """
    longest_word = 1
    for word in " ".join(cells).split():
        length = cell_len(word)
        if not any(char.isdigit() for char in word):
            length = min(length, BREAKABLE)
        longest_word = max(longest_word, length)
    lines = "\n".join(cells).split("\n")
    return longest_word, max(longest_word, *map(cell_len, lines))


def _count_chars(width: int, group: Sequence[int]) -> int:
    """Return how many characters of a table's line are left for text: every column takes three for
    its rule and padding, and the last rule takes one.
    """
    return width - 3 * len(group) - 1


def fit_widths(sizes: Sequence[tuple[int, int]], chars: int) -> list[int]:
    """Return the widths of columns that share `chars` characters.

    `sizes` are the characters that each column needs, and those that it could fill. Spare
    characters go first to the columns that lack the fewest.
    """
    widths = [min_width for min_width, _ in sizes]
    spare = max(chars - sum(widths), 0)
    order = sorted(range(len(sizes)), key=lambda column: sizes[column][1] - sizes[column][0])
    for done, column in enumerate(order):
        min_width, full_width = sizes[column]
        more = min(full_width - min_width, spare // (len(order) - done))
        widths[column] += more
        spare -= more
    return widths
