"""What every benchmark's command does: measure while it reports its progress, print the result and
write it to a file.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import logging

from restorekv.cli.terminal import notes, output
from restorekv.evaluation.tables import Table
from restorekv.files import write_json


@contextmanager
def run_measurement() -> Iterator[Callable[[str], None]]:
    """Yield a callback that shows what is being measured: in a spinner on a terminal, else in lines
    with the seconds since the start.
    """
    if notes.is_terminal:
        with notes.status("measuring") as status:
            yield lambda what: status.update(f"measuring: {what}")
        return
    start = time.monotonic()
    yield lambda what: notes.print(f"{time.monotonic() - start:6.0f} s  {what}", highlight=False)


def run_benchmark(
    measure: Callable[[Callable[[str], None]], dict],
    show: Callable[[dict], None],
    json: Path | None,
) -> None:
    """Run a benchmark: measure, show the result, and write it to the file `json` if given.

    Args:
        measure: Measures and returns the result; its argument reports what is being measured.
        show: Prints the result.
        json: The file for the figures, or None.
    """
    logging.disable_progress_bar()
    with run_measurement() as tell:
        result = measure(tell)
    show(result)
    if json:
        write_json(json, result)


def print_result(text: str) -> None:
    """Print Markdown unchanged."""
    output.print(text, markup=False, soft_wrap=True)


def print_all(items: Iterable[Table | str]) -> None:
    """Print tables and sentences, one below the other."""
    for item in items:
        output.print(item)
