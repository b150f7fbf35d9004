"""The text of a Word document (DOCX).

- Headers come first, each text once, then the document, then footers, then footnotes and endnotes.
  Footnotes and endnotes are numbered together, in the order in which the text names them: "[1]" in
  the text, and "[1] ..." at the end.
- A table has a line for each row and a tab between two cells, also empty ones. A cell over several
  columns is followed by empty cells, and one over several rows is repeated in each, so that every
  value stays in its column and every row says what it belongs to.
- Of tracked changes, what was inserted is read, and what was deleted is not. Hidden text and the
  codes of fields are not read either.
- A paragraph of a numbered list begins with its number, as in word_lists.py.
- Raised and lowered text is written as in raised.py, and equations as in equations.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

from restorekv.readers.raised import LOWERED, RAISED, mark, remove_markers, write_plainly
from restorekv.readers.symbol_fonts import UNKNOWN, find_symbol, is_symbol_font
from restorekv.readers.word_equations import MATH, read_equation
from restorekv.readers.word_lists import WordLists
from restorekv.readers.word_package import COMPATIBILITY, WORD, WordPackage, is_on, read_number

# Names of a Word document's XML: elements around paragraphs, rows and cells, or around a part of a
# paragraph, that are not text themselves; elements that hold the text of a paragraph; and single
# characters.
AROUND = ("sdt", "sdtContent", "customXml", "ins", "moveTo")
INSIDE = ("hyperlink", "smartTag", "fldSimple", "bdo", "dir", "ruby", "rubyBase")
CHARACTERS = {"tab": "\t", "ptab": "\t", "cr": "\n", "br": "\n", "noBreakHyphen": "-"}
DELETED = ("del", "moveFrom")
# Several forms of one thing, for newer and older programs.
ALTERNATIVES = COMPATIBILITY + "AlternateContent"
FORMS = (COMPATIBILITY + "Choice", COMPATIBILITY + "Fallback")
# Elements that name another file, such as a page of HTML; Word shows its content in their place.
INSERTED = (WORD + "altChunk", WORD + "subDoc")
RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
MAX_COLUMNS = 1000  # that one cell, or the space before a row, may span; Word has 63
MAX_REPEATED = 200  # characters of a cell that is repeated in further rows

Piece = tuple[str, str]  # RAISED, LOWERED or "", and a text


def extract_docx(content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text of a document and notices: how many symbols are not known ("symbols") and how
    many files Word inserts when it opens the document ("inserted"), if there are any.
    """
    reader = DocumentReader(WordPackage(content))
    text = "\n\n".join(reader.read())
    notices = {}
    if reader.unknown_symbols:
        notices["symbols"] = reader.unknown_symbols
    inserted = len(list(reader.body.iter(*INSERTED)))
    if inserted:
        notices["inserted"] = inserted
    return text, notices


def get_number(element: Any, default: int = 0) -> int:
    """Return the value of an element as a number from 0 to MAX_COLUMNS."""
    return read_number(element, default, MAX_COLUMNS)


def choose_form(alternatives: Any) -> Any | None:
    """Return the first of several forms of one thing that has text, or None."""
    texts = (WORD + "t", WORD + "sym", MATH + "t")
    for name in FORMS:
        for form in alternatives.findall(name):
            if any((part.text or part.get(WORD + "char")) for part in form.iter(*texts)):
                return form
    return None


