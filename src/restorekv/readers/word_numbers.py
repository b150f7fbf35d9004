"""The numbers of a Word document's lists and headings, such as "3." and "2.1".

Word counts by the definition of a list (abstractNum): all lists of one definition are counted
together. A list (num) may override where levels start, from its own first paragraph on. A paragraph
adds one at its level, and deeper levels start anew.

Where it is not certain what Word would show, a paragraph has no number here: letters after z, kinds
of numbers that are not in KINDS, a level whose outer level was not counted yet, lists of lists
(numStyleLink), and every definition that text boxes use, too.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from restorekv.readers.list_numbers import write_number

WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
VALUE = WORD + "val"
# Word's names of the kinds of numbers in list_numbers.py.
KINDS = {
    "decimal": "1",
    "lowerLetter": "a",
    "upperLetter": "A",
    "lowerRoman": "i",
    "upperRoman": "I",
}
LEVELS = 9
LETTERS = 26  # after these, Word writes aa, bb
MOST_BASES = 10  # styles that are based on each other may go in a circle


def is_on(element: Any) -> bool:
    """Return whether a property that is on or off is there and on."""
    return element is not None and element.get(VALUE, "1") not in ("0", "off", "false")


def read_value(element: Any, path: str) -> str:
    """Return the value of the element at a path of names; "" without one."""
    found = element.find("/".join(WORD + name for name in path.split("/")))
    return "" if found is None else found.get(VALUE, "")


def read_number(element: Any, path: str) -> int | None:
    """Return such a value as a number of at most nine digits; None without one."""
    value = read_value(element, path)
    return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else None


@dataclass(frozen=True)
class Level:
    """A level of a list.

    Attributes:
        kind: Of its numbers, as Word calls it.
        text: What is written, in which %1 is the number of the first level.
        start: Its first number.
        restart: The level, counted from 1, that lets it start anew; 0 is none, None each outer one.
        all_decimal: Whether all numbers in its text are decimal.
        hidden: Whether its number is not shown.
        style: The style of paragraphs that are at this level.
    """

    kind: str
    text: str
    start: int
    restart: int | None
    all_decimal: bool
    hidden: bool
    style: str


@dataclass
class WordList:
    """A list, which paragraphs name: its definition, and what it overrides."""

    definition: str
    levels: dict[int, Level]
    start_overrides: dict[int, int]
    # The levels at which it has begun.
    begun: set[int] = field(default_factory=set)


class ListNumbers:
    """Counts the paragraphs of a document's lists.

    Args:
        numbering: The XML of the lists, or None.
        styles: The XML of the styles, or None.
        boxes: Paragraphs in text boxes.
    """

    def __init__(self, numbering: Any | None, styles: Any | None, boxes: Iterable[Any]) -> None:
        self.lists = {} if numbering is None else _read_lists(numbering)
        self.styles: dict[str, Any] = {}
        self.default_style = ""
        for style in [] if styles is None else styles.findall(WORD + "style"):
            name = style.get(WORD + "styleId", "")
            self.styles[name] = style
            is_default = style.get(WORD + "default", "0") in ("1", "on", "true")
            if is_default and style.get(WORD + "type") == "paragraph":
                self.default_style = name
        # By definition: the numbers of the levels that were counted.
        self.counts: dict[str, dict[int, int]] = {}
        # Definitions of which it is not certain how Word counts them.
        self.uncertain: set[str] = set()
        for paragraph in boxes:
            found = self._find_list(paragraph)
            if found is not None:
                self.uncertain.add(found[0].definition)

    def count_paragraph(self, paragraph: Any) -> str:
        """Count a paragraph, and return the number that Word shows before it; "" for none."""
        found = self._find_list(paragraph)
        if found is None:
            return ""
        of_list, number = found
        level = of_list.levels[number]
        counts = self.counts.setdefault(of_list.definition, {})
        if number in of_list.start_overrides and number not in of_list.begun:
            counts[number] = of_list.start_overrides[number]
        elif number in counts:
            counts[number] += 1
        else:
            counts[number] = of_list.start_overrides.get(number, level.start)
        of_list.begun.add(number)
        for deeper in [each for each in counts if each > number]:
            restart = of_list.levels[deeper].restart if deeper in of_list.levels else None
            if restart is None or number < restart:
                del counts[deeper]
        if level.hidden or of_list.definition in self.uncertain:
            return ""
        return _write_level(of_list, level, counts)

    def _find_list(self, paragraph: Any) -> tuple[WordList, int] | None:
        """Return the list of a paragraph and its level, or None."""
        list_id = read_value(paragraph, "pPr/numPr/numId")
        level = read_number(paragraph, "pPr/numPr/ilvl")
        style = read_value(paragraph, "pPr/pStyle") or self.default_style
        of_style = ""
        if not list_id:
            list_id, of_style, style_level = self._find_list_of_style(style)
            level = style_level if level is None else level
        found = self.lists.get(list_id)
        if found is None:
            return None
        if level is None and of_style:
            # Which level a style is for is said there.
            of_levels = [key for key, each in found.levels.items() if each.style == of_style]
            level = min(of_levels, default=0)
        level = level or 0
        return (found, level) if level in found.levels else None

    def _find_list_of_style(self, style: str) -> tuple[str, str, int | None]:
        """Return the list that a style or one that it is based on names, the style that does, and
        the level.
        """
        for _ in range(MOST_BASES):
            if style not in self.styles:
                break
            list_id = read_value(self.styles[style], "pPr/numPr/numId")
            if list_id:
                return list_id, style, read_number(self.styles[style], "pPr/numPr/ilvl")
            style = read_value(self.styles[style], "basedOn")
        return "", "", None


def _read_lists(numbering: Any) -> dict[str, WordList]:
    """Return the lists of a document by their ids."""
    definitions = {}
    for definition in numbering.findall(WORD + "abstractNum"):
        definitions[definition.get(WORD + "abstractNumId", "")] = _read_levels(definition)
    lists = {}
    for each in numbering.findall(WORD + "num"):
        definition = read_value(each, "abstractNumId")
        levels = dict(definitions.get(definition, {}))
        start_overrides = {}
        for override in each.findall(WORD + "lvlOverride"):
            levels |= _read_levels(override)
            start = read_number(override, "startOverride")
            number = override.get(WORD + "ilvl", "")
            if start is not None and number.isascii() and number.isdecimal():
                start_overrides[int(number[:2])] = start
        lists[each.get(WORD + "numId", "")] = WordList(definition, levels, start_overrides)
    lists.pop("0", None)  # means none
    return lists


def _read_levels(parent: Any) -> dict[int, Level]:
    """Return the levels that a definition or an override has, by their numbers from 0."""
    levels = {}
    for level in parent.findall(WORD + "lvl"):
        number = level.get(WORD + "ilvl", "")
        if number not in [str(each) for each in range(LEVELS)]:
            continue
        start = read_number(level, "start")
        levels[int(number)] = Level(
            kind=read_value(level, "numFmt") or "decimal",
            text=read_value(level, "lvlText"),
            start=0 if start is None else start,
            restart=read_number(level, "lvlRestart"),
            all_decimal=is_on(level.find(WORD + "isLgl")),
            hidden=is_on(level.find(f"{WORD}rPr/{WORD}vanish")),
            style=read_value(level, "pStyle"),
        )
    return levels


def _write_level(of_list: WordList, level: Level, counts: dict[int, int]) -> str:
    """Return the text of a level with its numbers; "" where one of them is not certain."""
    if level.kind not in KINDS:  # a bullet, for one
        return ""
    text = level.text
    for number in range(LEVELS):
        place = f"%{number + 1}"
        if place not in text:
            continue
        outer = of_list.levels.get(number)
        if number not in counts or outer is None or outer.kind not in KINDS:
            return ""
        kind = "1" if level.all_decimal else KINDS[outer.kind]
        count = counts[number]
        if (count < 1 and kind != "1") or (count > LETTERS and kind in "aA"):
            return ""
        text = text.replace(place, write_number(count, kind))
    return text.strip()
