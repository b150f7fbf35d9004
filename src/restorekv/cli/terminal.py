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


@contextmanager
def show_progress_bar(title: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar for equal parts of work; the block gets the callback (done, total,
    what=title).
    """
    with show_progress_share(title) as show:
        yield lambda done, total, what=title: show(f"{done}/{total} {what}", done / max(total, 1))


@contextmanager
def show_progress_share(title: str, lines: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar for work of unequal parts; the block gets the callback (current part,
    share done).

    It is on stderr. With `lines`, print a line for every tenth where that is not a terminal.
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
        printed = 0.0

        def update(what: str, share: float) -> None:
            nonlocal printed
            progress.update(task, completed=share, description=what)
            # A new phase begins at 0 again. Rounded, since ten tenths of floating point are not 1.
            if lines and not notes.is_terminal and round(abs(share - printed), 9) >= 0.1:
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
