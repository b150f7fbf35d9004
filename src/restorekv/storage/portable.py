"""A compressed context as an ordinary prefix of m tokens, for engines that know nothing of
compressed caches.

An engine believes that m cached tokens occupy the positions 0 to m - 1 and gives the next token
position m. The pairs of a compressed context come from positions up to S + T + n - 1. RoPE depends
on differences of positions alone, so every key is rotated by the same m - (S + T + n): then the
token at position m is as far from each pair as the token after the context would be. An engine also
needs one length in every head (allocation="per-head").

The engine's prompt begins with m placeholder ids, which the model does not read. They are derived
from a hash of the cache's contents, so that an engine that caches prefixes by their ids does not
take one document for another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import seal
from restorekv.cache.dense import make_plain_cache
from restorekv.cache.ragged import RaggedCache
from restorekv.errors import CacheFileError, RestoreKVError, reraise_as
from restorekv.files import parse_path
from restorekv.generation import answers, decoding
from restorekv.generation.chat import encode_conversation
from restorekv.generation.sampling import DEFAULT_MAX_NEW_TOKENS
from restorekv.model import support
from restorekv.model.position_limits import check_question_positions
from restorekv.model.prompt import Context, encode_question
from restorekv.model.rope import shift_keys
from restorekv.model.shape import get_vocabulary_size
from restorekv.seal import FileKind
from restorekv.storage.cache_checks import (
    check_model,
    check_suffix,
    check_tensor,
    check_tokenizer,
    require,
)
from restorekv.storage.cache_file import read_with_manifest, refuse_contradictions
from restorekv.storage.manifest import Manifest

FIX = "make it with restorekv export"
KIND = FileKind("restorekv-portable", "4", "a portable cache of restorekv", FIX)
# Fewer columns have too few placeholders to distinguish documents.
MIN_COLUMNS = 12
MARK = 4  # ids at the start that distinguish placeholders from a text
FIRST_ID = 64  # placeholders leave out the lowest ids, where control tokens often are


@dataclass(frozen=True, repr=False, eq=False)
class Portable:
    """A compressed context as a cache of m tokens: keys and values (L, H, m, D), which the question
    follows at position m.
    """

    keys: Tensor
    values: Tensor
    context: Context  # what is around a question, without the text's ids
    manifest: Manifest  # of the compressed context
    vocabulary: int  # ids that the model embeds, from which the placeholders are drawn

    def __repr__(self) -> str:
        size = f"m = {self.tokens} for T = {self.manifest.tokens:,}"
        return f"Portable({self.name}, {size}, {self.manifest.evictor})"

    @property
    def tokens(self) -> int:
        """m, the tokens of the prefix."""
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
        """16 hex digits of a hash of the contents."""
        return self.digest.hex()[:16]

    @cached_property
    def ids(self) -> Tensor:
        """The placeholders (m,) int64: restorekv's mark, then ids that depend on the contents and
        the size of the vocabulary alone.
        """
        contents = make_placeholders(self.digest, max(self.tokens - MARK, 0), self.vocabulary)
        return torch.tensor((make_portable_mark(self.vocabulary) + contents)[: self.tokens])

    def make_cache(self) -> DynamicCache:
        """Return a plain cache; `model.generate(**portable.inputs(...),
        past_key_values=portable.make_cache())` works.
        """
        pairs = []
        for keys, values in zip(self.keys, self.values, strict=True):
            pairs.append((keys[None].clone(), values[None].clone()))
        return make_plain_cache(pairs)

    def inputs(
        self,
        tokenizer: Tokenizer,
        question: str,
        answer_prefix: str = "",
        turns: Sequence[tuple[str, str]] = (),
    ) -> dict[str, Tensor]:
        """Return input_ids and attention_mask (1, m + q); the answer is result[:,
        input_ids.shape[1]:].

        `turns` are earlier questions with their answers. A tokenizer or a chat template other than
        the context's is refused.
        """
        check_tokenizer("The portable cache", self.manifest, self.context, tokenizer)
        asked = encode_conversation(
            tokenizer, self.context, turns, question, answer_prefix=answer_prefix
        )
        ids = torch.cat([self.ids, asked])[None].to(self.keys.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def ask(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        questions: str | Sequence[str],
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    ) -> str | list[str]:
        """Answer one question, or several in batches, as `CompressedContext.ask` does.

        Refuse a model or tokenizer that the cache was not made with, and questions that end beyond
        the model's positions.
        """
        check_model("The portable cache", self.manifest, model)
        check_tokenizer("The portable cache", self.manifest, self.context, tokenizer)
        support.prepare_model(model)
        several = [questions] if isinstance(questions, str) else questions
        # All columns were rotated by the same amount, so the first ones are as far from the
        # question as the first tokens of the text. That distance has to fit the model's positions.
        lengths = [encode_question(tokenizer, self.context, each).shape[1] for each in several]
        firsts = [self.manifest.positions] * len(lengths)
        limits = decoding.parse_limits(max_new_tokens, len(lengths))
        check_question_positions(model, firsts, lengths, limits)
        cache = RaggedCache.from_full_cache(self.make_cache())
        said = answers.answer_greedily(
            model, tokenizer, self.context, cache, several, max_new_tokens
        )
        return said[0] if isinstance(questions, str) else said

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, or nothing."""
        description = {
            **self.manifest.to_json(),
            "suffix_text": self.context.suffix_text,
            "vocabulary": self.vocabulary,
        }
        tensors = {
            "keys": self.keys,
            "values": self.values,
            "ids": self.ids,
            "suffix_ids": self.context.suffix_ids,
        }
        with reraise_as(CacheFileError):
            seal.write_sealed(
                parse_path(path), KIND, tensors, {"manifest": json.dumps(description)}
            )


