"""Documents of random pairs, whose heads have any lengths."""

from collections.abc import Sequence

import torch

from restorekv.vllm.page_pool import DocumentPairs


def make_document(lengths: Sequence[Sequence[int]], dim: int, seed: int = 0) -> DocumentPairs:
    """Return a document with `lengths[layer][head]` pairs of `dim` numbers in every head."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    keys = [torch.randn(int(count), dim, generator=generator) for count in counts.sum(-1)]
    values = [torch.randn(int(count), dim, generator=generator) for count in counts.sum(-1)]
    return DocumentPairs(keys, values, counts)
