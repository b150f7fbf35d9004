"""The record of a compression: everything that a reader of the cache file needs to know."""

from __future__ import annotations

import platform

import peft
import torch
import transformers
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv._version import __version__
from restorekv.cache.ragged import RaggedCache
from restorekv.compression.budget import Budget
from restorekv.compression.context_file import Manifest
from restorekv.compression.prepared import PreparedContext
from restorekv.compression.streaming import Stream
from restorekv.model.load import model_fingerprint, model_name, rope_fingerprint
from restorekv.model.prompt import template_hash
from restorekv.model.shape import CacheShape
from restorekv.restore.adapter import RestoreAdapter


def describe(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    source: PreparedContext | Stream,
    budget: Budget,
    cache: RaggedCache,
    evictor: str,
    adapter: RestoreAdapter | None,
    storage: str = "model",
    streaming: int | None = None,
) -> Manifest:
    """`evictor` is the method's identity; pairs and bytes are those of `cache`, made from `source`."""
    shape, context = CacheShape.of(model), source.context
    columns = shape.layers * shape.heads * context.positions
    element = cache.layers[0].dtype.itemsize
    return Manifest(
        model=model_name(model),
        fingerprint=model_fingerprint(model),
        rope=rope_fingerprint(model.config),
        template=template_hash(tokenizer),
        dtype=str(model.dtype).removeprefix("torch."),
        shape=vars(shape),
        prefix=context.prefix,
        tokens=context.tokens,
        restore_tokens=budget.restore_tokens,
        ratio=str(budget.ratio),
        **{**source.conventions.described(), "on_tight": budget.on_tight},
        evictor=evictor,
        adapter=None if adapter is None else adapter.identity(),
        pairs=source.conventions.counted_pairs(cache, context),
        pairs_of_prefix=cache.pairs_of_prefix(context.prefix),
        pairs_held=cache.pairs,
        bytes_full=columns * 2 * shape.head_dim * element,
        bytes_held=cache.nbytes,
        seconds={phase: round(value, 4) for phase, value in source.seconds.items()},
        versions={
            "restorekv": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
            "python": platform.python_version(),
        },
        storage=storage,
        streaming=streaming,
        between=context.between,
    )
