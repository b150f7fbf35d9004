"""The text of a file, by the ending of its name.

Plain text (UTF-8) and Markdown are taken unchanged; HTML, PDF, DOCX and EPUB are read by
program.py, which also reports what it could not read.
"""

from __future__ import annotations

import builtins
import codecs
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from restorekv.errors import RestoreKVError, describe_missing_extra, warn
from restorekv.files import decode_text, read_bytes
from restorekv.readers.charsets import decode_page
from restorekv.readers.epub_text import ProtectedBookError
from restorekv.readers.pdf_text import MAX_PAGES, DynamicFormError, TooManyPagesError
from restorekv.readers.program import EXIT_MISSING_LIBRARY, EXTRACTORS
from restorekv.size_limits import TEXT_BYTES

PROGRAM = Path(__file__).with_name("program.py")
FILE_TYPES = {".pdf": "pdf", ".docx": "docx", ".epub": "epub", ".html": "html", ".htm": "html"}
# Endings of documents: what `compress FOLDER` compresses.
DOCUMENT_ENDINGS = {*FILE_TYPES, ".txt", ".text", ".md", ".markdown", ".rst", ".csv", ".tsv"}
# Seconds of processor time that reading may take; by the clock it may take six times as long.
CPU_SECONDS = {"pdf": 30, "docx": 20, "epub": 30, "html": 10}
PACKAGES = {"pypdf": "pypdf", "docx": "python-docx"}
MEMORY_BYTES = 2 << 30  # that reading a file may take
READ_SLOTS = threading.BoundedSemaphore(2)  # processes that read at the same time
LONGEST_NAME = 120  # characters
NAMED_RANGES = 8  # how many ranges of pages a sentence lists
# Descriptions of pages that could not be read, by the names of pdf_text.py's notices.
UNREAD_PAGES = {
    "damaged": "damaged",
    "pictures": "pictures without text",
    "unmapped": "in a font that does not say which characters it shows",
}
# Why a file is refused, by the name of its reader's error.
REFUSALS = {
    "FileNotDecryptedError": "asks for a password; save it without one",
    TooManyPagesError.__name__: f"has more than {MAX_PAGES:,} pages; split it, or give its text",
    DynamicFormError.__name__: (
        "is a form that only Adobe's reader shows; print it to a PDF file first"
    ),
    ProtectedBookError.__name__: (
        "is protected against copying (DRM), so only its seller's program can read it; give a file "
        "without protection, or its text"
    ),
}

PDF_START = b"%PDF-"
# First bytes of files that are not plain text, and the end of the sentence that refuses each.
SIGNATURES = {
    PDF_START: "is a PDF file by its content; give it a name that ends in .pdf",
    b"PK\x03\x04": "is a ZIP file by its content; name it .docx or .epub if it is one of these",
    b"\xd0\xcf\x11\xe0": "is a file of an older office program; save it as DOCX or PDF",
    b"{\\rtf": "is RTF by its content; save it as DOCX, PDF or plain text",
}
PAGE_STARTS = (b"<!doctype html", b"<html")  # in lower case

# Kinds of files that are read in this process.
TEXT = "text"
CACHE = "rkv"


def find_kind(name: str) -> str:
    """Return how a file is read: CACHE, one of the values of FILE_TYPES, or TEXT."""
    ending = PurePath(name).suffix.lower()
    if ending == ".rkv":
        return CACHE
    return FILE_TYPES.get(ending, TEXT)


def guess_ending(content: bytes) -> str:
    """Return the ending for a file by its content, "" for a text.

    `content` may be the first bytes alone.
    """
    if content.startswith(PDF_START):
        return ".pdf"
    start = content.removeprefix(codecs.BOM_UTF8).lstrip()[:64].lower()
    return ".html" if start.startswith(PAGE_STARTS) else ""


@dataclass(frozen=True)
class Extraction:
    """The text of a file.

    Attributes:
        text: What could be read.
        warning: A sentence about what could not be read, or "".
    """

    text: str
    warning: str = ""


def load_document(path: Path) -> str:
    """Return the text of a file by its ending: HTML, PDF, DOCX or EPUB, any other as UTF-8.

    Warn of what could not be read.
    """
    name_in_messages = f"The file {path}"
    content = read_bytes(path, name_in_messages, TEXT_BYTES)
    if path.suffix.lower() in FILE_TYPES:
        return extract_text(str(path), content)
    return decode_plain_text(content, name_in_messages)


