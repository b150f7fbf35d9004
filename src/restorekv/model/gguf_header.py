"""The check of whether the header of a GGUF file can be true, before a parser believes its counts.

Layout: magic, version, number of tensors, number of fields; the fields, each with a key, a type and
a value; of every tensor its name, dimensions, type and offset; then, aligned, the tensors. A false
count takes an attacker 8 bytes, and parsers allocate memory for whatever it says. Here every count
is compared with the bytes that are left, and nothing is kept but what later checks need.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from restorekv.errors import ModelError, RestoreKVError
from restorekv.files import open_with_size
from restorekv.size_limits import LAYERS, WIDTH

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Limits. Files with all layers of the largest models have some 60 fields and 2,000 tensors.
FIELDS = 10_000
TENSORS = 1 << 16
KEY_BYTES = 1 << 16
TEXT_BYTES = 1 << 20
LISTED = 4096  # elements of an array outside of the tokenizer, such as a number for each layer
# Elements of one array of the tokenizer, and of all arrays; Gemma has 514,906 and 1.3 million.
WORDS = 1 << 20
ELEMENTS = 1 << 21
DIMENSIONS = 4
# types of values; the others are numbers, which have these letters in `struct`
TEXT = 8
ARRAY = 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# Fields that say how large a model is; none of them exceeds the largest dimension of its weights.
SIZES = (
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "expert_count",
    "expert_feed_forward_length",
    "vocab_size",
)
Dimensions = tuple[int, ...]


class Cursor:
    """A reader that goes through a file from its start; it raises ValueError before its end would
    be passed.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file = file
        # GGUF's numbers are little-endian, unless the version says otherwise.
        self.left = size
        self.order = "<"

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        # Claimed before it is read, so that a count larger than the rest of the file fails here.
        self.claim(count)
        raw = self.file.read(count)
        if len(raw) != count:
            raise ValueError("it is cut short")
        return raw

    def skip(self, count: int) -> None:
        self.claim(count)
        self.file.seek(count, 1)

    def claim(self, count: int) -> None:
        """Count bytes as read; refuse more than are left."""
        if count > self.left:
            raise ValueError("it is cut short, or one of its counts is wrong")
        self.left -= count

    def number(self, letter: str) -> int | float | bool:
        layout = struct.Struct(self.order + letter)
        return layout.unpack(self.take(layout.size))[0]

    def count(self, what: str, limit: int) -> int:
        """Return the next number, a count of what `what` names; refuse more than `limit`."""
        found = int(self.number("Q"))
        if found > limit:
            raise ValueError(f"it counts {found:,} {what}, and such files have at most {limit:,}")
        return found

    def text(self, limit: int = TEXT_BYTES) -> bytes:
        return self.take(self.count("bytes in a text", min(limit, self.left)))

    def skip_text(self) -> None:
        self.skip(self.count("bytes in a text", min(TEXT_BYTES, self.left)))


def check_header(path: Path) -> None:
    """Refuse a header that does not fit its file, or describes a model that the file lacks."""
    with open_with_size(path, f"The GGUF file {path}") as (file, size):
        cursor = Cursor(file, size)
        try:
            if cursor.take(len(MAGIC)) != MAGIC:
                raise ValueError("it does not begin with GGUF")
            version = int(cursor.number("I"))
            if version & 0xFFFF == 0:  # written on a machine with the other order of bytes
                cursor.order = ">"
                version = int.from_bytes(version.to_bytes(4, "little"), "big")
            if version not in VERSIONS:
                raise ValueError(
                    f"it has version {version}, and known are {' and '.join(map(str, VERSIONS))}"
                )
            # A tensor or a field takes at least some bytes of the header, so a count beyond the
            # bytes that are left is wrong.
            tensors = cursor.count("tensors", min(TENSORS, cursor.left))
            fields = cursor.count("fields", min(FIELDS, cursor.left))
            known = _read_fields(cursor, fields)
            shapes = _read_tensors(cursor, tensors, size, known)
            _check_sizes(known, shapes)
        except ValueError as error:
            if isinstance(error, RestoreKVError):
                raise
            raise ModelError(
                f"The GGUF file {path} is damaged ({error}); fetch it again."
            ) from error


