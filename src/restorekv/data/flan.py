"""FLAN v2 within the Tulu-3 mixture (arXiv 2411.15124; hub allenai/tulu-3-sft-mixture, ODC-BY 1.0).

Rows are {id, messages: [{role, content}], source}. A long prompt is the context itself, nothing is asked after it, and
the answer is the teacher's, not the one in the set.
"""

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped, document, no_text, text_of

LICENCE = "odc-by"
SUBSET = "flan_v2"


def documents(found: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document | Dropped]:
    """The first words of the user, in the file's order; a row of a text file is a whole prompt."""
    for index, row in enumerate(found):
        subset = text_of(row, "source") or SUBSET
        if isinstance(subset, Dropped):
            yield subset
        elif SUBSET not in subset:
            yield Dropped("another subset")
        else:
            name = str(row.get("id") or f"row {index}")
            yield document(name, text_of(row, "text") or first_words(row.get("messages") or []), LICENCE, "no prompt")


def first_words(messages: object) -> str | Dropped:
    """Of the user."""
    if not isinstance(messages, list) or not all(isinstance(part, dict) for part in messages):
        return no_text("messages")
    return next((text_of(part, "content") for part in messages if part.get("role") == "user"), "")
