"""LongAlpaca-12k (arXiv 2309.12307, hub Yukang/LongAlpaca-12k, CC BY-NC 4.0): long documents with the question cut off.

A row's `instruction` is a preface, a paper or part of a book, "Now the paper ends." (the second paper, the material),
and a question about it. As in the released recipe the context is the instruction up to that marker, or up to the last
"Question:" where there is none; the short instructions of the set have neither.
"""

import re
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped, document, text_of

LICENCE = "cc-by-nc-4.0"
END = re.compile(r"Now the [a-z ]{1,30} ends\.", re.IGNORECASE)


def documents(found: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document | Dropped]:
    """In the file's order; a row of a text file is a whole document."""
    for index, row in enumerate(found):
        yield document(f"row {index}", text_of(row, "text") or text_of(row, "instruction", cut), LICENCE)


def cut(instruction: str) -> str:
    """The instruction before its question; "" if it holds no document."""
    ends = list(END.finditer(instruction))
    if ends:
        return instruction[: ends[-1].start()].rstrip()
    before, _, _ = instruction.rpartition("Question:")
    return before.rstrip()
