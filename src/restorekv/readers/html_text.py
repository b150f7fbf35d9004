"""The text of an HTML page, as a browser would show it.

- What is hidden is left out (`hidden`, `display: none`, `visibility: hidden`, <template>,
  <noscript>), unless it is all that the page has. Scripts, styles and comments are never read.
- A table has a line for each row and a tab between two cells, also empty ones. A cell over several
  columns is followed by empty cells, and one over several rows is repeated in each, so that every
  value stays in its column and every row says what it belongs to. A row of a single cell, and cells
  that hold tables or preformatted text, as in a page that is laid out by a table, are read one
  after the other with their own lines.
- Items of a list have the numbers that a browser shows.
- Raised and lowered text, links to notes and the readings of words (<ruby>) are written as in
  raised.py.
- Of forms, the values that a browser shows are read, "[x]" for a ticked box and "[ ]" for an empty
  one, and "[x]" before a chosen option. Pictures are read by their alt text.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import groupby
from operator import itemgetter
from typing import Any

from restorekv.readers.equations import MathElement
from restorekv.readers.list_numbers import KINDS, ItemNumber, ListCounter, write_number
from restorekv.readers.raised import (
    END,
    LOWERED,
    NOTE,
    RAISED,
    READING,
    remove_markers,
    write_plainly,
)

# Elements with content that is not text of the page. It runs to their own end tag, whatever is in
# between.
RAW_TAGS = ("script", "style", "title")
# Tags before and after which a browser breaks the line.
BLOCKS = """
address article aside blockquote body br caption center dd details dialog dir div dl dt fieldset
figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li main menu nav
ol optgroup option p pre search section select summary table tbody textarea tfoot thead tr ul
"""
# What a tag puts into the text before and after its content.
SEPARATORS = {
    **dict.fromkeys(BLOCKS.split(), "\n"),
    **dict.fromkeys(
        "button del iframe input meter object progress s strike td text th".split(), " "
    ),
    "q": '"',
}
# Values of `display` before and after which a browser breaks the line.
BLOCK_DISPLAYS = set("block flex flow-root grid list-item table table-row".split())
VOID = set("area base br col embed hr img input link meta param source track wbr".split())
# A paragraph ends where one of these begins.
ENDS_PARAGRAPH = set(BLOCKS.split()) - {"body", "br", "caption", "head", "html", "legend", "option"}
# For elements with end tags that may be missing: the open elements that a start tag ends, and the
# elements at which the search for them stops.
LISTS = ("ul", "ol", "menu", "dir")
IMPLIED_ENDS = {
    "li": (("li",), LISTS),
    "dt": (("dt", "dd"), ("dl",)),
    "dd": (("dt", "dd"), ("dl",)),
    "option": (("option",), ("select", "datalist")),
    "optgroup": (("option", "optgroup"), ("select",)),
    "rt": (("rt", "rp"), ("ruby",)),
    "rp": (("rt", "rp"), ("ruby",)),
}
# CSS names of kinds of numbers; all others are bullets, or numbers that are not known here.
NUMBER_STYLES = {
    "decimal": "1",
    "lower-alpha": "a",
    "lower-latin": "a",
    "upper-alpha": "A",
    "upper-latin": "A",
    "lower-roman": "i",
    "upper-roman": "I",
}
# Elements that are never read. Deleted text would run into the text that replaces it, parentheses
# are written without those of <rp>, and the words in frames and films are for browsers that cannot
# show these.
HIDDEN_TAGS = set(
    """
template del datalist rp desc metadata audio canvas iframe noembed noframes video
""".split()
)
GROUPS_OF_ROWS = ("thead", "tbody", "tfoot")
# Kinds of inputs whose value a browser does not show as text.
SILENT_INPUTS = ("hidden", "password", "file", "color", "range", "image")
# Kinds of parts: text, text that is shown with its white space, and finished lines of a table.
FLOW, PREFORMATTED, ROWS = "flow", "preformatted", "rows"
SOFT_HYPHEN = "\xad"
MAX_EQUATION_DEPTH = 200  # levels; further ones are read as their content
MAX_COLUMNS = 1000  # of one cell, as in browsers
MAX_ROWS = 65534
MAX_REPEATED = 200  # characters of a cell that is repeated in further rows

Attributes = dict[str, str]
Part = tuple[str, str]  # a text, and its kind


def extract_html(content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text that a browser would show; hidden text only if there is nothing else.

    Args:
        content: The page in UTF-8.

    Returns:
        The text, and no notices.
    """
    page = content.decode()
    text, has_hidden = _read_page(page, show_hidden=False)
    if has_hidden and not text.strip():
        text, _ = _read_page(page, show_hidden=True)
    return text, {}


