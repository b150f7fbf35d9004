"""Evaluation texts that training must not see: found again by their normalised words and by word 13-grams.

A document is refused if its words are those of an evaluation text, or if a share of at least `share` of its 13-grams is
among those of the evaluation texts, or of an evaluation text's among its own. Fewer than LEAST common 13-grams (a
stretch of 20 words) are taken for a coincidence.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from restorekv.data.files import local_files
from restorekv.data.rows import values
from restorekv.errors import RestoreKVError, RestoreKVWarning

GRAM, LEAST = 13, 8
BASE = np.uint64(0x9E3779B97F4A7C15)
FIELDS = {
    "context", "article", "text", "texts", "document", "documents", "passage", "passages", "story", "full_text",
    "paragraphs", "prompts",
}  # fmt: skip


def words(text: str) -> list[str]:
    """Lower case, without punctuation, compatible characters made one."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).lower())


@lru_cache(maxsize=2**18)
def word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def grams(text: str) -> np.ndarray:
    """Distinct hashes of every 13 words in a row, sorted uint64."""
    single = np.array([word_hash(word) for word in words(text)], dtype=np.uint64)
    if len(single) < GRAM:
        return np.empty(0, dtype=np.uint64)
    total = np.zeros(len(single) - GRAM + 1, dtype=np.uint64)
    for place in range(GRAM):
        total = total * BASE + single[place : place + len(total)]  # modulo 2**64
    return np.unique(total)


class Evaluations:
    """An index of evaluation texts, given as (name, text)."""

    def __init__(self, texts: Iterator[tuple[str, str]], share: float) -> None:
        self.share, self.names, self.exact = share, [], {}
        parts, sizes = [], []
        for name, text in texts:
            self.exact.setdefault(" ".join(words(text)), name)
            self.names.append(name)
            parts.append(grams(text))
            sizes.append(len(parts[-1]))
        self.sizes = np.array(sizes, dtype=np.int64)
        every = np.concatenate([np.empty(0, dtype=np.uint64), *parts])
        owners = np.repeat(np.arange(len(sizes)), self.sizes)
        order = np.argsort(every, kind="stable")
        self.grams, self.owners = every[order], owners[order]

    def match(self, text: str) -> tuple[str, float] | None:
        """The evaluation text that a document is taken from, and the share in common; None if there is none."""
        exact = self.exact.get(" ".join(words(text)))
        if exact is not None:
            return exact, 1.0
        own = grams(text)
        if not len(own) or not len(self.grams):
            return None
        first, last = (np.searchsorted(self.grams, own, side) for side in ("left", "right"))
        found = first < last
        if found.sum() < LEAST:
            return None
        hits = np.concatenate([self.owners[a:b] for a, b in zip(first[found], last[found], strict=True)])
        each = np.bincount(hits, minlength=len(self.sizes))
        shares = np.where(each >= LEAST, each / np.maximum(self.sizes, 1), 0)
        share, best = max((found.sum() / len(own), each.argmax()), (shares.max(), shares.argmax()))
        return (self.names[best], round(float(share), 4)) if share >= self.share else None


def evaluation_texts(paths: list[str]) -> Iterator[tuple[str, str]]:
    """Texts of evaluation files or folders, named FILE, row N; the fields are known by their names, at any depth.

    A file without any is refused, in a folder that has others it is passed over with a warning.
    """
    for given in paths:
        if not Path(given).exists():
            raise RestoreKVError(f"There is no evaluation file or folder {given}; check the path.")
        empty, files = [], local_files(Path(given))
        for file in files:
            count = 0
            for number, (_, row) in enumerate(values(file), 1):
                for text in texts_in(row):
                    count += 1
                    yield f"{file.name}, row {number}", text
            empty += [] if count else [file]
        if len(empty) == len(files):
            known = ", ".join(sorted(FIELDS))
            raise RestoreKVError(f"{given} has no evaluation text; its fields must be named as one of {known}.")
        for file in empty:
            warnings.warn(f"{file} has no evaluation text and is passed over.", RestoreKVWarning, stacklevel=2)


def texts_in(value: object, wanted: bool = False) -> Iterator[str]:
    """Whatever stands in a field of a known name, its parts joined."""
    if wanted:
        text = "\n".join(strings(value))
        if text.strip():
            yield text
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from texts_in(part, name in FIELDS)
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part)


def strings(value: object) -> Iterator[str]:
    """Every text inside, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from strings(part)