def _read_fields(cursor: Cursor, count: int) -> dict[str, object]:
    """Return the fields that are numbers or texts (their first KEY_BYTES), and the lengths of
    arrays as `KEY[]`.
    """
    known: dict[str, object] = {}
    elements = 0
    for _ in range(count):
        key = cursor.text(KEY_BYTES).decode("utf-8", "replace")
        # A parser would keep the last one, and checks would have seen the first.
        if key in known or f"{key}[]" in known:
            raise ValueError("a field is in it twice")
        kind = int(cursor.number("I"))
        if kind == TEXT:
            known[key] = cursor.text()[:KEY_BYTES].decode("utf-8", "replace")
        elif kind == ARRAY:
            # The tokenizer's arrays have an element per token, others one per layer at most.
            limit = WORDS if key.startswith("tokenizer.") else LISTED
            length = _skip_array(cursor, limit)
            known[f"{key}[]"] = length
            elements += length
            if elements > ELEMENTS:
                raise ValueError(f"its arrays have more than {ELEMENTS:,} elements")
        elif kind in SCALARS:
            known[key] = cursor.number(SCALARS[kind])
        else:
            raise ValueError(f"it has a field of the unknown type {kind}")
    return known


def _skip_array(cursor: Cursor, limit: int) -> int:
    """Go to the end of an array and return the number of its elements."""
    kind = int(cursor.number("I"))
    length = cursor.count("elements in an array", limit)
    if kind == TEXT:
        # Each text has its own length; numbers all have the same one.
        for _ in range(length):
            cursor.skip_text()
    elif kind in SCALARS:
        cursor.skip(length * struct.calcsize("=" + SCALARS[kind]))
    else:
        raise ValueError(f"it has an array of the type {kind}")
    return length


def _read_tensors(
    cursor: Cursor, count: int, size: int, known: Mapping[str, object]
) -> dict[str, Dimensions]:
    """Return the tensors' dimensions by name; refuse tensors that the file has no room for."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    shapes: dict[str, Dimensions] = {}
    ends = []
    total = 0
    for _ in range(count):
        name = cursor.text(KEY_BYTES).decode("utf-8", "replace")
        rank = int(cursor.number("I"))
        if not 1 <= rank <= DIMENSIONS or name in shapes:
            raise ValueError("a tensor is in it twice, or has too many dimensions")
        shapes[name] = tuple(int(cursor.number("Q")) for _ in range(rank))
        # A quantized type packs numbers in blocks of a fixed size in bytes.
        try:
            block, bytes_of_block = GGML_QUANT_SIZES[GGMLQuantizationType(int(cursor.number("I")))]
        except (ValueError, KeyError):
            raise ValueError("a tensor has an unknown type") from None
        numbers = math.prod(shapes[name])
        if numbers < 1 or numbers % block:
            raise ValueError("a tensor has dimensions that its type does not allow")
        length = numbers // block * bytes_of_block
        ends.append(int(cursor.number("Q")) + length)
        total += length
    # Tensors begin at a multiple of this, after the header.
    alignment = known.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= WIDTH or alignment & (alignment - 1):
        raise ValueError("its alignment is not a power of two")
    # The bytes that remain after the header and its padding.
    room = cursor.left - -(size - cursor.left) % alignment
    # Offsets are relative to the first tensor.
    if max(ends, default=0) > room or total > max(room, 0):
        raise ValueError("it is cut short, or its tensors overlap")
    return shapes


def _check_sizes(known: Mapping[str, object], shapes: Mapping[str, Dimensions]) -> None:
    """Refuse a header that describes a larger model than its tensors make.

    transformers would allocate memory for that model.
    """
    # Field names begin with the architecture.
    kind = known.get("general.architecture")
    largest = max((max(shape) for shape in shapes.values()), default=0)

    def of_model(name: str) -> int:
        value = known.get(f"{kind}.{name}", 0)
        return value if type(value) is int else 0

    if not 0 <= of_model("block_count") <= min(LAYERS, max(len(shapes), 1)):
        raise ValueError("it describes more layers than it has")
    # Each of a model's sizes is within a dimension of some weight, so none of them exceeds the
    # largest dimension.
    heads = of_model("attention.head_count") * of_model("attention.key_length")
    if heads > largest or any(not 0 <= of_model(name) <= largest for name in SIZES):
        raise ValueError("it describes a larger model than it holds")
    embedded = shapes.get("token_embd.weight")
    words: Any = known.get("tokenizer.ggml.tokens[]", 0)
    # GGUF lists dimensions from the innermost: (embedding, tokens).
    if embedded and (
        len(embedded) != 2 or embedded[0] != of_model("embedding_length") or words > embedded[1]
    ):
        raise ValueError("its embedding of tokens is not of the size that it describes")