def _read_page(page: str, show_hidden: bool) -> tuple[str, bool]:
    """Return the text of a page, and whether some was left out."""
    reader = PageReader(show_hidden)
    reader.feed(page)
    reader.close()
    if reader.equation:
        reader.end_equation()
    while reader.tables:
        reader.close_table()
    while len(reader.scopes) > 1:
        reader.close_scope()
    reader.scopes[0].close_elements(0)
    return "\n".join(render_lines(reader.scopes[0].parts)), reader.has_hidden


def render_lines(parts: Sequence[Part]) -> list[str]:
    """Return the lines that the parts of a text make, without empty ones."""
    lines = []
    # A <pre> begins and ends a line, so that no line is in two groups.
    for kind, group in groupby(parts, key=itemgetter(1)):
        text = "".join(part for part, _ in group)
        if kind == ROWS:
            lines.append(text)
            continue
        text = write_plainly(text)
        if kind == PREFORMATTED:
            # A browser shows no line break at either end.
            kept = "\n".join(text.splitlines()).strip("\n")
            if kept.strip():
                lines.append(kept)
            continue
        for line in text.splitlines():
            words = line.split()
            if words:
                lines.append(" ".join(words))
    return lines


@dataclass
class Element:
    """An open element.

    Attributes:
        tag: Its name.
        hidden: Whether nothing in it is shown.
        invisible: Whether it has `visibility: hidden`, which descendants may override.
        kind: FLOW or PREFORMATTED.
        marker: The marker before its text, if the text is raised, lowered or an index.
        start: How many parts there are before it.
        links_to_anchor: Whether it is a link to an anchor of a page.
        is_block: Whether its style breaks the line before and after it.
        counter: The counter of a list's items; None for other elements.
        number: The number of an item of a list.
    """

    tag: str
    hidden: bool = False
    invisible: bool = False
    kind: str = FLOW
    marker: str = ""
    start: int = 0
    links_to_anchor: bool = False
    is_block: bool = False
    counter: ListCounter | None = None
    number: ItemNumber | None = None


@dataclass
class Scope:
    """The page, a cell, a caption or a template; elements that are open in it end with it."""

    base: Element
    colspan: int = 1
    rowspan: int = 1
    parts: list[Part] = field(default_factory=list)
    elements: list[Element] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    # The counters of the open lists, the innermost last.
    counters: list[ListCounter] = field(default_factory=list)
    # Open list items without text so far; their numbers are written before their first text.
    unnumbered: list[Element] = field(default_factory=list)

    def get_top(self) -> Element:
        """Return the innermost open element."""
        return self.elements[-1] if self.elements else self.base

    def open_element(self, element: Element) -> None:
        """Add an element to the open ones."""
        self.elements.append(element)
        self.counts[element.tag] += 1

    def close_elements(self, keep: int) -> None:
        """End all open elements but the first `keep`."""
        while len(self.elements) > keep:
            element = self.elements.pop()
            self.counts[element.tag] -= 1
            if element.marker:
                self.parts.append((END, element.kind))
            if element.is_block:
                self.break_line(element.kind)
            if element.counter is not None:
                self._write_deferred_numbers(self.counters.pop())
            # An item without any text gets no number.
            if self.unnumbered and self.unnumbered[-1] is element:
                self.unnumbered.pop()

    def break_line(self, kind: str) -> None:
        """Begin a line, unless one has just begun: empty lines of preformatted text stay."""
        if not self.parts or not self.parts[-1][0].endswith("\n"):
            self.parts.append(("\n", kind))

    def write_numbers(self) -> None:
        """Write the numbers of items before the first text in them."""
        for item in self.unnumbered:
            number = item.number
            assert number is not None
            if number.is_relative:
                deferred = (len(self.parts), number.value, number.kind)
                number.counter.deferred.append(deferred)
            self.parts.append((f"{write_number(number.value, number.kind)}. ", item.kind))
        self.unnumbered.clear()

    def _write_deferred_numbers(self, counter: ListCounter) -> None:
        """Write the numbers of a list that counts down to 1, now that its end is known."""
        for index, difference, kind in counter.deferred:
            number = write_number(counter.items + difference, kind)
            self.parts[index] = (f"{number}. ", self.parts[index][1])

    def close_tag(self, tags: Sequence[str], borders: Sequence[str] = ()) -> None:
        """End the innermost element of some tags, unless one of the borders is inside it."""
        if not any(self.counts[tag] for tag in tags):
            return
        for index in range(len(self.elements) - 1, -1, -1):
            if self.elements[index].tag in tags:
                self.close_elements(index)
                return
            if self.elements[index].tag in borders:
                return


