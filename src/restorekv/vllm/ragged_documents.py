"""Cache files (.rkv) as documents for vLLM: their placeholders, and their pairs head by head.

A prompt names a document by beginning with PLACEHOLDERS ids that follow from a hash of the
document's contents. The ids fill whole blocks of vLLM's pool, into which nothing is written: all
pairs, those of the restore cache too, lie in a `PagePool`. So the question's first token has
position PLACEHOLDERS, and all keys are rotated so that the document ends right before it. That
changes no logit, because RoPE depends on differences of positions alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.model.rope import shift_keys
from restorekv.storage import cache_file
from restorekv.storage.cache_file import CacheFile
from restorekv.storage.portable import MARK, make_placeholders
from restorekv.vllm.page_pool import DocumentPairs

PLACEHOLDERS = 32  # ids of a document in a prompt: whole blocks of 16 or 32 tokens
ID_LIMIT = 256  # placeholders are below it, so that every vocabulary has them
KIND = b"restorekv-ragged-4"  # the mark at the start of placeholders is derived from it
# Names in configs for the size of an expert.
EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")
# Names in configs for the number of experts, and how many are used at once.
ONE_EXPERT = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
)


@dataclass(frozen=True)
class RaggedIdentity:
    """What the scheduler knows of a cache file: everything but its pairs.

    name: 16 hex digits of the contents; ids: the placeholders; lengths (L, H): pairs of every head,
    the restore cache included.
    """

    name: str
    ids: tuple[int, ...]
    lengths: Tensor


def make_ragged_mark() -> list[int]:
    """Return the MARK ids with which the placeholders of every cache file begin."""
    return make_placeholders(KIND, MARK, ID_LIMIT)


def make_end(count: int) -> tuple[int, ...]:
    """Return the MARK ids with which the placeholders of `count` documents end.

    A prompt that was cut at its beginning is recognized by them.
    """
    return tuple(make_placeholders(KIND + f" {count}".encode(), MARK, ID_LIMIT))


def identify(file: CacheFile) -> RaggedIdentity:
    """Return the name, the placeholders and the lengths of a cache file."""
    # The hash covers the tensors in the order of their names and, of the manifest, only the
    # question's position. So files with the same content are one document, whatever their paths.
    sha256 = hashlib.sha256(KIND)
    sha256.update(f"{file.manifest.positions} positions".encode())
    for name, tensor in sorted(file.tensors.items()):
        sha256.update(name.encode())
        sha256.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    contents = make_placeholders(sha256.digest(), PLACEHOLDERS - 2 * MARK, ID_LIMIT)
    return RaggedIdentity(
        name=sha256.hexdigest()[:16],
        ids=(*make_ragged_mark(), *contents, *make_end(1)),
        lengths=file.tensors["offsets"].diff() + file.manifest.restore_tokens,
    )


def build_rope_model(config: PretrainedConfig) -> PreTrainedModel:
    """Return a tiny random model that rotates keys exactly as the one of `config` does.

    `shift_keys` needs a transformers model, and checks on it that all layers rotate in the same
    way; an engine of vLLM has none.
    """
    # What decides the rotation (kind of RoPE, base, scaling, head dim) stays as in the config;
    # whatever costs memory becomes tiny.
    small = type(config).from_dict(config.to_dict())
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    changes = {
        "hidden_size": head_dim,
        "intermediate_size": head_dim,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "vocab_size": 64,
        "pad_token_id": None,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    for name, value in changes.items():
        setattr(small, name, value)
    # A mixture of experts gets a single expert; other configs have no such settings.
    for name in (*EXPERT_SIZES, *ONE_EXPERT):
        if isinstance(getattr(small, name, None), int):
            # Kernels for experts need sizes that are whole vectors.
            setattr(small, name, head_dim if name in EXPERT_SIZES else 1)
    # The engine's own random state stays as if nothing had been drawn here.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()


def load_file(path: Path, name: str) -> CacheFile:
    """Read a known cache file once more, for its pairs.

    Raises:
        CacheFileError: The file is damaged, or by now holds a document other than `name`.
    """
    file = cache_file.open_cache_file(path)
    if identify(file).name != name:
        raise CacheFileError(f"{path} was replaced by a different document; query that one.")
    return file


def gather_pairs(
    cache: RaggedCache, rope_model: PreTrainedModel, heads: slice, dtype: torch.dtype
) -> DocumentPairs:
    """Return the pairs of some KV heads, with keys moved to end right before PLACEHOLDERS.

    Args:
        cache: Context and restore cache of a document.
        rope_model: Rotates keys as the engine's model does (`build_rope_model`).
        heads: The KV heads that a tensor parallel rank holds.
        dtype: The engine's dtype.

    Raises:
        RestoreKVError: The cache has a bias on its logits (Attention Matching), or numbers that
            `dtype` cannot hold.
    """
    # The text ends where the placeholders end: its last pair is right before the question.
    distance = PLACEHOLDERS - cache.get_seq_length()
    keys = []
    values = []
    lengths = []
    for layer in cache.full_attention:
        if layer.bias is not None:
            raise RestoreKVError(
                "Caches of Attention Matching add a bias to logits, which vLLM's attention cannot; "
                "compress with another evictor, such as kvzip."
            )
        rows = [_get_head_pairs(layer, head) for head in range(layer.heads)[heads]]
        layer_keys = torch.cat([row_keys for row_keys, _ in rows])
        layer_values = torch.cat([row_values for _, row_values in rows])
        keys.append(shift_keys(rope_model, layer_keys, distance).to(dtype))
        values.append(layer_values.to(dtype))
        lengths.append(torch.tensor([len(row_keys) for row_keys, _ in rows]))
        # float16 holds no number above 65,504, and a NaN would spread to every answer in the batch.
        if not bool(keys[-1].isfinite().all() and values[-1].isfinite().all()):
            raise RestoreKVError(
                f"The document holds numbers that are too large for {dtype}; "
                "serve the model in a different dtype."
            )
    return DocumentPairs(keys, values, torch.stack(lengths))


def _get_head_pairs(layer: RaggedLayer, head: int) -> tuple[Tensor, Tensor]:
    """Return keys and values (N, D) of a head: its context, then its restore cache."""
    first, end = layer.bounds[head], layer.bounds[head + 1]
    # Slices of an 8-bit context are in the model's dtype.
    keys = torch.cat([layer.context_keys[first:end], layer.restore_keys[0, head]])
    values = torch.cat([layer.context_values[first:end], layer.restore_values[0, head]])
    return keys, values
