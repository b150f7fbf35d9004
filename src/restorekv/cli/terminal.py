"""What commands print, and how: texts that others wrote, progress, tables.

This module does not import PyTorch, so that a command that is refused ends immediately.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from restorekv.cli.errors import make_visible
from restorekv.files import format_json, write_json


class Terminal(Console):
    """A console that prints texts of others unchanged: brackets are not markup, `:name:` does not
    become an emoji, and control characters are shown as signs instead of acting on the terminal.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def status(self, status: RenderableType, **settings: Any) -> Status:
        """Show a line while the block works; brackets in it, as in file names, are not markup."""
        line = Text(status) if isinstance(status, str) else status
        return super().status(line, **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else make_visible(text), style, control)


STDOUT = Path("-")
LINE_SECONDS = 60  # between two lines of progress, at most
output = Terminal()
notes = Terminal(stderr=True)


@contextmanager
def show_progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar for equal parts of work; the block gets the callback (done, total,
    what).
    """
    with show_progress_share(title) as show:
        yield lambda done, total, what: show(f"{done}/{total} {what}", done / max(total, 1))


class ShareMeter:
    """A meter that decides when progress is worth another line, and estimates the time left."""

    def __init__(self) -> None:
        self.start: tuple[float, float] | None = None  # seconds and share at the first report
        self.last = 0.0  # the last share
        self.printed = 0.0, time.monotonic()  # the share and seconds of the last line

    def is_due(self, share: float) -> bool:
        """Return whether a tenth of the work or a minute has passed since the last line."""
        now = time.monotonic()
        before, moment = self.printed
        # Work that is continued begins with a share; a new phase begins at 0 again.
        if self.start is None or share < self.last:
            self.start = now, share
        self.last = share
        # Rounded, because in floating point ten tenths do not add up to 1.
        is_next = round(abs(share - before), 9) >= 0.1 or now - moment >= LINE_SECONDS
        # Each phase has a line for its end, however short it is.
        if not is_next and share < 1:
            return False
        self.printed = share, now
        return True

    def describe_rest(self, share: float) -> str:
        """Return the estimated time left, such as ", 40 s to go"; "" if there is no estimate."""
        if self.start is None or not self.start[1] < share < 1:
            return ""
        begun, first = self.start
        left = (1 - share) * (time.monotonic() - begun) / (share - first)
        return f", {format_seconds(left)} to go"


def format_seconds(seconds: float) -> str:
    """Return a time in the largest unit that fits into it at least twice: "90 s", "3 min"."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


@contextmanager
def show_progress_share(title: str, lines: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar for work of unequal parts; the block gets the callback (current part,
    share done).

    The bar is on stderr. If that is not a terminal, `lines` prints a line with the time left
    instead, for every tenth of the work and at least every minute.
    """
    progress = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("to go"),
        TimeRemainingColumn(),
        console=notes,
        disable=not notes.is_terminal,
    )
    with progress:
        task = progress.add_task(title, total=1.0)
        meter = ShareMeter()

        def update(what: str, share: float) -> None:
            progress.update(task, completed=share, description=what)
            if lines and not notes.is_terminal and meter.is_due(share):
                notes.print(f"{share:.0%} {what}{meter.describe_rest(share)}", highlight=False)

        yield update


def explain_cut(max_new_tokens: int) -> str:
    """Say what ended an answer that its limit cut."""
    noun = "token" if max_new_tokens == 1 else "tokens"
    return f"cut after {max_new_tokens} {noun}; --max-new-tokens sets the limit"


def write_figures(path: Path, content: object) -> None:
    """Write figures for programs as JSON: into a file, or on stdout if the path is "-"."""
    if path == STDOUT:
        sys.stdout.write(format_json(content))
    else:
        write_json(path, content)


def print_written(path: Path) -> None:
    """Print the path of a new file on one line, however long it is."""
    output.print(f"Wrote {path}", soft_wrap=True)


def print_figures(title: str, rows: dict[str, str]) -> None:
    """Print a table with names on the left and values on the right."""
    # In a Text, brackets and backslashes of names stay unchanged; rich's `escape` keeps only some
    # of them.
    table = Table(title=Text(title), show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    output.print(table)
