"""Texts, questions and adapters of random weights for compressing with the small models."""

from dataclasses import fields
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from restorekv import CompressedContext, CompressionConfig, compress
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.hybrids import list_targets
from tests.helpers.models import build_model

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives there. "
    * 2
)
QUESTIONS = ["Which code?", "Who lives in the blue house, and why?", "Green?"]
TOKENS = 4  # restore tokens


CONFIG_FIELDS = {field.name for field in fields(CompressionConfig)}


def compress_with(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, text: Any, **options: Any
) -> CompressedContext:
    """Compress with options by name; those that are fields of the config are moved into it."""
    settings = {name: options.pop(name) for name in CONFIG_FIELDS & options.keys()}
    return compress(model, tokenizer, text, config=CompressionConfig(**settings), **options)


def make_small(
    tokenizer: PreTrainedTokenizerFast, family: str = "qwen3", **options: Any
) -> CompressedContext:
    model = build_model(family)
    return compress_with(
        model, tokenizer, TEXT, **{"ratio": 0.4, "adapter": make_adapter(model), **options}
    )


def make_adapter(model):
    targets = list_targets(model)
    adapter = RestoreAdapter.create(model, TOKENS, rank=2, alpha=4, seed=0, targets=targets)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return adapter
