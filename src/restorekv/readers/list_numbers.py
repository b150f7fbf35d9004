"""The numbers of list items, as browsers write them: 3, c, C, iii or III.

program.py imports this file, which therefore imports nothing else of the package.
"""

from dataclasses import dataclass, field

ROMAN = (
    (1000, "m"),
    (900, "cm"),
    (500, "d"),
    (400, "cd"),
    (100, "c"),
    (90, "xc"),
    (50, "l"),
    (40, "xl"),
    (10, "x"),
    (9, "ix"),
    (5, "v"),
    (4, "iv"),
    (1, "i"),
)
HIGHEST_ROMAN = 3999
KINDS = ("1", "a", "A", "i", "I")  # of numbers, by the first of them


def write_number(number: int, kind: str) -> str:
    """Return a number of one of the KINDS; digits if that kind has no such number."""
    text = str(number)
    if kind in "aA" and number >= 1:
        text = _write_letters(number)
    elif kind in "iI" and 1 <= number <= HIGHEST_ROMAN:
        text = _write_roman(number)
    return text.upper() if kind in "AI" else text


def _write_letters(number: int) -> str:
    """Return a, b, ... z, aa, ab and so on."""
    letters = ""
    while number:
        number, letter = divmod(number - 1, 26)
        letters = chr(ord("a") + letter) + letters
    return letters


def _write_roman(number: int) -> str:
    """Return i, ii, iii, iv and so on."""
    text = ""
    for value, letters in ROMAN:
        count, number = divmod(number, value)
        text += count * letters
    return text


@dataclass
class ListCounter:
    """A counter of the items of a list.

    Attributes:
        kind: One of the KINDS; "" for a list without numbers.
        following: The number of the next item or, with `is_relative`, what has to be added to the
            number of all items to get it.
        step: 1, or -1 in a list that counts down.
        is_relative: Whether `following` is such a difference, as in a list that counts down to 1:
            the number of its items is known only at its end.
        items: How many there were.
        deferred: Numbers to be written once the number of items is known: the index of the part,
            the difference and the kind.
    """

    kind: str = ""
    following: int = 1
    step: int = 1
    is_relative: bool = False
    items: int = 0
    deferred: list[tuple[int, int, str]] = field(default_factory=list)

    def count_item(self, value: int | None, kind: str) -> "ItemNumber":
        """Count the next item and return its number, of a kind; `value` is the number that the item
        itself gives, or None.
        """
        if value is not None:
            self.following = value
            self.is_relative = False
        number = ItemNumber(self, self.following, self.is_relative, kind)
        self.following += self.step
        self.items += 1
        return number


@dataclass(frozen=True, eq=False)
class ItemNumber:
    """The number of an item of a list.

    Attributes:
        counter: The counter of its list.
        value: The number, or what has to be added to the number of items for it.
        is_relative: Whether it is such a difference.
        kind: One of the KINDS.
    """

    counter: ListCounter
    value: int
    is_relative: bool
    kind: str
