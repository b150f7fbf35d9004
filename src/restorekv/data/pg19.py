"""PG-19 (arXiv 1911.05507; hub emozilla/pg19, a copy in parquet; Apache-2.0): chunks of books from before 1919.

A book is cut into non-overlapping chunks of `config.chunk` tokens, of which up to `config.chunks` are drawn. A chunk is
tokenised anew as a context, so that it may have one token more or fewer (the paper's table: 3,071 to 3,072).
"""

import random
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped, text_of
from restorekv.errors import RestoreKVError

LICENCE = "apache-2.0"


def documents(found: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document | Dropped]:
    """Chunks of every book, in the file's order; who takes them stops after a book."""
    for index, row in enumerate(found):
        text = text_of(row, "text")
        pieces = [] if isinstance(text, Dropped) else list(chunks(tokenizer, text, config.chunk))
        if not pieces:
            yield text if isinstance(text, Dropped) else Dropped("no whole chunk")
            continue
        name = str(row.get("url") or row.get("short_book_title") or f"row {index}")
        rng = random.Random(f"{config.seed} {index}")
        drawn = sorted(rng.sample(range(len(pieces)), min(config.chunks, len(pieces))))
        for number in drawn:
            more = number != drawn[-1]
            yield Document(f"{name} chunk {number}", pieces[number], LICENCE, book=f"row {index}", more=more)


def chunks(tokenizer: Tokenizer, text: str, size: int) -> Iterator[str]:
    """Stretches of the text of `size` tokens each, cut out by their characters; what is left at the end is dropped."""
    if not tokenizer.is_fast:
        raise RestoreKVError("Cutting books needs a tokenizer that tells where its tokens lie; use a fast tokenizer.")
    places = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    for start in range(0, len(places) - size + 1, size):
        yield text[places[start][0] : places[start + size - 1][1]]
