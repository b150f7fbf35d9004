"""The numbers of paragraphs in a Word document, which the text itself does not hold.

A paragraph, or its style, names a list ("num") and a level. Lists that were made from one
definition ("abstractNum") count together, unless one of them says where it starts. A level says how
its number is written, such as "%1.%2" for "4.2" (ECMA-376, part 1, 17.9).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from restorekv.readers.list_numbers import write_number
from restorekv.readers.word_package import COMPATIBILITY, WORD, is_on, read_number

FALLBACK = COMPATIBILITY + "Fallback"
LEVELS = 9
MAX_NUMBER = 32767  # as in Word
MAX_LETTERS = 30  # of a number, as in Word
MAX_TEXT = 200  # characters of a level's text; longer ones are cut
MAX_BASES = 10  # of a style; styles that are based on each other may go in a circle
PLACE = re.compile("%([1-9])")  # of a level's number in a level's text
# What Word calls kinds of numbers, as in list_numbers.py; all others are written as digits.
KINDS = {
    "lowerLetter": "a",
    "upperLetter": "A",
    "lowerRoman": "i",
    "upperRoman": "I",
}
SUFFIXES = {"nothing": ""}  # after a number; a tab and a space are both written as a space


@dataclass(frozen=True)
class Level:
    """How a level of a list counts and writes its numbers.

    Attributes:
        start: Its first number.
        kind: Word's name of its kind of numbers.
        text: What is written: "%1" is the number of the first level, and so on.
        suffix: What is written after it.
        restart: How many of the first levels make it start again: a paragraph of one of them does.
        is_legal: Whether all numbers in its text are digits.
        style: The style of paragraphs that belongs to this level; "" if it has none.
    """

    start: int = 1
    kind: str = "decimal"
    text: str = ""
    suffix: str = " "
    restart: int = LEVELS
    is_legal: bool = False
    style: str = ""


@dataclass(frozen=True)
class NumberedList:
    """A list of a document.

    Attributes:
        definition: The id of its definition; all lists of a definition count together.
        levels: By their places from 0.
        starts: The levels that start anew with the first paragraph of this list, and their first
            numbers.
    """

    definition: str
    levels: Mapping[int, Level]
    starts: Mapping[int, int]

    def get_start(self, place: int) -> int:
        """Return the first number of a level, each time that it starts."""
        return self.starts.get(place, self.levels.get(place, Level()).start)


@dataclass
class Counters:
    """What was counted of a definition.

    Attributes:
        starts: The numbers at which levels begin next.
        started: The lists and levels that have used a start of their own.
        numbers: The numbers of the levels that have begun.
    """

    starts: dict[int, int]
    started: set[tuple[str, int]]
    numbers: dict[int, int] = field(default_factory=dict)


class WordLists:
    """The lists and styles of a document, and the numbers of its paragraphs so far.

    Args:
        numbering: The XML of the part with the lists; None if the document has none.
        styles: The XML of the part with the styles, or None.
    """

    def __init__(self, numbering: Any | None, styles: Any | None) -> None:
        self.style_of_all = ""  # of paragraphs that name no style
        self.style_properties: dict[str, Any] = {}
        self.style_bases: dict[str, str] = {}
        for style in _find_all(styles, "style"):
            self._add_style(style)
        self.definitions = {}
        for definition in _find_all(numbering, "abstractNum"):
            self.definitions[definition.get(WORD + "abstractNumId", "")] = definition
        self.instances = {}
        for instance in _find_all(numbering, "num"):
            self.instances[instance.get(WORD + "numId", "")] = instance
        self.lists: dict[str, NumberedList | None] = {}  # those that were asked for
        self.counters: dict[str, Counters] = {}

    def _add_style(self, style: Any) -> None:
        style_id = style.get(WORD + "styleId", "")
        properties = style.find(f"{WORD}pPr/{WORD}numPr")
        if properties is not None:
            self.style_properties[style_id] = properties
        base = _get_value(style.find(WORD + "basedOn"))
        if base:
            self.style_bases[style_id] = base
        is_default = style.get(WORD + "default", "0") in ("1", "true", "on")
        if is_default and style.get(WORD + "type") == "paragraph":
            self.style_of_all = style_id

    def begin_story(self) -> dict[str, Counters]:
        """Count from the beginning; return the counters so far, for `end_story`."""
        outer = self.counters
        self.counters = {}
        return outer

    def end_story(self, outer: dict[str, Counters]) -> None:
        """Continue with the counters that `begin_story` returned."""
        self.counters = outer

    def number_paragraph(self, paragraph: Any) -> str:
        """Return the number of the document's next paragraph, with the space after it; "" for a
        paragraph without one.
        """
        name, place = self._find_list(paragraph)
        numbered = self._get_list(name)
        if numbered is None or place not in numbered.levels:
            return ""
        numbers = self._count(name, numbered, place)
        level = numbered.levels[place]
        if level.kind == "bullet" or not level.text:
            return ""
        text = PLACE.sub(lambda match: _write_place(match, level, numbered, numbers), level.text)
        return text + level.suffix

    def _find_list(self, paragraph: Any) -> tuple[str, int]:
        """Return the id of a paragraph's list, "" for none, and its level."""
        own = paragraph.find(f"{WORD}pPr/{WORD}numPr")
        own_level = None
        if own is not None:
            own_level = own.find(WORD + "ilvl")
            name = _get_value(own.find(WORD + "numId"))
            if name:
                return name, read_number(own_level, 0, MAX_NUMBER)
        style = _get_value(paragraph.find(f"{WORD}pPr/{WORD}pStyle")) or self.style_of_all
        for style_id in self._list_bases(style):
            properties = self.style_properties.get(style_id)
            if properties is None:
                continue
            name = _get_value(properties.find(WORD + "numId"))
            if not name:
                continue
            if own_level is not None:
                return name, read_number(own_level, 0, MAX_NUMBER)
            level = read_number(properties.find(WORD + "ilvl"), 0, MAX_NUMBER)
            return name, self._find_level_of_style(name, style_id, level)
        return "", 0

    def _list_bases(self, style: str) -> Iterator[str]:
        """Yield a style and those that it is based on."""
        for _ in range(MAX_BASES):
            if not style:
                return
            yield style
            style = self.style_bases.get(style, "")

    def _find_level_of_style(self, name: str, style: str, default: int) -> int:
        """Return the level of a list that belongs to a style."""
        numbered = self._get_list(name)
        if numbered is not None:
            for place, level in numbered.levels.items():
                if level.style == style:
                    return place
        return default

    def _get_list(self, name: str) -> NumberedList | None:
        if name not in self.lists:
            self.lists[name] = self._read_list(name)
        return self.lists[name]

    def _read_list(self, name: str) -> NumberedList | None:
        """Return the list of an id; None if it has no definition."""
        instance = self.instances.get(name)
        if instance is None:
            return None
        definition_id = self._find_definition(instance)
        definition = self.definitions.get(definition_id)
        if definition is None:
            return None
        levels = {}
        for place, element in _iter_levels(definition, "lvl"):
            levels[place] = _read_level(element)
        starts = {}
        for place, override in _iter_levels(instance, "lvlOverride"):
            own = override.find(WORD + "lvl")
            if own is not None:
                levels[place] = _read_level(own)
            start = override.find(WORD + "startOverride")
            if start is not None:
                starts[place] = read_number(start, 0, MAX_NUMBER)
        return NumberedList(definition_id, levels, starts)

    def _find_definition(self, instance: Any) -> str:
        """Return the id of a list's definition; if that only names a style, the id of the
        definition of the style's list.
        """
        name = _get_value(instance.find(WORD + "abstractNumId"))
        definition = self.definitions.get(name)
        if definition is None:
            return name
        style = _get_value(definition.find(WORD + "numStyleLink"))
        properties = self.style_properties.get(style)
        if properties is None:
            return name
        other = self.instances.get(_get_value(properties.find(WORD + "numId")))
        return name if other is None else _get_value(other.find(WORD + "abstractNumId"))

    def _count(self, name: str, numbered: NumberedList, place: int) -> dict[int, int]:
        """Count a paragraph of a list's level; return the numbers of all levels so far."""
        counters = self.counters.get(numbered.definition)
        if counters is None:
            starts = {each: numbered.get_start(each) for each in numbered.levels}
            counters = Counters(starts, {(name, each) for each in numbered.starts})
            self.counters[numbered.definition] = counters
        numbers = counters.numbers
        # Another list's own starts count once, with its first paragraph of that level or one above.
        for each, start in numbered.starts.items():
            if each >= place and (name, each) not in counters.started:
                counters.started.add((name, each))
                counters.starts[each] = start
                numbers.pop(each, None)
        # A level that has no paragraph yet counts as begun by one of a deeper level.
        for each in range(place + 1):
            if each in numbered.levels and each not in numbers:
                numbers[each] = counters.starts.get(each, numbered.get_start(each))
            elif each == place:
                numbers[each] = min(numbers[each] + 1, MAX_NUMBER)
        if any(deeper > place for deeper in numbers):
            for deeper, level in numbered.levels.items():
                if place < min(deeper, level.restart):
                    numbers.pop(deeper, None)
                    counters.starts[deeper] = numbered.get_start(deeper)
        return numbers


