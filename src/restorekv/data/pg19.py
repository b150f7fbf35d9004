"""PG-19 (arXiv 1911.05507; hub emozilla/pg19, a copy in parquet; Apache-2.0): chunks of books from before 1919.

A book is cut into non-overlapping chunks of `config.chunk` tokens, of which up to `config.chunks` are drawn. A chunk is
tokenised anew as a context, so that it may have one token more or fewer (the paper's table: 3,071 to 3,072).
"""

import random
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped
from restorekv.errors import RestoreKVError

LICENCE = "apache-2.0"


def documents(found: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document | Dropped]:
    """Chunks of the first `config.books` books, in the file's order."""
    taken = 0
    for index, row in enumerate(found):
        pieces = list(chunks(tokenizer, row.get("text") or "", config.chunk))
        if not pieces:
            yield Dropped("no whole chunk")
            continue
        name = str(row.get("url") or row.get("short_book_title") or f"row {index}")
        drawn = random.Random(f"{config.seed} {index}").sample(range(len(pieces)), min(config.chunks, len(pieces)))
        for number in sorted(drawn):
            yield Document(f"{name} chunk {number}", pieces[number], LICENCE)
        taken += 1
        if taken == config.books:
            return


def chunks(tokenizer: Tokenizer, text: str, size: int) -> Iterator[str]:
    """Stretches of the text of `size` tokens each, cut out by their characters; what is left at the end is dropped."""
    if not tokenizer.is_fast:
        raise RestoreKVError("Cutting books needs a tokenizer that tells where its tokens lie; use a fast tokenizer.")
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    for start in range(0, len(places) - size + 1, size):
        yield text[places[start][0] : places[start + size - 1][1]]
