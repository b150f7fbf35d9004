"""Helpers for several commands: read a text, open a model, show progress, print figures."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, logging
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cli.errors import make_visible
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError, make_printable
from restorekv.files import read_bytes
from restorekv.model.load import check_dtype, load_model
from restorekv.model.names import find_known_name
from restorekv.model.tokenize import decode_utf8
from restorekv.readers.extract import KINDS, extract_text
from restorekv.size_limits import TEXT_BYTES
from restorekv.storage.cache_file import Manifest, read_cache


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


output = Terminal()
notes = Terminal(stderr=True)


def read_text(name: str) -> str:
    """Return the text of a file by its ending: UTF-8, HTML, PDF or DOCX; of stdin when the name is
    "-".
    """
    if name == "-":
        if sys.stdin is None:
            raise RestoreKVError("The standard input is closed; give a file or pipe a text in.")
        payload = sys.stdin.buffer.read()
    else:
        payload = read_bytes(Path(name), f"The file {name}", TEXT_BYTES)
    if Path(name).suffix.lower() in KINDS:
        return extract_text(name, payload)
    source = "The input" if name == "-" else f"The file {name}"
    text = decode_utf8(payload, source)
    if not text.strip():
        raise RestoreKVError(f"{source} is empty; give a text with at least one word.")
    return text


def check_outputs_apart(
    outputs: Iterable[Path | None], inputs: Iterable[Path | str | None] = ()
) -> None:
    """Refuse to write a file that the command reads, or one file twice; None names none, and "-"
    stdin.
    """
    others = [each for each in inputs if each not in (None, "-")]
    for path in filter(None, outputs):
        if any(_is_same_file(path, other) for other in others):
            raise RestoreKVError(
                f"{path} is also another file of this command; choose another name for the output."
            )
        others.append(path)


def _is_same_file(path: Path | str, other: Path | str) -> bool:
    """Return whether two names, of files that may not exist yet, stand for one file."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def silence_transformers() -> None:
    """Keep transformers' remarks and progress bars from the terminal."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def open_model(
    name: str,
    dtype: str | torch.dtype = "auto",
    device: str = "cpu",
    rope: Mapping[str, object] | float | None = None,
) -> tuple[PreTrainedModel, Tokenizer]:
    """Call `load_model` without the remarks that transformers prints."""
    check_dtype(dtype)
    silence_transformers()
    with notes.status(f"loading {name}"):
        return load_model(name, dtype, device, rope)


def open_documents(
    files: Sequence[Path], model: str | None, dtype: str | None, device: str
) -> list[CompressedContext]:
    """Load cache files of one model; refuse files that are wrong before the model is opened.

    Args:
        files: the cache files.
        model: the model; unless given, the one that the first file names, if that is one of ours.
        dtype: of the model; unless given, and for "auto", as in the first file.
        device: for the model.
    """
    stored = [read_cache(each) for each in files]
    first = stored[0].manifest
    chosen = getattr(torch, first.dtype) if dtype in (None, "auto") else dtype
    name = model or _find_model_of_file(files[0], first.model)
    loaded, tokenizer = open_model(name, chosen, device, _extract_yarn(first.rope))
    return [CompressedContext.load(each, loaded, tokenizer) for each in stored]


def _find_model_of_file(file: Path, name: str) -> str:
    """Return the model that a file was made with, if its name is ours; refuse any other because a
    file says so.
    """
    known = find_known_name(name)
    if known is None:
        raise RestoreKVError(
            f"{file} says that its model is '{make_printable(name)}', and a file's word alone "
            "opens "
            "no model; if you know it, give its folder, GGUF file or hub id with --model."
        )
    return known


def _extract_yarn(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the YaRN that a cache was made with, for `load_model`, or None."""
    if rope.get("rope_type") != "yarn":
        return None
    names = ("rope_type", "factor", "original_max_position_embeddings")
    return {name: rope[name] for name in names if name in rope}


@contextmanager
def show_progress_bar(title: str, lines: bool = False) -> Iterator[Callable[..., None]]:
    """Show a progress bar on a terminal's stderr; the block gets the callback (done, total,
    what=title).

    With `lines`, print a line for every tenth where there is no terminal.
    """
    parts = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("to go"),
    )
    with Progress(
        *parts, TimeRemainingColumn(), console=notes, disable=not notes.is_terminal
    ) as progress:
        task = progress.add_task(title, total=None)

        def update(done: int, total: int, what: str = title) -> None:
            progress.update(task, completed=done, total=total, description=what)
            is_tenth = done % max(total // 10, 1) == 0 or done == total
            if lines and is_tenth and not notes.is_terminal:
                notes.print(f"{done}/{total} {what}")

        yield update


@contextmanager
def show_progress_share(title: str) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar for work of unequal parts; the block gets the callback (current part,
    share done).
    """
    parts = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("to go"),
    )
    with Progress(
        *parts, TimeRemainingColumn(), console=notes, disable=not notes.is_terminal
    ) as progress:
        task = progress.add_task(title, total=1.0)
        printed = 0.0

        def update(what: str, share: float) -> None:
            nonlocal printed
            progress.update(task, completed=share, description=what)
            if not notes.is_terminal and share - printed >= 0.1:
                printed = share
                notes.print(f"{share:.0%} {what}", highlight=False)

        yield update


def describe_method(m: Manifest) -> str:
    """Name the evictor, the adapter and every setting that is not the default."""
    settings = [
        m.evictor,
        f"n = {m.restore_tokens} restore tokens",
        f"adapter {m.adapter['hash'] if m.adapter else 'none'}",
    ]
    if m.allocation != "global":
        settings.append(f"allocation {m.allocation}")
    if m.restore_from != "full":
        settings.append(f"restored from the {m.restore_from} cache")
    if m.offset:
        settings.append(f"offset {m.offset}")
    if m.streaming:
        settings.append(f"streamed {m.streaming} tokens at a time")
    if m.parts:
        settings.append(f"{len(m.parts)} texts")
    if m.storage != "model":
        settings.append(f"held in {m.storage}")
    return ", ".join(settings)


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