@dataclass
class HtmlCell:
    """A finished cell of a table."""

    lines: list[str]
    colspan: int
    rowspan: int
    has_blocks: bool  # a table or preformatted text


@dataclass
class HtmlRow:
    """A row of a table."""

    hidden: bool
    cells: list[HtmlCell] = field(default_factory=list)
    ends_group: bool = False


class HtmlTable:
    """A table that is being read.

    Args:
        base: The element of the table.
        depth: How many scopes are open around it.
    """

    def __init__(self, base: Element, depth: int) -> None:
        self.base = base
        self.depth = depth
        self.rows: list[HtmlRow] = []
        self.has_open_row = False
        self.hidden_group = False

    def render(self) -> list[str]:
        """Return the lines of all rows."""
        lines: list[str] = []
        # By column: how many further rows a cell reaches into, and what is repeated there.
        reaching: dict[int, tuple[int, str]] = {}
        for row in self.rows:
            if not row.hidden:
                lines.extend(_render_row(row, reaching))
            if row.ends_group:
                reaching.clear()
        return lines


def _render_row(row: HtmlRow, reaching: dict[int, tuple[int, str]]) -> list[str]:
    """Return the lines of a row; note in `reaching` what reaches into the next ones."""
    values: list[str] = []
    is_own: list[bool] = []

    def add_reaching() -> None:
        count, text = reaching.pop(len(values))
        if count > 1:
            reaching[len(values)] = (count - 1, text)
        values.append(text)
        is_own.append(bool(text))

    for cell in row.cells:
        while len(values) in reaching:
            add_reaching()
        text = " ".join(" ".join(cell.lines).split())
        for column in range(cell.colspan):
            value = "" if column else text
            if cell.rowspan > 1:
                repeated = value if len(value) <= MAX_REPEATED else ""
                reaching[len(values)] = (cell.rowspan - 1, repeated)
            values.append(value)
            is_own.append(column == 0)
    last = max(reaching, default=-1)
    while len(values) <= last:
        if len(values) in reaching:
            add_reaching()
        else:
            values.append("")
            is_own.append(False)
    if not any(cell.lines for cell in row.cells):
        return []
    if len(row.cells) == 1 and values[0] and not any(values[1:]):
        return row.cells[0].lines
    if any(cell.has_blocks for cell in row.cells):
        return [line for cell in row.cells for line in cell.lines]
    # Drop the empty cells at the end that come only from a wide cell or from other rows.
    while is_own and not is_own[-1]:
        is_own.pop()
        values.pop()
    return ["\t".join(values)]


