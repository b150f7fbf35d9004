"""A compressed context as an ordinary prefix of m tokens, for engines that know nothing of compressed caches.

An engine believes that m cached tokens occupy the positions 0 to m - 1 and gives the next token position m. The pairs
of a compressed context come from positions up to S + T + n - 1. RoPE depends on differences of positions alone, so
rotating every key by the same m - (S + T + n) puts all of them where the engine expects them. That needs one length in
every head (allocation="per-head"). The engine's prompt begins with m placeholder ids, which nobody reads: they follow
from a hash of the document, so that no two documents share a prefix.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import seal
from restorekv.cache.ragged import RaggedCache
from restorekv.compression import answers
from restorekv.compression.chat import conversation_ids
from restorekv.compression.context_checks import check_around, check_model, check_tensor, require
from restorekv.compression.context_file import Manifest, read_with_manifest, refusing
from restorekv.errors import CacheFileError, RestoreKVError, raised_as
from restorekv.model import support
from restorekv.model.prompt import Context
from restorekv.model.shape import decoder
from restorekv.seal import FileKind

FIX = "make it with restorekv export"
KIND = FileKind("restorekv-portable", "2", "a portable cache of restorekv", FIX)
SHIFTABLE = ("default", "linear", "yarn", "llama3")  # kinds of RoPE whose frequencies do not change with the length
MARK = 4  # ids at the start that tell placeholders from a text
FIRST_ID = 64  # placeholders leave out the lowest ids, where control tokens often are


@dataclass(frozen=True, repr=False, eq=False)
class Portable:
    """keys and values (L, H, m, D) for positions 0 to m - 1."""

    keys: Tensor
    values: Tensor
    context: Context  # what stands around a question, without the text's ids
    manifest: Manifest  # of the compressed context
    vocabulary: int  # ids that the model embeds, from which the placeholders are drawn

    def __repr__(self) -> str:
        return f"Portable({self.name}, m = {self.tokens} for T = {self.manifest.tokens:,}, {self.manifest.evictor})"

    @property
    def tokens(self) -> int:
        """m."""
        return self.keys.shape[2]

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of keys and values."""
        sha256 = hashlib.sha256()
        for x in (self.keys, self.values):
            sha256.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return sha256.digest()

    @property
    def name(self) -> str:
        """16 hex digits that stand for the contents."""
        return self.digest.hex()[:16]

    @cached_property
    def ids(self) -> Tensor:
        """The placeholders (m,) int64: restorekv's mark, then what follows from the contents and from nothing else."""
        contents = numbered(self.digest, max(self.tokens - MARK, 0), self.vocabulary)
        return torch.tensor((mark(self.vocabulary) + contents)[: self.tokens])

    def cache(self) -> DynamicCache:
        """Returns a plain cache; `model.generate(**portable.inputs(...), past_key_values=portable.cache())` works."""
        plain = DynamicCache()
        for index, pair in enumerate(zip(self.keys, self.values, strict=True)):
            plain.update(*(x[None].clone() for x in pair), index)
        return plain

    def inputs(
        self, tokenizer: Tokenizer, question: str, answer_prefix: str = "", turns: Sequence[tuple[str, str]] = ()
    ) -> dict[str, Tensor]:
        """Returns input_ids and attention_mask (1, m + q); the answer is result[:, input_ids.shape[1]:].

        `turns` are earlier questions with their answers.
        """
        asked = conversation_ids(tokenizer, self.context, turns, question, answer_prefix=answer_prefix)
        ids = torch.cat([self.ids, asked])[None].to(self.keys.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def ask(
        self, model: PreTrainedModel, tokenizer: Tokenizer, questions: str | Sequence[str], max_new_tokens: int = 128
    ) -> str | list[str]:
        """Returns the answer to a question, or those to several, in batches, as `CompressedContext.ask` gives them."""
        support.install(model)
        cache, several = RaggedCache.whole(self.cache()), [questions] if isinstance(questions, str) else questions
        said = answers.ask(model, tokenizer, self.context, cache, several, max_new_tokens)
        return said[0] if isinstance(questions, str) else said

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, or nothing."""
        beside = {"suffix_text": self.context.suffix_text, "vocabulary": self.vocabulary}
        described = {**self.manifest.described(), **beside}
        tensors = {"keys": self.keys, "values": self.values, "ids": self.ids, "suffix_ids": self.context.suffix}
        with raised_as(CacheFileError):
            seal.write(Path(path), KIND, tensors, {"manifest": json.dumps(described)})


def portable(model: PreTrainedModel, context: Context, cache: RaggedCache, manifest: Manifest) -> Portable:
    """Returns the cache as a prefix of m tokens; refuses heads of different lengths, a bias and other kinds of RoPE."""
    plain = cache.to_dynamic_cache()
    keys, values = (torch.stack([getattr(layer, name)[0] for layer in plain.layers]) for name in ("keys", "values"))
    columns = keys.shape[2]
    if not columns:
        raise RestoreKVError("The cache is empty; compress the context at a higher ratio.")
    shifted = rotated(model, keys, columns - cache.get_seq_length())
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return Portable(shifted, values, replace(context, ids=context.ids[:, :0], prefix=0), manifest, vocabulary)


def rotated(model: PreTrainedModel, keys: Tensor, positions: int) -> Tensor:
    """Returns keys (..., D) as if their tokens stood `positions` later, computed in float64."""
    rotary = getattr(decoder(model), "rotary_emb", None)
    kind = getattr(rotary, "rope_type", None)
    if kind not in SHIFTABLE:
        raise RestoreKVError(
            f"Keys of a model with RoPE of the kind {kind!r} cannot be moved; use one of {', '.join(SHIFTABLE)}."
        )
    turned = turn(keys.double(), rotary.inv_freq.double() * positions)
    check_layout(model, rotary)
    support.check_moves(model, lambda own, count: turn(own.double(), rotary.inv_freq.double() * count))
    return turned.to(keys.dtype)


def turn(keys: Tensor, angles: Tensor) -> Tensor:
    """Rotates the first 2 * len(angles) numbers of keys (..., D), number i together with number i + len(angles)."""
    cos, sin = angles.cos().to(keys.device), angles.sin().to(keys.device)
    first, second, rest = keys.split([len(angles), len(angles), keys.shape[-1] - 2 * len(angles)], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def check_layout(model: PreTrainedModel, rotary: torch.nn.Module) -> None:
    """Refuses a model that pairs the numbers of a key in another way than `turn`."""
    own = getattr(sys.modules[type(rotary).__module__], "apply_rotary_pos_emb", None)
    where = {"device": rotary.inv_freq.device, "dtype": torch.float64}
    keys = torch.linspace(-1, 1, 2 * len(rotary.inv_freq), **where)[None, None, None]
    cos, sin = (x / rotary.attention_scaling for x in rotary(keys, torch.tensor([[3]], device=keys.device)))
    theirs = own(keys, keys, cos, sin)[1] if own else None
    if theirs is None or not torch.allclose(theirs, turn(keys, rotary.inv_freq.double() * 3), atol=1e-4):
        raise RestoreKVError(f"{type(model).__name__} rotates keys in a way of its own, so they cannot be moved.")


def mark(vocabulary: int) -> list[int]:
    """Returns the MARK ids with which the placeholders of every document begin."""
    return numbered(KIND.format.encode(), MARK, vocabulary)


def numbered(seed: bytes, count: int, vocabulary: int) -> list[int]:
    """Returns `count` ids that follow from a seed."""
    raw, first = hashlib.shake_256(seed).digest(4 * count), min(FIRST_ID, vocabulary // 2)
    numbers = (int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4))
    return [first + number % (vocabulary - first) for number in numbers]


def load_portable(path: str | Path, model: PreTrainedModel | None = None) -> Portable:
    """Reads what `Portable.save` wrote, onto the model's device; refuses anything else, and another model."""
    with refusing(path, "export it again"):
        extra = {"suffix_text": str, "vocabulary": int}
        manifest, others, tensors = read_with_manifest(path, KIND, extra)
        check_contents(tensors, manifest, others["vocabulary"], others["suffix_text"])
        none = torch.zeros(1, 0, dtype=torch.long)
        context = Context(none, 0, tensors["suffix_ids"], others["suffix_text"], manifest.between)
        stored = Portable(tensors["keys"], tensors["values"], context, manifest, others["vocabulary"])
        require(tensors["ids"].equal(stored.ids), "has placeholder ids that do not follow from its contents")
    if model is None:
        return stored
    check_model(path, manifest, model)
    return replace(stored, keys=stored.keys.to(model.device), values=stored.values.to(model.device))


def check_contents(tensors: dict[str, Tensor], manifest: Manifest, vocabulary: int, suffix_text: str) -> None:
    """Checks the tensors of a file against each other and against the manifest."""
    shape, dtype = manifest.shape, getattr(torch, manifest.dtype)
    require(set(tensors) == {"keys", "values", "ids", "suffix_ids"}, "has other tensors than a portable cache")
    require(2 * MARK < vocabulary < 2**31, "records a vocabulary that no model has")
    check_tensor(tensors, "ids", torch.int64, (None,))
    columns = len(tensors["ids"])
    for name in ("keys", "values"):
        check_tensor(tensors, name, dtype, (shape["layers"], shape["heads"], columns, shape["head_dim"]))
    pairs = shape["layers"] * shape["heads"] * columns
    require(columns > 0 and manifest.pairs_held == pairs, f"records {manifest.pairs_held} pairs and has {pairs}")
    check_tensor(tensors, "suffix_ids", torch.int64, (1, None))
    check_around(suffix_text, tensors["suffix_ids"])
    known = (tensors["suffix_ids"] >= 0) & (tensors["suffix_ids"] < vocabulary)
    require(bool(known.all()), "has token ids that its vocabulary lacks")