def _find_all(root: Any | None, name: str) -> Sequence[Any]:
    """Return the elements of a name in a part that may be missing."""
    return [] if root is None else root.findall(WORD + name)


def _iter_levels(parent: Any, name: str) -> Iterator[tuple[int, Any]]:
    """Yield the elements of a name, each about one level, with the level's place."""
    for element in parent.findall(WORD + name):
        place = read_number(element, 0, MAX_NUMBER, "ilvl")
        if place < LEVELS:
            yield place, element


def _get_value(element: Any | None) -> str:
    """Return an element's value; "" if there is none."""
    return "" if element is None else element.get(WORD + "val", "")


def _read_level(element: Any) -> Level:
    """Return a level from its XML."""
    kind = element.find(WORD + "numFmt")
    if kind is None:  # newer kinds, each with an older one for other programs
        kind = element.find(f".//{FALLBACK}/{WORD}numFmt")
    return Level(
        start=read_number(element.find(WORD + "start"), 0, MAX_NUMBER),
        kind=_get_value(kind) or "decimal",
        text=_get_value(element.find(WORD + "lvlText"))[:MAX_TEXT],
        suffix=SUFFIXES.get(_get_value(element.find(WORD + "suff")), " "),
        restart=read_number(element.find(WORD + "lvlRestart"), LEVELS, MAX_NUMBER),
        is_legal=is_on(element.find(WORD + "isLgl")),
        style=_get_value(element.find(WORD + "pStyle")),
    )


def _write_place(
    match: re.Match, level: Level, numbered: NumberedList, numbers: Mapping[int, int]
) -> str:
    """Return the number of the level that a part of a level's text names."""
    place = int(match[1]) - 1
    named = numbered.levels.get(place, Level())
    number = numbers.get(place, named.start)  # of a level that has no paragraph yet
    kind = named.kind
    if kind in ("bullet", "none"):
        return ""
    if kind == "decimalZero":
        return f"{number:02}"
    if level.is_legal or kind not in KINDS:
        return str(number)
    if number == 0:
        return ""
    if kind in ("lowerLetter", "upperLetter"):
        return _repeat_letter(number, KINDS[kind])
    return write_number(number, KINDS[kind])


def _repeat_letter(number: int, kind: str) -> str:
    """Return a, b, ... z, aa, bb and so on, as Word counts; digits if it has no such number."""
    count, letter = divmod(number - 1, 26)
    if count >= MAX_LETTERS:
        return str(number)
    return chr(ord(kind) + letter) * (count + 1)
