"""Caches with ragged heads, and questions to decode over them."""

import torch
from transformers import DynamicCache

from restorekv.cache.ragged import RaggedCache
from restorekv.model.shape import CacheShape

TEXT = "The code of the red house is seven. The blue house has a green door. " * 3
QUESTIONS = [
    "Which code?",
    "Who lives in the blue house, and why?",
    "?",
    "Tell me about the red house.",
]


def make_cache(model, context, restore=4, share=0.4):
    """Return a cache of random pairs; its restore cache has the pairs of ids 7, 8, ... after the
    context.
    """
    full = DynamicCache(config=model.config)
    more = torch.arange(7, 7 + restore)[None]
    with torch.no_grad():
        model(torch.cat([context.ids, more], 1), past_key_values=full, use_cache=True)
    shape = CacheShape.from_model(model)
    generator = torch.Generator().manual_seed(3)
    return RaggedCache.from_kept_pairs(
        full, torch.rand(shape.layers, shape.heads, context.num_tokens, generator=generator) < share
    )
