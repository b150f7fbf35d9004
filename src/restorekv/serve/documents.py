"""What was uploaded, as text: UTF-8 and Markdown as they are, HTML, PDF and DOCX through a program of its own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path, PurePath

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError, TextTooLongError
from restorekv.model.tokenize import decoded
from restorekv.serve.reader import MISSING

READER = Path(__file__).with_name("reader.py")
KINDS = {".pdf": "pdf", ".docx": "docx", ".html": "html", ".htm": "html"}
SECONDS = {"pdf": 30, "docx": 20, "html": 10}  # of processor time, and six times that by the clock
PACKAGES = {"pypdf": "pypdf", "docx": "python-docx"}
MEMORY = 2 << 30  # bytes that reading a file may take
READING = threading.BoundedSemaphore(2)  # such processes at once
LONGEST_NAME = 120  # characters
TEXT, CACHE = "text", "rkv"  # kinds that no process of its own reads


def kind_of(name: str) -> str:
    """Returns how a file is read, by the ending of its name: as a cache file, in one of KINDS, or as plain text."""
    ending = PurePath(name).suffix.lower()
    return CACHE if ending == ".rkv" else KINDS.get(ending, TEXT)


def document_hash(kind: str) -> hashlib._Hash:
    """Returns the SHA-256 that names a document of a kind, once its content was added.

    The kind's length and the kind come first, so that no content of one kind has the name of a content of another.
    """
    return hashlib.sha256(len(kind).to_bytes(8, "big") + kind.encode())


def text_of(name: str, content: bytes) -> str:
    """Returns the text of a file by its name's ending; refuses what has none."""
    kind, name = kind_of(name), shown(name)
    text = decoded(content, name) if kind not in ("pdf", "docx") else ""
    if kind in KINDS.values():
        text = read(kind, name, text.encode() or content)
    if not text.strip():
        raise RestoreKVError(f"{name} has no text; give one with at least one word.")
    return text


def read(kind: str, name: str, content: bytes) -> str:
    """Returns the text of a file that a process of its own reads, so that a hostile one harms nobody else."""
    command = [sys.executable, "-P", str(READER), kind, str(MEMORY), str(SECONDS[kind])]
    try:
        with READING:
            done = subprocess.run(command, input=content, capture_output=True, timeout=6 * SECONDS[kind])
    except subprocess.TimeoutExpired:
        done = None
    why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] if done else ""
    if done and done.returncode == 0:
        return done.stdout.decode()
    if done and done.returncode == MISSING:
        wanted = PACKAGES.get(why, why)
        raise RestoreKVError(f"Reading {name} needs the package {wanted}; pip install 'restorekv[serve]'.")
    if done is None or done.returncode < 0 or why == "MemoryError":
        raise RestoreKVError(f"{name} takes too long or too much memory to read; give its text.")
    raise RestoreKVError(f"{name} is not a file of its kind that can be read ({why[:60]}); save it again.")


def shown(name: str) -> str:
    """Returns a file's name for a sentence: on one line and not too long."""
    return "".join(each if each.isprintable() else "_" for each in name)[-LONGEST_NAME:]


@contextmanager
def told_to_clients() -> Iterator[None]:
    """Says what a client can do about a text that is too long, in place of the flags of other commands."""
    try:
        yield
    except TextTooLongError as error:
        raise RestoreKVError(
            f"The text has {error.tokens:,} tokens, and the model's {error.positions:,} positions have room for "
            f"{error.room:,} and a question; shorten it, split it into several files, or choose a server whose --model "
            "has more positions."
        ) from None


def check_size(text: str, tokenizer: Tokenizer, positions: int) -> None:
    """Refuses a text that is too long however it is tokenized; tokenizing it alone may take gigabytes."""
    most = positions * longest_token(tokenizer)
    if len(text) > most:
        raise RestoreKVError(
            f"The text has {len(text):,} characters, and the model's {positions:,} positions have room for fewer than "
            f"{most:,}; split it."
        )


@lru_cache(maxsize=4)
def longest_token(tokenizer: Tokenizer) -> int:
    """Returns the characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))