class PageReader(HTMLParser):
    """A parser that collects the text of a page.

    Args:
        show_hidden: Whether hidden text is read like the rest.
    """

    def __init__(self, show_hidden: bool) -> None:
        super().__init__()
        self.show_hidden = show_hidden
        raw = RAW_TAGS if show_hidden else (*RAW_TAGS, "noscript")
        # Documented as an attribute to set, though typeshed has it as final.
        self.CDATA_CONTENT_ELEMENTS = raw  # pyright: ignore[reportGeneralTypeIssues]
        self.scopes = [Scope(Element(""))]
        self.tables: list[HtmlTable] = []
        self.raw_tag = ""
        self.has_hidden = False
        # The open elements of an equation, and the element that it is.
        self.equation: list[MathElement] = []
        self.equation_element = Element("")
        # The number of parts of the scope when its last equation was written.
        self.equation_end = -1

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what begins, and break the line where a browser does."""
        attributes = {name: value or "" for name, value in reversed(attrs)}
        if tag in self.CDATA_CONTENT_ELEMENTS:
            self.raw_tag = tag
            return
        if self.equation and tag in SEPARATORS:
            # As in browsers, an HTML tag closes an unclosed <math>.
            self.end_equation()
        if self.equation:
            self._open_in_equation(tag, attributes)
            return
        if self.tables and not self._is_in_template() and self._open_table_part(tag, attributes):
            return
        scope = self.scopes[-1]
        if tag in ENDS_PARAGRAPH:
            scope.close_tag(("p",))
        if tag in IMPLIED_ENDS:
            scope.close_tag(*IMPLIED_ENDS[tag])
        self._add(SEPARATORS.get(tag, ""), scope.get_top())
        element = self._make_element(tag, attributes, scope.get_top())
        if element.is_block:
            scope.break_line(element.kind)
        elif tag == "tspan" and "x" in attributes:
            # In SVG, a text with its own place is apart from the text before it.
            self._add(" ", scope.get_top())
        if tag == "table":
            self.tables.append(HtmlTable(element, len(self.scopes)))
        elif tag == "template":
            self.scopes.append(Scope(element))
        elif tag == "math":
            self.equation = [MathElement(tag, attributes)]
            self.equation_element = element
        elif tag in VOID:
            self._read_void(tag, attributes, element)
        else:
            self._begin(element)
            if tag in LISTS:
                element.counter = _make_counter(tag, attributes)
                scope.counters.append(element.counter)
            elif tag == "li":
                self._count_item(element, attributes)
            if tag == "option" and "selected" in attributes:
                self._add("[x] ", element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element that ends immediately."""
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        """Note what ends."""
        if tag in self.CDATA_CONTENT_ELEMENTS:
            self.raw_tag = ""
            return
        if self.equation:
            self._close_in_equation(tag)
            return
        if self.tables and not self._is_in_template() and self._close_table_part(tag):
            return
        if tag == "template":
            self._close_template()
            return
        scope = self.scopes[-1]
        if tag not in VOID:
            scope.close_tag((tag,))
        if tag != "input":  # which has no end
            self._add(SEPARATORS.get(tag, ""), scope.get_top())

    def handle_data(self, data: str) -> None:
        """Take text that is shown."""
        # A browser shows a soft hyphen only at the end of a line; in the text it would cut words.
        data = data.replace(SOFT_HYPHEN, "")
        if self.equation:
            self.equation[-1].children.append(remove_markers(data))
        elif not self.raw_tag:
            self._add(remove_markers(data), self.scopes[-1].get_top())
        elif self.raw_tag == "noscript" and data.strip():
            self.has_hidden = True

    def _add(self, text: str, element: Element) -> None:
        """Add a text of an element, if it is shown."""
        if not text:
            return
        if element.hidden or element.invisible:
            self.has_hidden = self.has_hidden or bool(text.strip())
        else:
            if self.scopes[-1].unnumbered and text.strip():
                self.scopes[-1].write_numbers()
            self.scopes[-1].parts.append((text, element.kind))

    def _count_item(self, item: Element, attributes: Attributes) -> None:
        """Count an item of a list, which is the innermost open element."""
        scope = self.scopes[-1]
        # As in browsers, what is not shown is not counted.
        if not scope.counters or item.hidden:
            return
        counter = scope.counters[-1]
        kind = _find_number_kind(attributes, counter.kind)
        number = counter.count_item(_parse_whole_number(attributes, "value"), kind)
        # What is shown as a block or within a line has no number.
        display = parse_style(attributes.get("style", "")).get("display", "list-item")
        if kind and display == "list-item" and not item.invisible:
            item.number = number
            scope.unnumbered.append(item)

    def _make_element(self, tag: str, attributes: Attributes, parent: Element) -> Element:
        """Return an element, which is hidden if it or its parent is."""
        element = Element(tag, parent.hidden, parent.invisible, parent.kind)
        style = parse_style(attributes.get("style", ""))
        if not self.show_hidden:
            if "display" in style:
                is_hidden = style["display"] == "none"
            else:
                is_hidden = "hidden" in attributes or tag in HIDDEN_TAGS
            is_hidden = is_hidden or self._is_copy_of_equation(tag, attributes)
            element.hidden = element.hidden or is_hidden
            if "visibility" in style:
                element.invisible = style["visibility"] in ("hidden", "collapse")
        if tag == "pre":
            element.kind = PREFORMATTED
        role = f"{attributes.get('role', '')} {attributes.get('epub:type', '')}".split()
        if "doc-noteref" in role or "noteref" in role:
            element.marker = NOTE
        elif tag == "rt":
            element.marker = READING
        elif tag == "sup" or style.get("vertical-align") == "super":
            element.marker = RAISED
        elif tag == "sub" or style.get("vertical-align") == "sub":
            element.marker = LOWERED
        # The first letter of a chapter may float at the left of its word.
        element.is_block = style.get("display") in BLOCK_DISPLAYS and "float" not in style
        element.links_to_anchor = tag == "a" and "#" in attributes.get("href", "")
        return element

    def _is_copy_of_equation(self, tag: str, attributes: Attributes) -> bool:
        """Return whether an element has the pieces of an equation that is there as MathML, too."""
        classes = attributes.get("class", "").split()
        # KaTeX writes them after the MathML.
        if "katex-html" in classes:
            return len(self.scopes[-1].parts) == self.equation_end
        # MathJax writes them before it, and hides them from screen readers.
        is_from_mathjax = tag == "nobr" or "mjx-math" in classes
        return is_from_mathjax and attributes.get("aria-hidden") == "true"

    def _begin(self, element: Element) -> None:
        """Open an element, with the marker that begins its text."""
        scope = self.scopes[-1]
        if scope.unnumbered and (element.marker or element.links_to_anchor):
            scope.write_numbers()
        element.start = len(scope.parts)
        if element.hidden or element.invisible:
            element.marker = ""
        # Raised text that links to an anchor is the mark of a note.
        for outer in reversed(scope.elements[-3:]):
            # A link in raised text: <sup><a href="#n">1</a></sup>.
            is_note = element.links_to_anchor or element.marker == NOTE
            if is_note and outer.marker in (RAISED, NOTE):
                scope.parts[outer.start] = (NOTE, outer.kind)
                outer.marker = NOTE
                element.marker = ""
                break
            # Raised text with which a link begins: <a href="#n"><sup>1</sup></a>.
            inside = scope.parts[outer.start :]
            begins_link = outer.links_to_anchor and not any(text.strip() for text, _ in inside)
            if element.marker and begins_link:
                element.marker = NOTE
        if element.marker:
            scope.parts.append((element.marker, element.kind))
        scope.open_element(element)

    def _read_void(self, tag: str, attributes: Attributes, element: Element) -> None:
        """Add what an element without content shows."""
        kind = attributes.get("type", "text").lower()
        text = ""
        if tag == "img" or (tag == "input" and kind == "image"):
            text = attributes.get("alt", "")
        elif tag == "input" and kind in ("checkbox", "radio"):
            text = "[x]" if "checked" in attributes else "[ ]"
        elif tag == "input" and kind not in SILENT_INPUTS:
            text = attributes.get("value", "")
        if text.strip():
            self._add(f" {remove_markers(text)} ", element)

    # Equations.

    def _open_in_equation(self, tag: str, attributes: Attributes) -> None:
        """Begin an element of an equation."""
        if len(self.equation) < MAX_EQUATION_DEPTH:
            element = MathElement(tag, attributes)
            self.equation[-1].children.append(element)
            if tag not in VOID:
                self.equation.append(element)

    def _close_in_equation(self, tag: str) -> None:
        """End an element of an equation, or the whole."""
        if tag == "math":
            self.end_equation()
        elif tag in [element.tag for element in self.equation]:
            while self.equation.pop().tag != tag:
                pass

    def end_equation(self) -> None:
        """Add the text of the equation that was read."""
        text = self.equation[0].render()
        self.equation = []
        self._add(text, self.equation_element)
        self.equation_end = len(self.scopes[-1].parts)

    # Tables.

    def _is_in_cell(self) -> bool:
        """Return whether a cell or caption of the innermost table is open."""
        return len(self.scopes) > self.tables[-1].depth

    def close_scope(self) -> None:
        """End the innermost scope; its text joins its table, or the text around it."""
        scope = self.scopes.pop()
        scope.close_elements(0)
        if scope.base.tag in ("td", "th"):
            if scope.base.hidden:
                return
            has_blocks = any(kind != FLOW for _, kind in scope.parts)
            cell = HtmlCell(render_lines(scope.parts), scope.colspan, scope.rowspan, has_blocks)
            self.tables[-1].rows[-1].cells.append(cell)
        else:
            line_break = ("\n", self.scopes[-1].get_top().kind)
            if scope.base.tag == "caption":
                scope.parts = [line_break, *scope.parts, line_break]
            self.scopes[-1].parts.extend(scope.parts)

    def _close_template(self) -> None:
        """End the innermost template, with the tables in it."""
        tags = [scope.base.tag for scope in self.scopes]
        if "template" not in tags:
            return
        depth = len(tags) - tags[::-1].index("template")
        while self.tables and self.tables[-1].depth >= depth:
            self.close_table()
        while len(self.scopes) >= depth:
            self.close_scope()

    def _is_in_template(self) -> bool:
        """Return whether a template is open in the innermost table."""
        return any(scope.base.tag == "template" for scope in self.scopes[self.tables[-1].depth :])

    def _close_cell(self) -> None:
        """End the open cell or caption of the innermost table, and what is open in it."""
        while self._is_in_cell():
            self.close_scope()

    def close_table(self) -> None:
        """End the innermost table; its lines join the text around it."""
        self._close_cell()
        table = self.tables.pop()
        self._add("\n", table.base)
        lines = table.render()
        if lines:
            self.scopes[-1].write_numbers()
            self.scopes[-1].parts.append(("\n".join(lines), ROWS))
            self._add("\n", table.base)

    def _open_table_part(self, tag: str, attributes: Attributes) -> bool:
        """Begin a row, cell or caption of the innermost table; return whether the tag does so."""
        table = self.tables[-1]
        if tag == "table":
            # As in browsers, a table between the cells of a table ends the outer one.
            if not self._is_in_cell():
                self.close_table()
            return False
        if tag not in ("tr", "td", "th", "caption", *GROUPS_OF_ROWS):
            return tag in ("col", "colgroup")
        self._close_cell()
        element = self._make_element(tag, attributes, table.base)
        if tag in GROUPS_OF_ROWS:
            self._end_group(table)
            table.hidden_group = element.hidden
        elif tag == "caption":
            self.scopes.append(Scope(element))
        elif tag == "tr":
            is_hidden = element.hidden or element.invisible or table.hidden_group
            table.rows.append(HtmlRow(is_hidden))
            table.has_open_row = True
        else:
            if not table.has_open_row:
                table.rows.append(HtmlRow(table.base.hidden or table.hidden_group))
                table.has_open_row = True
            if table.rows[-1].hidden:
                element.hidden = True
            colspan = min(max(_parse_span(attributes, "colspan"), 1), MAX_COLUMNS)
            # A rowspan of 0 means all further rows of the group.
            rowspan = min(_parse_span(attributes, "rowspan") or MAX_ROWS, MAX_ROWS)
            self.scopes.append(Scope(element, colspan, rowspan))
        return True

    def _close_table_part(self, tag: str) -> bool:
        """End a table or a part of one; return whether the tag does so."""
        table = self.tables[-1]
        if tag not in ("table", "tr", "td", "th", "caption", *GROUPS_OF_ROWS):
            return False
        if tag == "table":
            self.close_table()
            return True
        self._close_cell()
        if tag == "tr" or tag in GROUPS_OF_ROWS:
            table.has_open_row = False
        if tag in GROUPS_OF_ROWS:
            self._end_group(table)
        return True

    def _end_group(self, table: HtmlTable) -> None:
        """End a group of rows, beyond which no cell reaches."""
        table.has_open_row = False
        table.hidden_group = False
        if table.rows:
            table.rows[-1].ends_group = True