def iter_parts(container: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the elements of some names in an element, also those inside content controls and
    similar wrappers.
    """
    for element in container:
        name = str(element.tag).removeprefix(WORD)
        if name in names:
            yield element
        elif name in AROUND:
            yield from iter_parts(element, names)
        elif name == ALTERNATIVES:
            form = choose_form(element)
            if form is not None:
                yield from iter_parts(form, names)


def iter_boxes(element: Any) -> Iterator[Any]:
    """Yield the contents of the text boxes in a paragraph, but not of boxes in them or deleted
    ones.
    """
    for child in element:
        name = str(child.tag).removeprefix(WORD)
        if name == "txbxContent":
            yield child
        elif name == ALTERNATIVES:
            form = choose_form(child)
            if form is not None:
                yield from iter_boxes(form)
        elif name not in DELETED:
            yield from iter_boxes(child)


@dataclass
class Fields:
    """The fields that are open at a position in a text.

    Attributes:
        in_code: For each of them whether the position is in its code, before its result.
    """

    in_code: list[bool] = field(default_factory=list)

    def note(self, kind: str) -> None:
        """Note a field's begin, separation of code and result, or end."""
        if kind == "begin":
            self.in_code.append(True)
        elif kind == "separate" and self.in_code:
            self.in_code[-1] = False
        elif kind == "end" and self.in_code:
            self.in_code.pop()


class DocumentReader:
    """A reader of a document with its headers, footers and notes.

    Args:
        package: The document's parts.

    Raises:
        KeyError: There is no document in it.
    """

    def __init__(self, package: WordPackage) -> None:
        self.package = package
        main = package.find_main_part()
        self.relations = package.read_relations(main)
        self.body = package.read_part(main).find(WORD + "body")
        if self.body is None:
            raise KeyError("body")
        self.unknown_symbols = 0
        self.fields = Fields()
        self.has_whole_fields = True
        self.notes: list[tuple[str, str]] = []  # kinds and ids, in the order of their numbers
        self.numbers: dict[tuple[str, str], int] = {}
        self.vertical_styles = self._read_vertical_styles()
        self.lists = WordLists(self._find_related("numbering"), self._find_related("styles"))

    def read(self) -> Iterator[str]:
        """Yield the paragraphs and tables of the document and of what belongs to it."""
        yield from self._read_margins("headerReference")
        yield from self._read_story(self.body)
        yield from self._read_margins("footerReference")
        notes = {**self._find_notes("footnote"), **self._find_notes("endnote")}
        # The list may grow meanwhile, because a note may name further notes.
        for number, note in enumerate(self.notes, 1):
            if note in notes:
                yield f"[{number}] " + "\n".join(self._read_story(notes[note]))

    def _find_related(self, kind: str) -> Any | None:
        """Return the XML of a part that the document names by its kind, such as "footnotes"."""
        for relation in self.relations.values():
            if relation.target and relation.kind == kind:
                return self.package.read_part(relation.target)
        return None

    def _read_vertical_styles(self) -> dict[str, str]:
        """Return Word's vertical alignment of styles, own or inherited, by the styles' ids."""
        root = self._find_related("styles")
        if root is None:
            return {}
        own: dict[str, str] = {}
        bases: dict[str, str] = {}
        for style in root.findall(WORD + "style"):
            style_id = style.get(WORD + "styleId", "")
            aligned = style.find(f"{WORD}rPr/{WORD}vertAlign")
            base = style.find(WORD + "basedOn")
            if aligned is not None:
                own[style_id] = aligned.get(WORD + "val", "")
            if base is not None:
                bases[style_id] = base.get(WORD + "val", "")
        styles = {}
        for style_id in {*own, *bases}:
            name = style_id
            for _ in range(10):  # styles that are based on each other may go in a circle
                if name in own or name not in bases:
                    break
                name = bases[name]
            styles[style_id] = own.get(name, "")
        return styles

    def _read_margins(self, kind: str) -> Iterator[str]:
        """Yield the texts of all headers or footers that are shown, each once."""
        settings = self._find_related("settings")
        shown = {"default"}
        if settings is not None and is_on(settings.find(WORD + "evenAndOddHeaders")):
            shown.add("even")
        seen = set()
        for section in self.body.iter(WORD + "sectPr"):
            kinds = set(shown)
            if is_on(section.find(WORD + "titlePg")):
                kinds.add("first")
            for reference in section.findall(WORD + kind):
                relation = self.relations.get(reference.get(RELATION, ""))
                if reference.get(WORD + "type", "default") not in kinds:
                    continue
                if relation is None or not relation.target:
                    continue
                blocks = self._read_story(self.package.read_part(relation.target))
                text = "\n".join(block for block in blocks if block.strip())
                if text and text not in seen:
                    seen.add(text)
                    yield text

    def _find_notes(self, kind: str) -> dict[tuple[str, str], Any]:
        """Return the XML of all footnotes or endnotes."""
        root = self._find_related(f"{kind}s")
        if root is None:
            return {}
        return {(kind, note.get(WORD + "id", "")): note for note in root.findall(WORD + kind)}

    def _read_story(self, container: Any) -> list[str]:
        """Return the paragraphs and tables of the document, a header or a note."""
        outer = self.fields
        outer_numbers = self.lists.begin_story()
        self.fields = Fields()
        # If a field does not end, no text is taken for the code of a field.
        self.has_whole_fields = _has_whole_fields(container)
        blocks = list(self.read_blocks(container))
        self.fields = outer
        self.lists.end_story(outer_numbers)
        return blocks

    def read_blocks(self, container: Any, counts: bool = True) -> Iterator[str]:
        """Yield the paragraphs and tables in the XML of a document or a cell, with the numbers of
        lists if `counts` is set.

        Text boxes follow the paragraph that they belong to. The XML itself is read, since
        python-docx leaves out what is in content controls and in tracked insertions.
        """
        before = ""
        for block in iter_parts(container, ("p", "tbl")):
            if block.tag == WORD + "tbl":
                yield "\n".join(self._read_rows(block))
                continue
            text = before + self._read_paragraph(block)
            before = ""
            mark_of_end = block.find(f"{WORD}pPr/{WORD}rPr")
            if mark_of_end is not None and any(
                mark_of_end.find(WORD + name) is not None for name in DELETED
            ):
                # The end of the paragraph was deleted, so the next one continues it.
                before = text
            else:
                is_hidden = mark_of_end is not None and is_on(mark_of_end.find(WORD + "vanish"))
                number = ""
                if counts and (text or not is_hidden):
                    number = remove_markers(self.lists.number_paragraph(block))
                yield (number + write_plainly(text)).strip("\n")
            for box in iter_boxes(block):
                outer_numbers = self.lists.begin_story()
                yield from self.read_blocks(box, counts)
                self.lists.end_story(outer_numbers)
        if before:
            yield write_plainly(before)

    def _read_rows(self, table: Any) -> Iterator[str]:
        """Yield the lines of a table."""
        above: dict[int, str] = {}  # by column: what a cell that continues the one above repeats
        for row in iter_parts(table, ("tr",)):
            properties = row.find(WORD + "trPr")
            if properties is not None and properties.find(WORD + "del") is not None:
                continue
            values = []
            if properties is not None:
                values = [""] * get_number(properties.find(WORD + "gridBefore"))
            span = 1
            for cell in iter_parts(row, ("tc",)):
                span = self._add_cell(cell, values, above)
            # Without the empty cells at the end that come only from a wide cell.
            yield "\t".join(values[: len(values) - span + 1])

    def _add_cell(self, cell: Any, values: list[str], above: dict[int, str]) -> int:
        """Add the value of a cell, with an empty one for each further column that it spans; return
        how many columns it spans.
        """
        column = len(values)
        span = 1
        is_deleted = False
        continues = False
        properties = cell.find(WORD + "tcPr")
        if properties is not None:
            is_deleted = properties.find(WORD + "cellDel") is not None
            span = max(get_number(properties.find(WORD + "gridSpan"), 1), 1)
            merged = properties.find(WORD + "vMerge")
            continues = merged is not None and merged.get(WORD + "val", "continue") == "continue"
        # Word shows no number in what belongs to the cell above.
        blocks = self.read_blocks(cell, counts=not is_deleted and not continues)
        text = " ".join(" ".join(blocks).split())
        if is_deleted:
            text = ""
        if continues:
            text = text or above.get(column, "")
        above[column] = text if len(text) <= MAX_REPEATED else ""
        values.append(text)
        values.extend([""] * (span - 1))
        return span

    def _read_paragraph(self, element: Any) -> str:
        """Return the text of a paragraph, with the markers of raised.py."""
        return join_pieces(self._iter_pieces(element))

    def _iter_pieces(self, element: Any) -> Iterator[Piece]:
        """Yield the text in a paragraph or a part of one, without what was deleted from it."""
        for child in element:
            name = str(child.tag).removeprefix(WORD)
            if name == "r":
                yield from self._iter_run(child)
            elif name in INSIDE or name in AROUND:
                yield from self._iter_pieces(child)
            elif name == ALTERNATIVES:
                form = choose_form(child)
                if form is not None:
                    yield from self._iter_pieces(form)
            elif name.startswith(MATH):
                yield "", read_equation(child, self._read_in_equation)

    def _read_in_equation(self, element: Any) -> str:
        """Return the text of an element in an equation that is not of Office MathML."""
        name = str(element.tag).removeprefix(WORD)
        if name == "r":
            return join_pieces(self._iter_run(element))
        if name in AROUND:
            return join_pieces(self._iter_pieces(element))
        return ""

    def _iter_run(self, run: Any) -> Iterator[Piece]:
        """Yield the text of a run, which is raised or lowered as a whole."""
        properties = run.find(WORD + "rPr")
        marker = ""
        font = ""
        if properties is not None:
            if is_on(properties.find(WORD + "vanish")):
                # Fields may begin and end in hidden text.
                self._note_fields(run)
                return
            marker = self._find_marker(properties)
            fonts = properties.find(WORD + "rFonts")
            if fonts is not None:
                font = fonts.get(WORD + "ascii") or fonts.get(WORD + "hAnsi", "")
        for child in run:
            name = str(child.tag).removeprefix(WORD)
            if name == "fldChar":
                self.fields.note(child.get(WORD + "fldCharType", ""))
                yield "", _read_form_field(child)
            elif self.has_whole_fields and any(self.fields.in_code):
                continue
            elif name in ("footnoteReference", "endnoteReference"):
                yield "", self._number_note(name.removesuffix("Reference"), child)
            elif name == "t":
                yield marker, self._replace_symbols(remove_markers(child.text or ""), font)
            elif name == "sym":
                yield marker, self._read_symbol(child)
            elif name in CHARACTERS:
                yield marker, CHARACTERS[name]
            elif name in INSIDE or name in AROUND:
                yield from self._iter_pieces(child)
            elif name == ALTERNATIVES:
                form = choose_form(child)
                if form is not None:
                    yield from self._iter_run(form)

    def _find_marker(self, properties: Any) -> str:
        """Return RAISED, LOWERED or "", by the properties of a run."""
        aligned = properties.find(WORD + "vertAlign")
        style = properties.find(WORD + "rStyle")
        value = ""
        if aligned is not None:
            value = aligned.get(WORD + "val", "")
        elif style is not None:
            value = self.vertical_styles.get(style.get(WORD + "val", ""), "")
        return {"superscript": RAISED, "subscript": LOWERED}.get(value, "")

    def _note_fields(self, run: Any) -> None:
        """Note the begins and ends of fields in a run."""
        for child in run.iterchildren(WORD + "fldChar"):
            self.fields.note(child.get(WORD + "fldCharType", ""))

    def _number_note(self, kind: str, reference: Any) -> str:
        """Return the mark of a note, such as "[1]"; give a new note the next number."""
        note = (kind, reference.get(WORD + "id", ""))
        if note not in self.numbers:
            self.notes.append(note)
            self.numbers[note] = len(self.notes)
        return f"[{self.numbers[note]}]"

    def _read_symbol(self, element: Any) -> str:
        """Return the symbol of an element that names a font and a code instead of a character."""
        try:
            code = int(element.get(WORD + "char", ""), 16)
        except ValueError:
            return ""
        symbol = find_symbol(element.get(WORD + "font", ""), code)
        self.unknown_symbols += symbol == UNKNOWN
        return symbol

    def _replace_symbols(self, text: str, font: str) -> str:
        """Return a run's text; if its font is a symbol font, its codes become characters."""
        if not is_symbol_font(font):
            return text
        symbols = [find_symbol(font, ord(char)) for char in text]
        self.unknown_symbols += symbols.count(UNKNOWN)
        return "".join(symbols)


def join_pieces(pieces: Iterable[Piece]) -> str:
    """Return text with markers around what is raised or lowered, which may be in several runs."""
    joined = []
    texts = (piece for piece in pieces if piece[1])
    for marker, group in groupby(texts, key=itemgetter(0)):
        text = "".join(piece for _, piece in group)
        joined.append(mark(marker, text) if marker else text)
    return "".join(joined)


def _has_whole_fields(container: Any) -> bool:
    """Return whether every field that is not deleted has its end."""
    depth = 0
    for mark_of_field in container.iter(WORD + "fldChar"):
        if any(parent.tag in DELETED_TAGS for parent in mark_of_field.iterancestors()):
            continue
        kind = mark_of_field.get(WORD + "fldCharType", "")
        depth += (kind == "begin") - (kind == "end")
        if depth < 0:
            return False
    return depth == 0


DELETED_TAGS = {WORD + name for name in DELETED}


def _read_form_field(begin: Any) -> str:
    """Return the text that an old form field shows: a box, or the entry of a list."""
    box = begin.find(f"{WORD}ffData/{WORD}checkBox")
    if box is not None:
        checked = box.find(WORD + "checked")
        if checked is None:
            checked = box.find(WORD + "default")
        return "[x]" if is_on(checked) else "[ ]"
    choices = begin.find(f"{WORD}ffData/{WORD}ddList")
    if choices is not None:
        entries = choices.findall(WORD + "listEntry")
        chosen = choices.find(WORD + "result")
        if chosen is None:
            chosen = choices.find(WORD + "default")
        number = get_number(chosen)
        if number < len(entries):
            return remove_markers(entries[number].get(WORD + "val", ""))
    return ""
