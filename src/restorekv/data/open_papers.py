"""Openly licensed papers in place of LongAlpaca's: arXiv papers of the Common Pile (arXiv 2506.05209).

Hub common-pile/arxiv_papers_filtered: rows {id, text, metadata: {license, ...}}, each paper with the licence that its
authors chose on arXiv (CC BY, CC BY-SA, CC0 or public domain), written as in LABELS. A row with another licence, or
with none, is dropped and counted.
"""

import json
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped, document, text_of

DEED = "https://creativecommons.org/licenses/"
LABELS = {
    f"Creative Commons - Attribution - {DEED}by/4.0/": "cc-by-4.0",
    f"Creative Commons - Attribution - {DEED}by/3.0/": "cc-by-3.0",
    f"Creative Commons - Attribution Share-Alike - {DEED}by-sa/4.0/": "cc-by-sa-4.0",
    f"Creative Commons - Attribution Share-Alike - {DEED}by-sa/3.0/": "cc-by-sa-3.0",
    "Creative Commons Zero - Public Domain - https://creativecommons.org/publicdomain/zero/1.0/": "cc0-1.0",
    "Public Domain": "public-domain",
}


def documents(found: Iterator[dict], config: BuildConfig, tokenizer: Tokenizer) -> Iterator[Document | Dropped]:
    """In the file's order, those whose licence is among `config.licences`."""
    for index, row in enumerate(found):
        label = licence_label(row)
        licence = LABELS.get(label)
        if licence not in config.allowed:
            yield Dropped(f"licence {licence or label[:60] or 'missing'}")
        else:
            yield document(str(row.get("id") or f"row {index}"), text_of(row, "text"), licence)


def licence_label(row: dict) -> str:
    """The field `license` of the metadata, which may be a text of JSON, or else of the row."""
    metadata = row.get("metadata") or {}
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except json.JSONDecodeError:
            metadata = {}
    metadata = metadata if isinstance(metadata, dict) else {}
    return str(metadata.get("license") or row.get("license") or "").strip()
