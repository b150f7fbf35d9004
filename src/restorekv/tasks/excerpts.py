"""Cuts a long text into passages of a limited number of tokens, at the ends of its paragraphs."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from restorekv.errors import RestoreKVError

JOINTS = ("\n\n", "\n", " ")  # between paragraphs, lines, words; the first that makes pieces small enough is used
LEAST = 64  # tokens of a passage; a single line may be longer than a smaller one
Item = TypeVar("Item")
Size = Callable[[str], int]


def check_length(length: int) -> None:
    """Raises RestoreKVError for a length that is too small for passages; 0 stands for whole texts."""
    if 0 < length < LEAST:
        raise RestoreKVError(f"A passage takes a length of at least {LEAST} tokens, not {length}; 0 keeps texts whole.")


def split_text(text: str, length: int, size: Size) -> list[str]:
    """Returns the fewest passages of at most `length` tokens by `size`, as even as possible; 0 keeps the text whole."""
    if not length or size(text) <= length:
        return [text]
    parts = pieces(text, length, size)
    groups = packed([size(part) for part in parts], length)
    return ["".join(parts[group.start : group.stop]).strip() for group in groups]


def pieces(text: str, length: int, size: Size, joints: Sequence[str] = JOINTS) -> list[str]:
    """Returns consecutive parts of the text: its paragraphs, the lines of those that are too long, or their words."""
    if not joints or size(text) <= length:
        return [text] if text else []
    first, *others = text.split(joints[0])
    parts = (first, *(joints[0] + part for part in others))
    return [piece for part in parts for piece in pieces(part, length, size, joints[1:])]


def packed(sizes: Sequence[int], most: int) -> list[range]:
    """Returns the fewest groups of neighbors that sum to at most `most` each, with the smallest largest group.

    A size above `most` gets a group of its own.
    """
    count, low, high = len(grouped(sizes, most)), 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(grouped(sizes, middle)) <= count else (middle + 1, high)
    return grouped(sizes, low)


def grouped(sizes: Sequence[int], most: int) -> list[range]:
    """Returns groups of neighbors that fill each group before the next begins."""
    starts, total = [0], 0
    for index, size in enumerate(sizes):
        if total and total + size > most:
            starts.append(index)
            total = 0
        total += size
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(sizes)], strict=True)]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Returns `count` of the items in their order, evenly spaced; all of them where count is 0 or too large."""
    count = min(count, len(items)) or len(items)
    return [items[index * len(items) // count] for index in range(count)]
