"""Documents of random pairs, with heads of any lengths."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from restorekv.model.rope import get_rope_settings
from restorekv.model.shape import CacheShape
from restorekv.vllm.document_store import EngineModel, find_limit
from restorekv.vllm.page_pool import DocumentPairs
from tests.helpers.models import VOCABULARY


def make_document(lengths: Sequence[Sequence[int]], dim: int, seed: int = 0) -> DocumentPairs:
    """Return a document with `lengths[layer][head]` pairs of `dim` numbers in every head."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor(lengths)
    keys = [torch.randn(int(count), dim, generator=generator) for count in counts.sum(-1)]
    values = [torch.randn(int(count), dim, generator=generator) for count in counts.sum(-1)]
    return DocumentPairs(keys, values, counts)


def describe_engine_model(model, **changed):
    """Return what an engine knows about a model, with changes."""
    shape = CacheShape.from_model(model)
    facts = EngineModel(
        layers=shape.layers,
        heads=shape.heads,
        head_dim=shape.head_dim,
        rope=get_rope_settings(model.config),
        dtype="float32",
        vocabulary=VOCABULARY,
        limit=find_limit(model.config),
    )
    return replace(facts, **changed)
