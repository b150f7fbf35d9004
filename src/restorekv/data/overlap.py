"""Finds evaluation texts in training documents, by their normalized words and by word 13-grams.

A document is refused if it has the same words as an evaluation text, if at least a fraction `share`
of its 13-grams occur in the evaluation texts, or if at least that fraction of one evaluation text's
13-grams occur in it. Fewer than MIN_COMMON common 13-grams (a stretch of 20 words) count as a
coincidence.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from restorekv.data.files import (
    ENDINGS,
    FORMATS,
    format_suffix,
    iterate_values,
    list_source_files,
)
from restorekv.errors import RestoreKVError, make_printable, warn
from restorekv.files import list_files

# Letters of scripts that put no spaces between words: Thai, Lao, Tibetan, Burmese, Khmer, Japanese
# and Chinese.
UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)
# One such character, or a run of others.
WORD = re.compile(rf"(?=\w)[{UNSPACED}]|[^\W{UNSPACED}]+")
GRAM_WORDS = 13
NEAR_COPY = 0.8  # two texts with at least this share of common grams are nearly the same
MIN_COMMON = 8  # fewer common grams count as a coincidence
# The base of the polynomial that hashes a gram: an odd number with bits everywhere.
BASE = np.uint64(0x9E3779B97F4A7C15)
# Fields of evaluation files that hold texts.
TEXT_FIELDS = {
    "context",
    "article",
    "text",
    "texts",
    "document",
    "documents",
    "passage",
    "passages",
    "story",
    "full_text",
    "paragraphs",
    "prompts",
}

# Fields that hold answers: a "text" inside of them, as SQuAD has it, is not an evaluation text.
ANSWER_FIELDS = {"answer", "answers"}
SHOWN_NAMES = 5  # the most file names in a warning


def split_words(text: str) -> list[str]:
    """Return the words in lower case, without punctuation, compatible characters unified.

    In scripts without spaces every character is a word, so that line breaks do not change the
    words.
    """
    return WORD.findall(unicodedata.normalize("NFKC", text).lower())


@lru_cache(maxsize=2**18)
def _hash_word(word: str) -> int:
    """Return a hash of 64 bits that is the same in every process, unlike Python's own."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def hash_grams(words: Sequence[str]) -> np.ndarray:
    """Return the distinct hashes of every 13 consecutive words, sorted uint64."""
    hashes = np.array([_hash_word(word) for word in words], dtype=np.uint64)
    if len(hashes) < GRAM_WORDS:
        return np.empty(0, dtype=np.uint64)
    # A polynomial in BASE over each stretch of words, all stretches at once.
    total = np.zeros(len(hashes) - GRAM_WORDS + 1, dtype=np.uint64)
    for offset in range(GRAM_WORDS):
        total = total * BASE + hashes[offset : offset + len(total)]  # modulo 2**64
    return np.unique(total)


def find_near_copies(texts: Sequence[str], others: Sequence[str]) -> list[int]:
    """Return the indices of `texts` that are nearly the same as one of `others`, or contained in
    one, or contain one.

    That is so if their words are the same, or if the text with fewer 13-grams has at least the
    share NEAR_COPY of them in common with the other.
    """
    words_of_others = set()
    grams_of_others = []
    for text in others:
        words = split_words(text)
        words_of_others.add(" ".join(words))
        grams_of_others.append(hash_grams(words))
    copies = []
    for index, text in enumerate(texts):
        words = split_words(text)
        grams = hash_grams(words)
        is_copy = " ".join(words) in words_of_others
        for other in grams_of_others:
            fewer = min(len(grams), len(other))
            common = len(np.intersect1d(grams, other, assume_unique=True))
            is_copy |= common >= max(NEAR_COPY * fewer, MIN_COMMON)
        if is_copy:
            copies.append(index)
    return copies


