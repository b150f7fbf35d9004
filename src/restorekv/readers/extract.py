"""The text of a file by the ending of its name: UTF-8 and Markdown as they are, HTML, PDF and DOCX
by program.py.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path, PurePath

from restorekv.errors import RestoreKVError, describe_missing_extra
from restorekv.model.tokenize import decode_utf8
from restorekv.readers.program import MISSING

PROGRAM = Path(__file__).with_name("program.py")
KINDS = {".pdf": "pdf", ".docx": "docx", ".html": "html", ".htm": "html"}
SECONDS = {"pdf": 30, "docx": 20, "html": 10}  # of processor time, and six times that by the clock
PACKAGES = {"pypdf": "pypdf", "docx": "python-docx"}
MEMORY = 2 << 30  # bytes that reading a file may take
READING = threading.BoundedSemaphore(2)  # such processes at once
LONGEST_NAME = 120  # characters
# kinds that no process of its own reads
TEXT = "text"
CACHE = "rkv"


def find_kind(name: str) -> str:
    """Returns how a file is read, by the ending of its name: as a cache file, in one of KINDS, or
    as plain text.
    """
    ending = PurePath(name).suffix.lower()
    return CACHE if ending == ".rkv" else KINDS.get(ending, TEXT)


def extract_text(name: str, content: bytes) -> str:
    """Returns the text of a file by its name's ending; refuses what has none."""
    kind = find_kind(name)
    name = printable_name(name)
    text = decode_utf8(content, name) if kind not in ("pdf", "docx") else ""
    if kind in KINDS.values():
        text = run_program(kind, name, text.encode() or content)
    if not text.strip():
        raise RestoreKVError(f"{name} has no text; give one with at least one word.")
    return text


def run_program(kind: str, name: str, content: bytes) -> str:
    """Returns the text of a file that a process of its own reads, so that a hostile one harms
    nobody else.
    """
    command = [sys.executable, "-P", str(PROGRAM), kind, str(MEMORY), str(SECONDS[kind])]
    try:
        with READING:
            done = subprocess.run(
                command, input=content, capture_output=True, timeout=6 * SECONDS[kind]
            )
    except subprocess.TimeoutExpired:
        done = None
    why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] if done else ""
    if done and done.returncode == 0:
        return done.stdout.decode()
    if done and done.returncode == MISSING:
        wanted = PACKAGES.get(why, why)
        raise RestoreKVError(describe_missing_extra(f"Reading {name}", wanted, "serve"))
    if done is None or done.returncode < 0 or why == "MemoryError":
        raise RestoreKVError(f"{name} takes too long or too much memory to read; give its text.")
    raise RestoreKVError(
        f"{name} is not a file of its kind that can be read ({why[:60]}); save it again."
    )


def printable_name(name: str) -> str:
    """Returns a file's name for a sentence: on one line and not too long."""
    return "".join(each if each.isprintable() else "_" for each in name)[-LONGEST_NAME:]
