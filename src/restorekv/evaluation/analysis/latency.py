"""Seconds of attention over a compressed cache, one layer and one decode step, base and restored side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.prepared import CompressionConfig, ScoredContext
from restorekv.evaluation.analysis.compress_side import context_of
from restorekv.model import attention
from restorekv.model.shape import CacheShape, decoder

WARM_UP = 3  # steps


@torch.no_grad()
def latencies(prepared: ScoredContext, ratios: Sequence[str], steps: int) -> list[dict]:
    """Two rows a ratio, base and restored, which hold the same number of pairs; `prepared` has a restore cache.

    The two take every step in turn; `to_base` is the median of the quotients.
    """
    rows = []
    for ratio in ratios:
        both = [prepared.evict(ratio, 0), prepared.evict(ratio)]
        assert both[0].pairs == both[1].pairs
        caches = [cache.fork() for cache in both]
        for cache in caches:
            decode_one(prepared.model, cache)
        found = [[step(prepared.model, cache) for cache in caches] for _ in range(WARM_UP + steps)][WARM_UP:]
        for index, cache in enumerate(both):
            times = [1000 * each[index] for each in found]
            rows.append({
                "ratio": float(prepared.budget(ratio).ratio), "restored": bool(index), "milliseconds": median(times),
                "least": min(times), "most": max(times), "bytes": cache.nbytes, "pairs": cache.pairs,
                "restore_tokens": cache.restore,
            })  # fmt: skip
        rows[-1]["to_base"] = median(restored / base for base, restored in found)
    return rows


def decode_one(model: PreTrainedModel, cache: RaggedCache) -> None:
    """A new token's pair in every layer, as a decode step puts it there before attention runs."""
    for layer in cache.layers:
        size = (1, layer.heads, 1, layer.keys.shape[-1])
        layer.update(*(torch.randn(size, dtype=model.dtype, device=model.device) for _ in range(2)))


def step(model: PreTrainedModel, cache: RaggedCache) -> float:
    """Seconds a layer of a random query's attention, averaged over the layers."""
    shape = CacheShape.of(model)
    size = (1, shape.heads * shape.groups, 1, shape.head_dim)
    query = torch.randn(size, dtype=model.dtype, device=model.device)
    modules = [layer.self_attn for layer in decoder(model).layers]
    start = now(model)
    for module, layer in zip(modules, cache.layers, strict=True):
        attention.attend(module, query, layer, layer, None)
    return (now(model) - start) / len(modules)


def now(model: PreTrainedModel) -> float:
    """The clock, once the device has done all it was told."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


def random_prepared(
    model: PreTrainedModel, tokenizer: Tokenizer, tokens: int, restore_tokens: int, conventions: CompressionConfig
) -> ScoredContext:
    """A context of T tokens whose keys, values and scores are random: it stands in for one that is too long to fill."""
    context, shape = context_of(tokenizer, tokens), CacheShape.of(model)
    placed = {"device": model.device, "dtype": model.dtype}

    def pairs(length: int) -> tuple[Tensor, Tensor]:
        return tuple(torch.randn(1, shape.heads, length, shape.head_dim, **placed) for _ in range(2))

    full = DynamicCache()
    for index in range(shape.layers):
        full.update(*pairs(context.positions), index)
    scores = torch.rand(shape.layers, shape.heads, tokens, device=model.device)
    restored = tuple(pairs(restore_tokens) for _ in range(shape.layers))
    prepared = ScoredContext(model, context, full, scores, replace(conventions, restore_from="full"))
    return replace(prepared, restore_tokens=restore_tokens, restore_cache=restored)
