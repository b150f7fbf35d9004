"""What commands print and how: texts of others, progress, tables.

It imports no PyTorch, so that a command that is refused ends at once.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
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
    """Print texts of others: no `:name:` becomes an emoji, and no character commands the
    terminal.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(emoji=False, **settings)

    def status(self, status: RenderableType, **settings: Any) -> Status:
        """Show a line while the block works, in which the names of files and models are no
        markup.
        """
        line = Text(status) if isinstance(status, str) else status
        return super().status(line, **settings)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else make_visible(text), style, control)


STDOUT = Path("-")
output = Terminal()
notes = Terminal(stderr=True)


def _make_progress(done: ProgressColumn) -> Progress:
    """Return a progress display on stderr, shown on a terminal only; `done` says how far it is."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        done,
        TextColumn("to go"),
        TimeRemainingColumn(),
        console=notes,
        disable=not notes.is_terminal,
    )


@contextmanager
def show_progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal's stderr, elsewhere a line for every tenth; the block gets
    the callback (done, total, what=title).
    """
    with _make_progress(MofNCompleteColumn()) as progress:
        task = progress.add_task(title, total=None)

        def update(done: int, total: int, what: str = title) -> None:
            progress.update(task, completed=done, total=total, description=what)
            is_tenth = done % max(total // 10, 1) == 0 or done == total
            if is_tenth and not notes.is_terminal:
                notes.print(f"{done}/{total} {what}")

        yield update


@contextmanager
def show_progress_share(title: str, lines: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar for work of unequal parts; the block gets the callback (current part,
    share done).

    With `lines`, print a line for every tenth where there is no terminal.
    """
    with _make_progress(TaskProgressColumn()) as progress:
        task = progress.add_task(title, total=1.0)
        printed = 0.0

        def update(what: str, share: float) -> None:
            nonlocal printed
            progress.update(task, completed=share, description=what)
            if lines and not notes.is_terminal and share - printed >= 0.1:
                printed = share
                notes.print(f"{share:.0%} {what}", highlight=False)

        yield update


def write_figures(path: Path, content: object) -> None:
    """Write figures for programs as JSON: into a file, or on stdout where the path is "-"."""
    if path == STDOUT:
        sys.stdout.write(format_json(content))
    else:
        write_json(path, content)


def print_written(path: Path) -> None:
    """Say what was written, on one line however long the name."""
    output.print(f"Wrote {path}", soft_wrap=True, markup=False)


def print_figures(title: str, rows: dict[str, str]) -> None:
    """Print a table with names on the left and values on the right."""
    # As Text, in which brackets and backslashes of names stay what they are; `escape` of rich keeps
    # only some of them.
    table = Table(title=Text(title), show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    output.print(table)
