"""The text of a file, by the ending of its name.

UTF-8 and Markdown are taken as they are; HTML, PDF and DOCX are read by program.py.
"""

from __future__ import annotations

import builtins
import subprocess
import sys
import threading
from pathlib import Path, PurePath

from restorekv.errors import RestoreKVError, describe_missing_extra
from restorekv.files import decode_text, read_bytes
from restorekv.readers.program import EXIT_MISSING_LIBRARY, MAX_PAGES, TooManyPagesError
from restorekv.size_limits import TEXT_BYTES

PROGRAM = Path(__file__).with_name("program.py")
FILE_TYPES = {".pdf": "pdf", ".docx": "docx", ".html": "html", ".htm": "html"}
# Seconds of processor time that reading may take, and six times as many by the clock.
CPU_SECONDS = {"pdf": 30, "docx": 20, "html": 10}
PACKAGES = {"pypdf": "pypdf", "docx": "python-docx"}
MEMORY_BYTES = 2 << 30  # that reading a file may take
READ_SLOTS = threading.BoundedSemaphore(2)  # processes that read at once
LONGEST_NAME = 120  # characters

# Kinds of files that are read in this process.
TEXT = "text"
CACHE = "rkv"


def find_kind(name: str) -> str:
    """Return how a file is read: CACHE, one of the values of FILE_TYPES, or TEXT."""
    ending = PurePath(name).suffix.lower()
    if ending == ".rkv":
        return CACHE
    return FILE_TYPES.get(ending, TEXT)


def load_document(path: Path) -> str:
    """Return the text of a file by its ending: HTML, PDF or DOCX, any other as UTF-8."""
    name_in_messages = f"The file {path}"
    content = read_bytes(path, name_in_messages, TEXT_BYTES)
    if path.suffix.lower() in FILE_TYPES:
        return extract_text(str(path), content)
    return decode_text(content, name_in_messages)


def extract_text(name: str, content: bytes) -> str:
    """Return the text of a file; refuse one that has none."""
    kind = find_kind(name)
    name = printable_name(name)
    if kind in ("pdf", "docx"):
        text = _run_program(kind, name, content)
    else:
        text = decode_text(content, name)
        if kind == "html":
            text = _run_program(kind, name, text.encode())
    if not text.strip():
        raise RestoreKVError(f"{name} has no text; give one with at least one word.")
    return text


def _run_program(kind: str, name: str, content: bytes) -> str:
    """Return the text of a file that a separate process reads, so that a hostile file cannot harm
    this one.
    """
    command = [sys.executable, "-P", str(PROGRAM), kind, str(MEMORY_BYTES), str(CPU_SECONDS[kind])]
    too_much = RestoreKVError(f"{name} takes too long or too much memory to read; give its text.")
    try:
        with READ_SLOTS:
            done = subprocess.run(
                command, input=content, capture_output=True, timeout=6 * CPU_SECONDS[kind]
            )
    except subprocess.TimeoutExpired:
        raise too_much from None
    if done.returncode == 0:
        return done.stdout.decode()
    # The last line is the type of the error, or the package that is missing.
    why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode == EXIT_MISSING_LIBRARY:
        package = PACKAGES.get(why, why)
        raise RestoreKVError(describe_missing_extra(f"Reading {name}", package, "serve"))
    if done.returncode < 0 or why == "MemoryError":  # a signal is the bound on time
        raise too_much
    if why == "FileNotDecryptedError":
        raise RestoreKVError(f"{name} asks for a password; save it without one.")
    if why == TooManyPagesError.__name__:
        raise RestoreKVError(
            f"{name} has more than {MAX_PAGES:,} pages; split it, or give its text."
        )
    # What Python itself calls an error says nothing of the file.
    cause = "" if hasattr(builtins, why) else f" ({why[:60]})"
    raise RestoreKVError(
        f"{name} is not a file of its kind that can be read{cause}; save it again."
    )


def printable_name(name: str) -> str:
    """Return a file's name for a sentence: on one line and not too long."""
    printable = "".join(letter if letter.isprintable() else "_" for letter in name)
    return printable[-LONGEST_NAME:]
