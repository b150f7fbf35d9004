"""What benchmarks run on: a model of random weights, a tokenizer of bytes, texts of a novel, and
the description of the machine.

Nothing is downloaded: time and memory depend on shapes, not on the values of the weights.
"""

import gzip
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.measure import name_processor
from restorekv.errors import RestoreKVError
from restorekv.model.tokenize import decode_ids
from restorekv.spec import list_versions

PACKAGES = ("restorekv", "torch", "transformers", "peft", "triton")
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


def save_model(folder: Path, shape: Mapping[str, object], seed: int) -> int:
    """Save random bfloat16 weights (tied embeddings, no EOS); return the number of parameters."""
    config = Qwen3Config.from_dict(
        {
            **shape,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model.num_parameters()


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Save and return a tokenizer with one token per byte and a chat template."""
    alphabet = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Backend(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)
    return fast


def describe_machine(threads: int) -> dict:
    """Return {date, versions, processor, threads, system}, and on a GPU its name as `device`."""
    gpu = {"device": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": list_versions(PACKAGES),
        "processor": name_processor(),
        "threads": threads,
        "system": platform.platform(),
        **gpu,
    }


def load_novel() -> str:
    """Return the text of a novel that ships."""
    path = next((files("restorekv") / "tasks" / "texts" / "novels").iterdir())
    return gzip.decompress(path.read_bytes()).decode()


def check_novel(tokens: int, needed: int, what: str) -> None:
    """Refuse a benchmark that needs more tokens than the novel has.

    Args:
        tokens: The number of tokens of the novel.
        needed: The number that the benchmark needs.
        what: What it needs them for, in the words of the message.
    """
    if needed > tokens:
        raise RestoreKVError(f"The novel has {tokens:,} tokens, too few for {what}; ask for less.")


def cut_texts(tokenizer: Tokenizer, tokens: int, count: int = 1) -> list[str]:
    """Return `count` documents of `tokens` tokens each, consecutive parts of a novel."""
    ids = tokenizer.encode(load_novel())
    check_novel(len(ids), count * tokens, f"{count} text{'s' * (count != 1)} of {tokens:,}")
    return [
        decode_ids(tokenizer, ids[start : start + tokens])
        for start in range(0, count * tokens, tokens)
    ]


def make_label(*parts: str) -> str:
    """Return a file name of all parts, such as "tiny-kvzip"; a path or hub id adds its
    last part.
    """
    names = []
    for part in parts:
        last = part.rstrip("/").rsplit("/", 1)[-1]
        names.append(re.sub(r"[^\w.+=-]+", "-", last).strip("-"))
    return "-".join(names)
