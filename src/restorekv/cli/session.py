"""What several commands do: read a text, open a model, print figures."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import PreTrainedModel, logging
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.context_file import Manifest
from restorekv.compression.prepared import CompressionConfig
from restorekv.errors import RestoreKVError
from restorekv.files import write_json
from restorekv.model.load import check_dtype, load_model

output, notes = Console(), Console(stderr=True)


def read_text(name: str) -> str:
    """A UTF-8 file, or what comes in on stdin when the name is "-"."""
    payload = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    source = "The input" if name == "-" else f"The file {name}"
    try:
        text = payload.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RestoreKVError(f"{source} is not UTF-8 text (byte {error.start}); convert it first.") from None
    if "\0" in text:
        raise RestoreKVError(f"{source} is binary; give a text.")
    if not text.strip():
        raise RestoreKVError(f"{source} is empty; give a text with at least one word.")
    return text


def quiet() -> None:
    """Keeps transformers' remarks and progress bars from the terminal."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def open_model(name: str, dtype: str = "auto", device: str = "cpu") -> tuple[PreTrainedModel, Tokenizer]:
    """`load_model` without the remarks that transformers prints."""
    check_dtype(dtype)
    quiet()
    with phase(f"loading {name}"):
        return load_model(name, dtype, device)


@contextmanager
def bar(title: str, lines: bool = False) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr, on a terminal; the block gets the callback (done, total, what=title).

    With `lines`, a line now and then elsewhere.
    """
    parts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("to go"))
    with Progress(*parts, TimeRemainingColumn(), console=notes, disable=not notes.is_terminal) as progress:
        task = progress.add_task(title, total=None)

        def update(done: int, total: int, what: str = title) -> None:
            progress.update(task, completed=done, total=total, description=what)
            if lines and not notes.is_terminal and (done % max(total // 10, 1) == 0 or done == total):
                notes.print(f"{done}/{total} {what}")

        yield update


@contextmanager
def shares(title: str) -> Iterator[Callable[[str, float], None]]:
    """A progress bar for work of unlike parts; the block gets the callback (what is under way, share done)."""
    parts = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("to go"))
    with Progress(*parts, TimeRemainingColumn(), console=notes, disable=not notes.is_terminal) as progress:
        task, told = progress.add_task(title, total=1.0), [0.0]

        def update(what: str, share: float) -> None:
            progress.update(task, completed=share, description=what)
            if not notes.is_terminal and share - told[0] >= 0.1:
                told[0] = share
                notes.print(f"{share:.0%} {what}", highlight=False)

        yield update


def method_of(m: Manifest) -> str:
    """The evictor and every convention that is not the plain one."""
    plain = CompressionConfig()
    facts = [
        m.evictor,
        f"n = {m.restore_tokens} restore tokens",
        f"adapter {m.adapter['hash'] if m.adapter else 'none'}",
    ]
    facts += [f"allocation {m.allocation}"] if m.allocation != plain.allocation.spec else []
    facts += [f"restored from the {m.restore_from} cache"] if m.restore_from != plain.restore_from else []
    facts += [f"offset {m.offset}"] if m.offset else []
    facts += [f"streamed {m.streaming} tokens at a time"] if m.streaming else []
    facts += [f"held in {m.storage}"] if m.storage != "model" else []
    return ", ".join(facts)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A spinner on a terminal, nothing elsewhere."""
    if notes.is_terminal:
        with notes.status(name):
            yield
    else:
        yield


@contextmanager
def measuring() -> Iterator[Callable[[str], None]]:
    """The block gets a callback for what is being measured: a spinner on a terminal, lines with the time elsewhere."""
    if notes.is_terminal:
        with notes.status("measuring") as status:
            yield lambda what: status.update(f"measuring: {what}")
        return
    start = time.monotonic()
    yield lambda what: notes.print(f"{time.monotonic() - start:6.0f} s  {what}", highlight=False)


def benchmark(
    measure: Callable[[Callable[[str], None]], dict], show: Callable[[dict], None], json: Path | None
) -> None:
    """Measures, prints the result and, where `json` says, writes it."""
    logging.disable_progress_bar()
    with measuring() as tell:
        result = measure(tell)
    show(result)
    if json:
        write_json(json, result)


def prose(text: str) -> None:
    """Markdown, as it is."""
    output.print(text, markup=False, soft_wrap=True)


def each(items: Iterable[Table | str]) -> None:
    """Tables and sentences, one below the other."""
    for item in items:
        output.print(item)


def figures_table(title: str, rows: dict[str, str]) -> Table:
    """Names on the left, values on the right."""
    table = Table(title=title, show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table
