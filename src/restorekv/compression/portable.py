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
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.compression import generate
from restorekv.compression.budget import from_file, to_file
from restorekv.compression.context_checks import ContradictionError, check_manifest, check_tensor, require
from restorekv.compression.context_file import Manifest, known_manifest
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.files import open_tensors, parse_json, read_tensor_bytes, replacing
from restorekv.model.load import model_fingerprint
from restorekv.model.prompt import Context, question_ids
from restorekv.model.shape import decoder
from restorekv.seal import check_seal, read_key, sealed

FORMAT, VERSION = "restorekv-portable", "1"
SHIFTABLE = ("default", "linear", "yarn", "llama3")  # kinds of RoPE whose frequencies do not change with the length
MARK = 4  # ids at the start that tell placeholders from a text
FIRST_ID = 64  # placeholders leave out the lowest ids, where control tokens often are


@dataclass(frozen=True, repr=False)
class Portable:
    """keys and values (L, H, m, D) for positions 0 to m - 1; ids (m,) int64, the placeholders that stand for them."""

    keys: Tensor
    values: Tensor
    ids: Tensor
    context: Context  # what stands around a question; its ids are the placeholders
    manifest: Manifest  # of the compressed context
    vocabulary: int  # ids that the model embeds, from which the placeholders are drawn

    def __repr__(self) -> str:
        return f"Portable({self.name}, m = {self.tokens} for T = {self.manifest.tokens:,}, {self.manifest.evictor})"

    @property
    def tokens(self) -> int:
        """m."""
        return self.keys.shape[2]

    @property
    def name(self) -> str:
        """16 hex digits that stand for the contents."""
        return digest_of(self.keys, self.values).hex()[:16]

    def cache(self) -> DynamicCache:
        """Returns a plain cache; `model.generate(**portable.inputs(...), past_key_values=portable.cache())` works."""
        plain = DynamicCache()
        for index, pair in enumerate(zip(self.keys, self.values, strict=True)):
            plain.update(*(x[None].clone() for x in pair), index)
        return plain

    def inputs(self, tokenizer: Tokenizer, question: str, answer_prefix: str = "") -> dict[str, Tensor]:
        """Returns input_ids and attention_mask (1, m + q); the answer is result[:, input_ids.shape[1]:]."""
        ids = torch.cat([self.ids[None], question_ids(tokenizer, self.context, question, answer_prefix)], -1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def ask(
        self, model: PreTrainedModel, tokenizer: Tokenizer, questions: list[str], max_new_tokens: int = 128
    ) -> list:
        """Returns the answers to questions, in batches, as `CompressedContext.ask` gives them."""
        cache = RaggedCache.whole(self.cache(), joined=False)
        return generate.ask(model, tokenizer, self.context, cache, questions, max_new_tokens)

    def save(self, path: str | Path, key: bytes | None = None) -> None:
        """Writes one safetensors file, or nothing."""
        described = {**to_file(asdict(self.manifest)), "suffix_text": self.context.suffix_text}
        described["vocabulary"] = self.vocabulary
        metadata = {"format": FORMAT, "version": VERSION, "manifest": json.dumps(described)}
        tensors = {"keys": self.keys, "values": self.values, "ids": self.ids, "suffix_ids": self.context.suffix}
        payload = sealed({name: x.cpu().contiguous() for name, x in tensors.items()}, metadata, key or read_key())
        with replacing(Path(path)) as temporary, open(temporary, "wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())


def portable(model: PreTrainedModel, context: Context, cache: RaggedCache, manifest: Manifest) -> Portable:
    """Returns the cache as a prefix of m tokens; refuses heads of different lengths, a bias and other kinds of RoPE."""
    plain = cache.to_dynamic_cache()
    keys, values = (torch.stack([getattr(layer, name)[0] for layer in plain.layers]) for name in ("keys", "values"))
    columns = keys.shape[2]
    if not columns:
        raise RestoreKVError("The cache is empty; compress the context at a higher ratio.")
    shifted = rotated(model, keys, columns - cache.get_seq_length())
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = placeholders(shifted, values, vocabulary)
    return Portable(shifted, values, ids, with_ids(context, ids), manifest, vocabulary)


def with_ids(context: Context, ids: Tensor) -> Context:
    return Context(ids[None], 0, context.suffix, context.suffix_text, context.between)


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


def digest_of(keys: Tensor, values: Tensor) -> bytes:
    """Returns the SHA-256 of keys and values."""
    sha256 = hashlib.sha256()
    for x in (keys, values):
        sha256.update(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha256.digest()


def placeholders(keys: Tensor, values: Tensor, vocabulary: int) -> Tensor:
    """Returns m ids (m,) int64: the mark of restorekv, then what follows from the contents and from nothing else."""
    count = keys.shape[2]
    contents = numbered(digest_of(keys, values), max(count - MARK, 0), vocabulary)
    return torch.tensor((mark(vocabulary) + contents)[:count])


def mark(vocabulary: int) -> list[int]:
    """Returns the MARK ids with which the placeholders of every document begin."""
    return numbered(FORMAT.encode(), MARK, vocabulary)


def numbered(seed: bytes, count: int, vocabulary: int) -> list[int]:
    """Returns `count` ids that follow from a seed."""
    raw, first = hashlib.shake_256(seed).digest(4 * count), min(FIRST_ID, vocabulary // 2)
    numbers = (int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4))
    return [first + number % (vocabulary - first) for number in numbers]


def load_portable(path: str | Path, model: PreTrainedModel | None = None, key: bytes | None = None) -> Portable:
    """Reads what `Portable.save` wrote and refuses anything else, and a model that it was not made with."""
    what = str(path)
    try:
        raw = read_tensor_bytes(Path(path), what)
        metadata, tensors = open_tensors(raw, what)
        if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
            raise CacheFileError(f"{what} is no portable cache of version {VERSION}; make it with restorekv export.")
        check_seal(raw, metadata, what, key or read_key())
        entries = parse_json(str(metadata.get("manifest")), what)
        if not isinstance(entries, dict) or not isinstance(suffix_text := entries.pop("suffix_text", None), str):
            raise CacheFileError(f"{what} has a damaged manifest; export it again.")
        vocabulary = entries.pop("vocabulary", None)
        manifest = known_manifest(from_file(entries), what)
        check_manifest(manifest)
        check_contents(tensors, manifest, vocabulary)
    except ContradictionError as error:
        raise CacheFileError(f"{what} {error}; export it again.") from None
    except CacheFileError:
        raise
    except RestoreKVError as error:
        raise CacheFileError(str(error)) from None
    context = Context(tensors["ids"][None], 0, tensors["suffix_ids"], suffix_text, manifest.between)
    if model is not None and manifest.fingerprint != model_fingerprint(model):
        raise CacheFileError(f"{what} was made with another model ({manifest.model}); load that one.")
    if model is not None and manifest.dtype != str(model.dtype).removeprefix("torch."):
        raise CacheFileError(f"{what} holds {manifest.dtype}; load the model with dtype={manifest.dtype!r}.")
    return Portable(tensors["keys"], tensors["values"], tensors["ids"], context, manifest, vocabulary)


def check_contents(tensors: dict[str, Tensor], manifest: Manifest, vocabulary: object) -> None:
    """Checks the tensors of a file against each other and against the manifest."""
    shape, dtype = manifest.shape, getattr(torch, manifest.dtype)
    require(set(tensors) == {"keys", "values", "ids", "suffix_ids"}, "has other tensors than a portable cache")
    require(type(vocabulary) is int and 2 * MARK < vocabulary < 2**31, "records a vocabulary that no model has")
    check_tensor(tensors, "ids", torch.int64, (None,))
    columns = len(tensors["ids"])
    for name in ("keys", "values"):
        check_tensor(tensors, name, dtype, (shape["layers"], shape["heads"], columns, shape["head_dim"]))
    pairs = shape["layers"] * shape["heads"] * columns
    require(columns > 0 and manifest.pairs_held == pairs, f"records {manifest.pairs_held} pairs and has {pairs}")
    own = placeholders(tensors["keys"], tensors["values"], vocabulary)
    require(tensors["ids"].equal(own), "has placeholder ids that do not follow from its contents")
    check_tensor(tensors, "suffix_ids", torch.int64, (1, None))
    known = (tensors["suffix_ids"] >= 0) & (tensors["suffix_ids"] < vocabulary)
    require(bool(known.all()), "has token ids that its vocabulary lacks")