def extract_text(name: str, content: bytes) -> str:
    """Return the text of a file; refuse one that has none, and warn of what could not be read."""
    extraction = read_document(name, content)
    if extraction.warning:
        warn(extraction.warning)
    return extraction.text


def read_document(name: str, content: bytes) -> Extraction:
    """Return the text of a file, and a sentence about what could not be read.

    Args:
        name: The file's name, whose ending says how it is read.
        content: Its bytes.

    Raises:
        RestoreKVError: It cannot be read, or has no text.
    """
    kind = find_kind(name)
    name = printable_name(name)
    notices: dict[str, Any] = {}
    if kind == "html":
        content = decode_page(content, name).encode()
    if kind in EXTRACTORS:
        text, notices = _run_program(kind, name, content)
    else:
        text = decode_plain_text(content, name)
    unread = _describe_unread(notices)
    if not text.strip():
        if unread:
            raise RestoreKVError(
                f"{name} has no text that can be read: {unread}; save it again or run OCR on it, "
                "or give its text."
            )
        raise RestoreKVError(f"{name} has no text; give one with at least one word.")
    warning = ""
    if unread:
        warning = f"Not all of {name} could be read: {unread}. Answers cannot know what is missing."
    return Extraction(text, warning)


def decode_plain_text(content: bytes, name: str) -> str:
    """Decode plain text; its lines end as Python's `open` reads them, also those of Windows. Refuse
    other kinds of files by their first bytes, because some would decode to nonsense instead of
    failing.
    """
    for start, what in SIGNATURES.items():
        if content.startswith(start):
            raise RestoreKVError(f"{name} {what}.")
    return decode_text(content, name).replace("\r\n", "\n").replace("\r", "\n")


def _describe_unread(notices: dict[str, Any]) -> str:
    """Return a part of a sentence about what could not be read; "" if everything could be."""
    parts = []
    for kind, what in UNREAD_PAGES.items():
        pages = notices.get(kind)
        if pages:
            verb = "page {} is" if len(pages) == 1 else "pages {} are"
            parts.append(f"{verb.format(_describe_pages(pages))} {what}")
    missing = notices.get("missing")
    if missing:
        verb = "page that it lists is" if missing == 1 else "pages that it lists are"
        parts.append(f"{missing:,} {verb} missing")
    symbols = notices.get("symbols")
    if symbols:
        verb = "symbol is" if symbols == 1 else "symbols are"
        parts.append(f"{symbols:,} {verb} of a font whose characters are not known")
    inserted = notices.get("inserted")
    if inserted:
        verb = "file that it inserts is" if inserted == 1 else "files that it inserts are"
        parts.append(f"{inserted:,} {verb} not read")
    return ", ".join(parts)


def _describe_pages(pages: Sequence[int]) -> str:
    """Return numbers of pages, such as "1-3, 7"."""
    ranges: list[list[int]] = []
    for page in pages:
        if ranges and ranges[-1][1] == page - 1:
            ranges[-1][1] = page
        else:
            ranges.append([page, page])
    named = []
    for first, last in ranges[:NAMED_RANGES]:
        if first == last:
            named.append(f"{first}")
        else:
            named.append(f"{first}-{last}")
    listed = ", ".join(named)
    others = sum(last - first + 1 for first, last in ranges[NAMED_RANGES:])
    if others:
        return f"{listed} and {others:,} more"
    return listed


def _run_program(kind: str, name: str, content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text of a file and the notices about it, from a separate process, so that a
    hostile file cannot harm this one.
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
    last_line = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode == 0:
        return done.stdout.decode(), json.loads(last_line)
    # The type of the error, or the package that is missing.
    why = last_line
    if done.returncode == EXIT_MISSING_LIBRARY:
        package = PACKAGES.get(why, why)
        raise RestoreKVError(describe_missing_extra(f"Reading {name}", package, "serve"))
    # A signal ends the program when its processor time is used up.
    if done.returncode < 0 or why == "MemoryError":
        raise too_much
    if why in REFUSALS:
        raise RestoreKVError(f"{name} {REFUSALS[why]}.")
    # The name of a built-in exception says nothing about the file.
    cause = ""
    if not hasattr(builtins, why):
        cause = f" ({why[:60]})"
    raise RestoreKVError(
        f"{name} is not a file of its kind that can be read{cause}; save it again."
    )


def printable_name(name: str) -> str:
    """Return a file's name for a sentence: on one line and not too long."""
    printable = "".join(char if char.isprintable() else "_" for char in name)
    return printable[-LONGEST_NAME:]
