"""Checks of a command's input and output files that run before PyTorch is imported.

They find the common mistakes early. Loading the files finds the rest, with the same messages.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

from restorekv.cli.choices import OUTPUT_KINDS
from restorekv.errors import CacheFileError, RestoreKVError, join_words, reraise_as
from restorekv.files import (
    FETCH_AGAIN,
    check_replaceable,
    open_with_size,
    refuse_other_kind,
)
from restorekv.readers.extract import decode_plain_text, load_document
from restorekv.size_limits import HEADER_BYTES

# Endings of pictures, as in evaluation/survivors.py.
PLOTS = (".png", ".pdf", ".svg")


def check_readable(path: Path) -> None:
    """Refuse a file that is missing or cannot be read."""
    with open_with_size(path, str(path)):
        pass


def read_text(name: str, wanted: str = "a text with at least one word") -> str:
    """Return the text of a UTF-8, HTML, PDF, DOCX or EPUB file, read by its ending, or of stdin if
    the name is "-". Refuse a cache file, and a text without a word.

    `wanted` is what a user is asked for if there is no word.
    """
    if name == "-":
        # A program that was started without any streams has none.
        if sys.stdin is None:
            raise RestoreKVError("The standard input is closed; give a file or pipe a text in.")
        source = "The input"
        text = decode_plain_text(sys.stdin.buffer.read(), source)
    elif name.lower().endswith(".rkv"):
        raise RestoreKVError(
            f"{name} is a cache file, which is compressed already; query it with restorekv ask."
        )
    else:
        source = f"The file {name}"
        text = load_document(Path(name))
    if not text.strip():
        raise RestoreKVError(f"{source} is empty; give {wanted}.")
    return text


def check_cache_files(files: Iterable[Path]) -> None:
    """Refuse files that are missing or do not begin as safetensors files do."""
    for path in files:
        if str(path) == "-" and not path.exists():
            raise CacheFileError(
                "A cache is read from a file, not from stdin; write it with restorekv compress "
                "TEXT -o NAME.rkv and name that file."
            )
        example = next(path.glob("*.rkv"), None) if path.is_dir() else None
        if example is not None:
            raise CacheFileError(
                f"{path} is a folder; name cache files in it, such as {example}; restorekv ask "
                f"takes several together: {path}/*.rkv."
            )
        with (
            reraise_as(CacheFileError),
            open_with_size(path, str(path)) as (file, size),
        ):
            start = file.read(9) or b""
            fix = "name a cache file, or make one of a text with restorekv compress"
            refuse_other_kind(start, str(path), fix)
            length = int.from_bytes(start[:8], "little")
            if not 2 <= length <= min(size - 8, HEADER_BYTES) or start[8:] != b"{":
                raise CacheFileError(
                    f"{path} is cut short or not a safetensors file, and not a restorekv cache; "
                    f"{FETCH_AGAIN} with restorekv compress."
                )


def check_outputs_apart(
    outputs: Iterable[Path | None], inputs: Iterable[Path | str | None] = ()
) -> None:
    """Refuse to write a file that the command reads, or to write one file twice.

    None (an option that is not given) and "-" (stdin or stdout) are never refused.
    """
    others = [each for each in inputs if each not in (None, "-")]
    for path in outputs:
        if path is None or str(path) == "-":
            continue
        if any(is_same_file(path, other) for other in others):
            raise RestoreKVError(
                f"{path} is also another file of this command; choose a different name for the "
                "output."
            )
        others.append(path)


def check_output_kind(path: Path, file_format: str) -> None:
    """Refuse to replace a file of a different format.

    Call `check_outputs_apart` first: the message advises deleting the file, which must not be one
    that the command reads.
    """
    check_replaceable(path, OUTPUT_KINDS[file_format], file_format)


def check_json_output(path: Path | None) -> None:
    """Refuse to replace a file that is not JSON; None (no file) and "-" (stdout) are accepted."""
    if path is not None and str(path) != "-":
        check_replaceable(path, "JSON")


def find_files_in_specs(specs: Iterable[str]) -> list[str]:
    """Return the files that specs such as lines:path=mine.jsonl name."""
    # A value may hold any character but the comma between settings.
    settings = [each for spec in specs for each in spec.partition(":")[2].split(",")]
    values = [each.partition("=")[2].strip() for each in settings]
    return [value for value in values if os.path.isfile(value)]


def is_same_file(path: Path | str, other: Path | str) -> bool:
    """Return whether two names mean the same file, which need not exist yet."""
    if os.path.exists(path) and os.path.exists(other):
        return os.path.samefile(path, other)
    return os.path.realpath(path) == os.path.realpath(other)


def check_plot_name(path: Path) -> None:
    """Refuse a plot's name if it does not end as one of the picture formats does."""
    if path.suffix.lower() not in PLOTS:
        endings = join_words(PLOTS, "or")
        raise RestoreKVError(f"The plot {path} must end in {endings}; give such a name.")
