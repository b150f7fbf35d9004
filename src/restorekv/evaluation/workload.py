"""What benchmarks measure: a model of random weights, a tokenizer of bytes, a text of exactly T tokens, all from seeds.

Nothing is downloaded: time and memory depend on shapes, not on what the weights say. `measure_apart` runs a
measurement in a process of its own, so that its memory and its warm-up are its own.
"""

import json
import os
import random
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from restorekv.errors import RestoreKVError
from restorekv.evictors import gate_file
from restorekv.evictors.gate_file import Gate, GateCard
from restorekv.model.shape import CacheShape

WARM_UP = 64  # tokens
LEARNED = {"fastkvzip": "fastkvzip", "kvzap": "kvzap-mlp"}  # evictors with a gate, and the kind of that gate
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
    """Saves random bfloat16 weights (tied embeddings, no EOS) and returns the number of parameters."""
    config = Qwen3Config(**shape, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return model.num_parameters()


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Saves and returns a tokenizer with one token per byte and a chat template."""
    alphabet = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIAL[0], chat_template=TEMPLATE)
    fast.save_pretrained(folder)
    return fast


def text_of(tokens: int, seed: int) -> str:
    """Returns words of random letters, `tokens` bytes in all; one byte is one token."""
    letters = random.Random(seed)
    words = ("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(2, 9))) for _ in range(tokens))
    return " ".join(words)[: tokens - 1] + "."


def random_gate(model: PreTrainedModel, method: str, folder: Path) -> Path:
    """Saves a gate of the published sizes: 16 dimensions and 16 sinks, or an MLP of an eighth of the width."""
    shape, generator = CacheShape.of(model), torch.Generator().manual_seed(0)
    sizes = {
        "q_norm.weight": torch.empty(16),
        "k_base": torch.empty(1, 1, 16, 1),
        "0.weight": torch.empty(shape.hidden // 8, 1),
    }
    kind, path = LEARNED[method], folder / f"{method}.safetensors"
    sizes = gate_file.shapes(kind, shape, sizes).items()
    layers = [{name: torch.randn(size, generator=generator) / 32 for name, size in sizes} for _ in range(shape.layers)]
    gate_file.write(path, Gate(layers, GateCard.of(model, kind, "none")))
    return path


def measure_apart(command: Sequence[str], job: dict, folder: Path, what: str, without: Collection[str] = ()) -> dict:
    """Returns what `command JOB` writes through `measure.serve`, run offline with the job's `threads`.

    `without` names environment variables that the process must not see. Raises RestoreKVError, with the last line of
    the process's stderr, where it fails.
    """
    job, job_file = {**job, "result": str(folder / "result.json")}, folder / "job.json"
    job_file.write_text(json.dumps(job))
    environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in environment.items() if name not in without}
    process = subprocess.run([*command, str(job_file)], capture_output=True, text=True, env=environment)
    if process.returncode:
        reason = (process.stderr.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        raise RestoreKVError(f"{what} failed ({reason}).")
    return json.loads(Path(job["result"]).read_text())
