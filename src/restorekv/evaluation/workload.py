"""What both sides are measured on: a model of random weights, a tokenizer of bytes, and a text of exactly T tokens.

Weights, text and tokenizer come from a seed, so nothing is downloaded; time and memory depend on shapes, not on what
the weights say.
"""

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from restorekv.evictors import gate_file
from restorekv.evictors.gate_file import Gate, GateCard
from restorekv.model.shape import CacheShape

WARM_UP = 64  # tokens
LEARNED = {"fastkvzip": "fastkvzip", "kvzap": "kvzap-mlp"}  # evictors with a gate, and its kind
SHAPE = {  # of Qwen3-0.6B
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_model(folder: Path, shape: dict[str, object], seed: int) -> int:
    """Random bfloat16 weights as safetensors; returns the number of parameters. Tied embeddings, no EOS."""
    config = Qwen3Config(**shape, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model.num_parameters()


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """One token per byte, and a chat template."""
    alphabet = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], chat_template=TEMPLATE)
    made.save_pretrained(folder)
    return made


def text_of(tokens: int, seed: int) -> str:
    """Words of random letters; one byte is one token."""
    letters = random.Random(seed)
    words = ("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(2, 9))) for _ in range(tokens))
    return " ".join(words)[: tokens - 1] + "."


def random_gate(model: PreTrainedModel, method: str, folder: Path) -> Path:
    """A gate of the published sizes: 16 dimensions and 16 sinks, or an MLP of an eighth of the width."""
    shape, generator = CacheShape.of(model), torch.Generator().manual_seed(0)
    sizes = {
        "q_norm.weight": torch.empty(16),
        "k_base": torch.empty(1, 1, 16, 1),
        "0.weight": torch.empty(shape.hidden // 8, 1),
    }
    kind, path = LEARNED[method], folder / f"{method}.safetensors"
    wanted = gate_file.shapes(kind, shape, sizes).items()
    layers = [{name: torch.randn(size, generator=generator) / 32 for name, size in wanted} for _ in range(shape.layers)]
    gate_file.write(path, Gate(layers, GateCard.of(model, kind, "none")))
    return path