class EvaluationIndex:
    """An index of evaluation texts.

    Args:
        texts: Name and text of each.
        share: The least fraction of common 13-grams with which a document matches.
    """

    def __init__(self, texts: Iterator[tuple[str, str]], share: float) -> None:
        self.share = share
        self.names: list[str] = []
        self.exact: dict[str, str] = {}  # names by the normalized words of the text
        grams_of_texts = [np.empty(0, dtype=np.uint64)]
        sizes: list[int] = []
        for name, text in texts:
            words = split_words(text)
            self.exact.setdefault(" ".join(words), name)
            self.names.append(name)
            grams = hash_grams(words)
            grams_of_texts.append(grams)
            sizes.append(len(grams))
        # Grams of each text, to know how many of them a document shares.
        self.sizes = np.array(sizes, dtype=np.int64)
        # All grams in one sorted array, and next to each the number of its text.
        grams = np.concatenate(grams_of_texts)
        owners = np.repeat(np.arange(len(sizes)), self.sizes)
        # Sorted once, so that a document's grams are found by bisection.
        order = np.argsort(grams, kind="stable")
        self.grams = grams[order]
        self.owners = owners[order]

    def find_match(self, text: str) -> tuple[str, float] | None:
        """Return the name of the evaluation text that matches a document best, and the share of
        common 13-grams, or None if no text matches.
        """
        # The same words, whatever their punctuation, are found without any grams.
        words = split_words(text)
        exact = self.exact.get(" ".join(words))
        if exact is not None:
            return exact, 1.0
        own = hash_grams(words)
        if not len(own) or not len(self.grams):
            return None
        # The range of each gram of the document among those of all evaluation texts.
        first = np.searchsorted(self.grams, own, "left")
        last = np.searchsorted(self.grams, own, "right")
        common = first < last
        count = common.sum()
        # Stock phrases of a language share a few grams; that is not evidence.
        if count < MIN_COMMON:
            return None
        ranges = zip(first[common], last[common], strict=True)
        owners = np.concatenate([self.owners[start:end] for start, end in ranges])
        counts = np.bincount(owners, minlength=len(self.sizes))
        # Either share may be high: that of the document's grams that the index knows, or that of
        # one evaluation text's grams that are in the document.
        known = np.where(counts >= MIN_COMMON, counts / np.maximum(self.sizes, 1), 0)
        of_document = count / len(own)
        share, best = max((of_document, counts.argmax()), (known.max(), known.argmax()))
        if share < self.share:
            return None
        return self.names[best], round(float(share), 4)


def read_evaluation_texts(paths: list[str]) -> Iterator[tuple[str, str]]:
    """Yield ("FILE, row N", text) of evaluation files or folders. TEXT_FIELDS names the fields that
    hold texts.

    A file without any text is refused, or skipped with a warning if its folder has others.
    """
    for given in paths:
        if not Path(given).exists():
            raise RestoreKVError(f"There is no evaluation file or folder {given}; check the path.")
        empty = []
        files = list_source_files(Path(given))
        for file in files:
            count = 0
            for number, (_, row) in enumerate(iterate_values(file), 1):
                # A row may have its texts anywhere below its top level.
                for text in _find_texts(row):
                    count += 1
                    yield f"{file.name}, row {number}", text
            if not count:
                empty.append(file)
        # A wrong file would silently let evaluation texts into the training data.
        if len(empty) == len(files):
            known = ", ".join(sorted(TEXT_FIELDS))
            raise RestoreKVError(
                f"{given} has no evaluation text; name its fields as one of {known}."
            )
        for file in empty:
            warn(f"{file} has no evaluation text and is skipped.")


def warn_of_unread_files(paths: Sequence[str]) -> None:
    """Warn of files in folders of evaluation texts that are not read because of their endings, such
    as QuALITY's, which end in .dev: documents with the texts of these files are not refused.
    """
    for given in paths:
        if not Path(given).is_dir():
            continue
        files = list_files(Path(given), hidden=False)
        unread = [file.name for file in files if format_suffix(file) not in ENDINGS]
        if not unread:
            continue
        named = ", ".join(map(make_printable, unread[:SHOWN_NAMES]))
        if len(unread) > SHOWN_NAMES:
            named += f" and {len(unread) - SHOWN_NAMES} more"
        warn(
            f"Not read in {given}, because of the ending: {named}. If they hold evaluation texts, "
            f"give them an ending of {FORMATS}, so that these are kept out."
        )


def _find_texts(value: object, wanted: bool = False) -> Iterator[str]:
    """Yield the texts of fields named in TEXT_FIELDS, at any depth, the parts of each joined.

    Args:
        value: A value of JSON.
        wanted: Whether it is the value of such a field.
    """
    if wanted:
        text = "\n".join(_find_strings(value))
        if text.strip():
            yield text
    elif isinstance(value, dict):
        for name, part in value.items():
            if name not in ANSWER_FIELDS:
                yield from _find_texts(part, name in TEXT_FIELDS)
    elif isinstance(value, list):
        for part in value:
            yield from _find_texts(part)


def _find_strings(value: object) -> Iterator[str]:
    """Yield every string inside a JSON value, in order."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _find_strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _find_strings(part)