def parse_style(style: str) -> dict[str, str]:
    """Return the declarations of a style attribute."""
    declarations = {}
    for declaration in style.lower().split(";"):
        name, _, value = declaration.partition(":")
        if value.strip():
            declarations[name.strip()] = value.split("!")[0].strip()
    return declarations


def _make_counter(tag: str, attributes: Attributes) -> ListCounter:
    """Return the counter of a list's items."""
    if tag != "ol":
        return ListCounter(_find_number_kind(attributes, ""))
    kind = _find_number_kind(attributes, "1")
    start = _parse_whole_number(attributes, "start")
    if "reversed" not in attributes:
        return ListCounter(kind, 1 if start is None else start)
    if start is None:
        return ListCounter(kind, 0, -1, is_relative=True)
    return ListCounter(kind, start, -1)


def _find_number_kind(attributes: Attributes, default: str) -> str:
    """Return the kind of numbers of a list or an item, "" for none."""
    style = parse_style(attributes.get("style", ""))
    words = f"{style.get('list-style', '')} {style.get('list-style-type', '')}".split()
    for word in words:
        if word in NUMBER_STYLES:
            return NUMBER_STYLES[word]
    if any(word not in ("inside", "outside") for word in words):
        return ""
    kind = attributes.get("type", "")
    return kind if kind in KINDS else default


def _parse_whole_number(attributes: Attributes, name: str) -> int | None:
    """Return the whole number of an attribute as browsers read it; None without one."""
    found = re.match(r"\s*([+-]?\d{1,9})", attributes.get(name, ""))
    return int(found[1]) if found else None


def _parse_span(attributes: Attributes, name: str) -> int:
    """Return the value of colspan or rowspan as browsers read it; 1 unless there is one."""
    found = re.match(r"\s*\+?(\d{1,6})", attributes.get(name, ""))
    return int(found[1]) if found else 1
