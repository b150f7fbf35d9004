"""Several cache files in one request: their placeholders, and their pairs as one cache.

The placeholders of a composition fill as many positions as those of one document: a mark, a hash
of the documents' names, a short form of each name, as much as two ids can hold, and an end that
says how many there are. The store looks up the names with these short forms, and the hash decides
which of them are meant. So the prompt alone tells the connector which documents it asks, and two
requests share their first block in vLLM's pool only if they ask the same documents in the same
order. The pairs are those that `restorekv.compose` makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from transformers import PreTrainedModel

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.growing import compose_caches
from restorekv.errors import RestoreKVError
from restorekv.many_contexts import refuse_unlike
from restorekv.seal import short_hash
from restorekv.storage.cache_file import CacheFile
from restorekv.storage.manifest import Manifest
from restorekv.storage.portable import FIRST_ID, MARK, make_placeholders
from restorekv.vllm.ragged_documents import ID_LIMIT, PLACEHOLDERS, make_end

KIND = b"restorekv-composition-3"  # the mark at the start of placeholders is derived from it
MAX_DOCUMENTS = 10  # in one request
DIGITS = 2  # ids in the short form of a name
# In a store of 50,000 documents, two or three names share a short form, so that ten short forms can
# mean about 5,000 lists of names.
MAX_COMBINATIONS = 100_000

# The number of documents by the end of their placeholders.
COUNTS = {make_end(count): count for count in range(2, MAX_DOCUMENTS + 1)}

ShortName = tuple[int, ...]  # the short form of a name: DIGITS ids


@dataclass(frozen=True)
class PartFacts:
    """What decides whether a cache file can be composed with others, and how long the result is.

    prefix: ids of the chat prefix; prefix_lengths (L, H): pairs of every head that came from it.
    """

    manifest: Manifest
    prefix: tuple[int, ...]
    prefix_lengths: Tensor


def describe_part(file: CacheFile) -> PartFacts:
    """Return the facts of a cache file that a composition needs."""
    prefix = file.context.prefix_length
    lengths = []
    for layer in file.make_cache().full_attention:
        # Eviction may have dropped pairs of the prefix too, so they are counted head by head.
        prefix_heads = layer.row_heads[layer.positions < prefix]
        lengths.append(torch.bincount(prefix_heads, minlength=layer.heads))
    return PartFacts(
        manifest=file.manifest,
        prefix=tuple(file.context.ids[0, :prefix].tolist()),
        prefix_lengths=torch.stack(lengths),
    )


def make_composition_mark() -> list[int]:
    """Return the MARK ids with which the placeholders of every composition begin."""
    return make_placeholders(KIND, MARK, ID_LIMIT)


def name_composition(names: Sequence[str]) -> str:
    """Return the name of the composition of documents with these names, in this order."""
    return short_hash(KIND + " ".join(names).encode())


def refuse_wrong_number(names: Sequence[str]) -> None:
    """Raise RestoreKVError if there are too few or too many documents."""
    if not 2 <= len(names) <= MAX_DOCUMENTS:
        raise RestoreKVError(
            f"A request can be about 2 to {MAX_DOCUMENTS} documents together, not {len(names)}; "
            "join more with restorekv compose."
        )


def make_ids(names: Sequence[str]) -> tuple[int, ...]:
    """Return the placeholders of a composition.

    Raises:
        RestoreKVError: There are too few or too many documents.
    """
    refuse_wrong_number(names)
    digits: list[int] = []
    for name in names:
        digits += shorten_name(name)
    # Compositions of few documents fill as many positions as those of many.
    room = PLACEHOLDERS - 2 * MARK - len(digits)
    hashed = make_placeholders(KIND + " ".join(names).encode(), room, ID_LIMIT)
    return (*make_composition_mark(), *hashed, *digits, *make_end(len(names)))


def shorten_name(name: str) -> ShortName:
    """Return the short form of a document's name, which other names may share.

    It holds the lowest digits of the name, read as a number, in a base of the ids that
    placeholders may use.
    """
    number = int(name, 16)
    base = ID_LIMIT - FIRST_ID
    digits = []
    for _ in range(DIGITS):
        digits.append(FIRST_ID + number % base)
        number //= base
    return tuple(digits)


def read_short_names(ids: Sequence[int]) -> list[ShortName] | None:
    """Return the short names in a prompt's placeholders; None if they are not a composition's.

    Raises:
        RestoreKVError: The placeholders are damaged.
    """
    if list(ids[:MARK]) != make_composition_mark():
        return None
    # From here on the prompt claims to be a composition; anything wrong with it is an error.
    own = tuple(ids[:PLACEHOLDERS])
    count = COUNTS.get(own[PLACEHOLDERS - MARK :])
    if count is None:
        raise RestoreKVError(
            "The prompt begins with damaged placeholders of several documents; make it with "
            "restorekv.vllm.prompt."
        )
    end = PLACEHOLDERS - MARK
    return [own[start : start + DIGITS] for start in range(end - count * DIGITS, end, DIGITS)]


def find_names(
    ids: Sequence[int], short_names: Sequence[ShortName], known: Iterable[str]
) -> list[str] | None:
    """Return the names of a prompt's documents; None if some of them are not known.

    Args:
        ids: The prompt's ids.
        short_names: What `read_short_names` read from it.
        known: The names of all documents of a store.

    Raises:
        RestoreKVError: The store has too many documents to find out which ones are meant.
    """
    names_by_ids: dict[ShortName, list[str]] = {}
    for name in sorted(known):
        names_by_ids.setdefault(shorten_name(name), []).append(name)
    candidates = [names_by_ids.get(short_name, []) for short_name in short_names]
    if math.prod(map(len, candidates)) > MAX_COMBINATIONS:
        raise RestoreKVError(
            "The store has too many documents to query several together; query fewer, or join them "
            "with restorekv compose."
        )
    own = tuple(ids[:PLACEHOLDERS])
    for names in product(*candidates):
        # Only the right names reproduce the hash in the prompt.
        if make_ids(names) == own:
            return list(names)
    return None


def refuse_unlike_parts(parts: Sequence[PartFacts]) -> None:
    """Raise RestoreKVError for documents that `restorekv.compose` does not join."""
    first = parts[0]
    refuse_unlike([part.manifest for part in parts])
    for part in parts:
        if part.manifest.fingerprint != first.manifest.fingerprint:
            raise RestoreKVError(
                "The documents were made with different models; a request must be about documents "
                "of one model."
            )
        if part.manifest.template != first.manifest.template or part.prefix != first.prefix:
            raise RestoreKVError(
                "Only documents with the same chat prefix can be queried together; compress them "
                "with the same system text."
            )
        if part.manifest.offset:
            raise RestoreKVError(
                "Only documents of evictors without an offset can be queried together; compress "
                "the texts with a different evictor."
            )


def count_pairs(lengths: Sequence[Tensor], parts: Sequence[PartFacts]) -> Tensor:
    """Return the pairs (L, H) of a composition, which keeps only the first document's chat prefix.

    Args:
        lengths: (L, H) of every document, its restore cache included.
        parts: The documents.
    """
    # All documents have the same prefix, which must not be read twice.
    total = lengths[0].clone()
    for own, part in zip(lengths[1:], parts[1:], strict=True):
        total += own - part.prefix_lengths
    return total


def count_taken_positions(parts: Sequence[PartFacts]) -> int:
    """Return how many positions a composition takes.

    They are those of the chat prefix, of all texts, and of the restore tokens of the last document,
    which stay after its text.
    """
    last = parts[-1].manifest
    return last.prefix + sum(part.manifest.tokens for part in parts) + last.restore_tokens


def compose_files(files: Sequence[CacheFile], rope_model: PreTrainedModel) -> RaggedCache:
    """Return the cache that `restorekv.compose` makes of cache files.

    Args:
        files: The cache files, in the order of their texts.
        rope_model: Rotates keys as the engine's model does (`ragged_documents.build_rope_model`).
    """
    refuse_unlike_parts([describe_part(file) for file in files])
    parts = [(file.context, file.make_cache()) for file in files]
    _, cache = compose_caches(rope_model, parts)
    cache.quantize(files[0].manifest.kv_dtype)
    return cache
