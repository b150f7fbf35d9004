"""Tiny random models of both families and a tokenizer, made in memory."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from restorekv.cache.multi_context import fork_caches
from restorekv.generation import decoding
from restorekv.model import attention

VOCABULARY = 320
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    # Large weights make attention and logits far from uniform, so that a wrong pair shows.
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
}
# Some of its layers have a window that is shorter than most texts of the tests.
HYBRID = {
    "gemma3": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
        },
    ),
}


# For tests that take seconds: one family in `make test`, the other in the nightly run.
ONE_FAMILY = ["llama", pytest.param("qwen3", marks=pytest.mark.slow)]


def build_model(family: str, seed: int = 0, **overrides: object) -> PreTrainedModel:
    """Return a random float32 model with restorekv's attention; `overrides` go into its config."""
    config_class, model_class, extra = {**FAMILIES, **HYBRID}[family]
    torch.manual_seed(seed)
    model = model_class._from_config(
        config_class(**{**SHAPE, **extra, **overrides}), attn_implementation=attention.NAME
    )
    return model.float().eval().requires_grad_(False)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and a few words, with ChatML's control tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the code of the red house is seven; who lives in the blue house?"] * 4, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=TEMPLATE,
    )


def greedy(model, caches, prompts, limits, stops, graph=False) -> list[list[int]]:
    """Return the greedy ids of each row, its last EOS included; a row is a cache and a
    prompt (q,).
    """
    answers = [[] for _ in prompts]
    padded = decoding.pad_prompts(model, caches, prompts)
    forks = fork_caches(caches, [len(prompt) for prompt in prompts])
    for row, token in decoding.decode_batch(model, forks, padded, limits, stops, graph=graph):
        answers[row].append(token)
    return answers
