"""FLAN v2 within the Tulu-3 mixture (arXiv 2411.15124; hub allenai/tulu-3-sft-mixture, ODC-BY 1.0).

Rows are {id, messages: [{role, content}], source}. A long prompt is the context itself, nothing is asked after it, and
the answer is the teacher's, not the one in the set.
"""

from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped

LICENCE = "odc-by"
SUBSET = "flan_v2"


def documents(found: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document | Dropped]:
    """The first words of the user, in the file's order; a row of a text file is a whole prompt."""
    for index, row in enumerate(found):
        if SUBSET not in (row.get("source") or SUBSET):
            yield Dropped("another subset")
            continue
        said = [part.get("content") for part in row.get("messages") or [] if part.get("role") == "user"]
        prompt = row.get("text") or (said[0] if said else None) or ""
        name = str(row.get("id") or f"row {index}")
        yield Document(name, prompt, LICENCE) if prompt.strip() else Dropped("no prompt")