def make_portable(
    model: PreTrainedModel, context: Context, cache: RaggedCache, manifest: Manifest
) -> Portable:
    """Return the cache as a prefix of m tokens; refuse layers that no plain cache has, heads of
    different lengths, a bias, and kinds of RoPE that do not allow keys to be moved.
    """
    what = cache.find_unlike_plain()
    if what is not None:
        raise RestoreKVError(
            f"A portable cache has no layers with {what}, so caches of {type(model).__name__} "
            "cannot be exported; answer from the cache file itself, with restorekv."
        )
    # Refuses heads of different lengths and a bias, which no plain cache can hold.
    plain = cache.to_dynamic_cache()
    keys, values = (
        torch.stack([getattr(layer, name)[0] for layer in plain.layers])
        for name in ("keys", "values")
    )
    columns = keys.shape[2]
    if columns < MIN_COLUMNS:
        raise RestoreKVError(
            f"The cache has {columns} columns, and a portable one needs {MIN_COLUMNS} for "
            "placeholders that distinguish it from others; compress the context at a higher ratio."
        )
    # The next token is at m for the engine, and at S + T + n for the compressed cache.
    shifted = shift_keys(model, keys, columns - cache.get_seq_length())
    vocabulary = get_vocabulary_size(model)
    around = replace(context, ids=context.ids[:, :0], prefix_length=0)
    return Portable(shifted, values, around, manifest, vocabulary)


def make_portable_mark(vocabulary: int) -> list[int]:
    """Return the MARK ids with which the placeholders of every document begin."""
    return make_placeholders(KIND.format.encode(), MARK, vocabulary)


def make_placeholders(seed: bytes, count: int, vocabulary: int) -> list[int]:
    """Return `count` ids that are derived from a seed."""
    raw = hashlib.shake_256(seed).digest(4 * count)
    # A tiny vocabulary has no 64 ids to spare.
    first = min(FIRST_ID, vocabulary // 2)
    numbers = (int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4))
    return [first + number % (vocabulary - first) for number in numbers]


def load_portable(path: str | Path, model: PreTrainedModel | None = None) -> Portable:
    """Read what `Portable.save` wrote, onto the model's device; refuse anything else, and a
    different model.
    """
    with refuse_contradictions(path, "export it again"):
        extra = {"suffix_text": str, "vocabulary": int}
        manifest, others, tensors = read_with_manifest(path, KIND, extra)
        check_contents(tensors, manifest, others["vocabulary"], others["suffix_text"])
        # A file holds no ids of the text, only the placeholders.
        none = torch.zeros(1, 0, dtype=torch.long)
        context = Context(none, 0, tensors["suffix_ids"], others["suffix_text"], manifest.separator)
        stored = Portable(
            tensors["keys"], tensors["values"], context, manifest, others["vocabulary"]
        )
        # With the ids of a different document, an engine would reuse that document's pairs.
        require(
            tensors["ids"].equal(stored.ids),
            "has placeholder ids that do not follow from its contents",
        )
    if model is None:
        return stored
    check_model(path, manifest, model)
    return replace(stored, keys=stored.keys.to(model.device), values=stored.values.to(model.device))


def check_contents(
    tensors: dict[str, Tensor], manifest: Manifest, vocabulary: int, suffix_text: str
) -> None:
    """Check the tensors of a file against each other and against the manifest."""
    shape = manifest.shape
    dtype = getattr(torch, manifest.dtype)
    require(
        set(tensors) == {"keys", "values", "ids", "suffix_ids"},
        "has other tensors than a portable cache",
    )
    require(2 * MARK < vocabulary < 2**31, "records a vocabulary that no model has")
    check_tensor(tensors, "ids", torch.int64, (None,))
    # The number of placeholder ids is m.
    columns = len(tensors["ids"])
    for name in ("keys", "values"):
        check_tensor(
            tensors, name, dtype, (shape["layers"], shape["heads"], columns, shape["head_dim"])
        )
    pairs = shape["layers"] * shape["heads"] * columns
    require(
        columns > 0 and manifest.pairs_held == pairs,
        f"records {manifest.pairs_held} pairs and has {pairs}",
    )
    check_tensor(tensors, "suffix_ids", torch.int64, (1, None))
    check_suffix(suffix_text, tensors["suffix_ids"])
    known = (tensors["suffix_ids"] >= 0) & (tensors["suffix_ids"] < vocabulary)
    require(bool(known.all()), "has token ids that its vocabulary lacks")
