"""The text of a PDF, and which of its pages could not be read.

- Values of form fields ("name: value", "[x] name" for a ticked box) and the texts of free text
  annotations follow the text of their page. Passwords and hidden fields are not read.
- Pictures are not read: there is no OCR. Text in a font that does not say which characters its
  codes are is left out, since the codes themselves would be wrong words.

pypdf repairs what it can and only logs that it did, so the log is watched while a page is read, and
compressed streams are checked again.
"""

import io
import logging
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

MAX_PAGES = 20_000
# A page with fewer letters and digits than STAMP_LETTERS and a picture of SCAN_PIXELS or more is
# taken for a scanned one, on which a program has stamped a line.
STAMP_LETTERS = 40
SCAN_PIXELS = 1_000_000
MANY_CURVES = 200  # of a page without text: its letters may have been turned into drawings
MAX_BAD_SHARE = 0.1  # of a page's characters
CHECKED_BYTES = 1 << 20  # that are decompressed at a time
DIRECTIONS = (0, 90, 180, 270)  # of text, in degrees
# Operators of a page's content that show text.
TEXT_OPERATORS = (b"Tj", b"TJ", b"'", b'"')
# Only on pages with at most this many operators, turned text is read apart from the rest, because
# that takes a pass for each direction.
MAX_OPERATORS = 20_000
LEAST_UPWARD = 1e-6  # below it, text is turned by a quarter
MAX_DEPTH = 20  # of forms in forms, and of fields in fields
# Codes of these fonts are known characters without a map: Unicode, and what pypdf can decode.
KNOWN_CODES = re.compile(
    r"/.*(?:UCS2|UTF16)|/(?:GBK?|GBpc)-EUC-|/GBK2K-|/ETen(?:ms)?-B5-|/90ms-RKSJ-"
)
# What pypdf writes for a glyph whose name is not that of a character.
GLYPH_NAME = re.compile(r"/[A-Za-z_.]{0,8}\d+")
# Flags of annotations that are not shown, and of fields.
HIDDEN_FLAGS = 1 << 1 | 1 << 5
PASSWORD, RADIO, PUSH_BUTTON = 1 << 13, 1 << 15, 1 << 16
# What pypdf logs if text is lost: the modules that log it, and how such a message of a different
# module begins. Other messages are about what it repairs without loss.
LOSS_LOGS = ("pypdf.filters", "pypdf._page")
LOSS_MESSAGE = "Expected StreamObject"


class TooManyPagesError(Exception):
    """A PDF has more than MAX_PAGES pages."""


class DynamicFormError(Exception):
    """A PDF has a program that draws its pages, which only Adobe's reader runs."""


class LogWatch(logging.Handler):
    """A log handler that notes whether pypdf has logged that it could not read something."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.has_loss = False

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record."""
        if record.name.startswith(LOSS_LOGS) or str(record.msg).startswith(LOSS_MESSAGE):
            self.has_loss = True


def extract_pdf(content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text of the pages, and which of them could not be read.

    Returns:
        The text, and numbers of pages from 1 on: "damaged", "pictures" for pages without text but
        with pictures, and "unmapped" for those in fonts without a map to characters; "missing" is
        how many pages the file lists and does not have.

    Raises:
        TooManyPagesError: There are more than MAX_PAGES pages; none is left out.
        DynamicFormError: The pages are drawn by a program.
    """
    from pypdf import PdfReader

    watch = LogWatch()
    log = logging.getLogger("pypdf")
    log.addHandler(watch)
    log.propagate = False
    reader = PdfReader(io.BytesIO(content))
    pages = reader.pages
    if len(pages) > MAX_PAGES:
        raise TooManyPagesError
    root = resolve(reader.trailer["/Root"])
    if getattr(resolve(root.get("/NeedsRendering")), "value", False):
        raise DynamicFormError
    texts = []
    notices: dict[str, Any] = {"damaged": [], "pictures": [], "unmapped": []}
    checked: dict[Any, bool] = {}
    for number, page in enumerate(pages, 1):
        watch.has_loss = False
        reading = PageReading(page, checked)
        texts.append(reading.read())
        if reading.is_damaged or watch.has_loss:
            notices["damaged"].append(number)
        elif reading.is_picture:
            notices["pictures"].append(number)
        if reading.is_unmapped:
            notices["unmapped"].append(number)
    listed = _count_pages(root)
    if listed > len(texts):
        notices["missing"] = listed - len(texts)
    return "\n\n".join(texts), {name: value for name, value in notices.items() if value}


def _count_pages(root: Any) -> int:
    """Return how many pages a file says that it has."""
    tree = resolve(root.get("/Pages"))
    if not isinstance(tree, dict):
        return 0
    return resolve_number(tree.get("/Count"))


def resolve(value: Any) -> Any:
    """Return the object that a reference leads to; None if it leads nowhere."""
    from pypdf.generic import NullObject

    if hasattr(value, "get_object"):
        value = value.get_object()
    if isinstance(value, NullObject):
        return None
    return value


def resolve_number(value: Any) -> int:
    """Return the whole number that a reference leads to; 0 for anything else."""
    found = resolve(value)
    if isinstance(found, int):
        return found
    return 0


def resolve_list(value: Any) -> list:
    """Return the list that a reference leads to; an empty one for anything else."""
    found = resolve(value)
    if isinstance(found, list):
        return found
    return []


def resolve_entries(value: Any) -> list:
    """Return the values of the dictionary that a reference leads to; none for anything else."""
    found = resolve(value)
    if isinstance(found, dict):
        return list(found.values())
    return []


class PageReading:
    """A page while it is read, with what could not be read of it.

    Args:
        page: The page.
        checked: For the streams that were checked on earlier pages, whether they are whole.
    """

    def __init__(self, page: Any, checked: dict[Any, bool]) -> None:
        self.page = page
        self.checked = checked
        self.is_damaged = False
        self.is_picture = False
        self.is_unmapped = False
        self.pixels = 0  # of the largest picture
        self.has_picture = False
        self.has_unmapped_fonts = False

    def read(self) -> str:
        """Return the text of the page, and note what could not be read."""
        text = ""
        try:
            self._look_at_resources(self.page, set(), 0)
            text = self._extract_text()
            self._look_at_content(text)
        except MemoryError:
            raise
        except Exception:  # pypdf raises many kinds of errors on a damaged page
            self.is_damaged = True
        values = []
        try:
            values = list(iter_values(self.page))
        except MemoryError:
            raise
        except Exception:
            self.is_damaged = True
        return "\n".join([text, *values] if text else values)

    def _extract_text(self) -> str:
        """Return the text of the page without what its fonts do not map to characters."""
        directions = set()
        operators = 0

        def note_direction(operator: Any, _operands: Any, matrix: Any, text_matrix: Any) -> None:
            nonlocal operators
            operators += 1
            if operator in TEXT_OPERATORS:
                directions.add(find_direction(text_matrix, matrix))

        text = self._extract_directions(DIRECTIONS, visitor_operand_before=note_direction)
        if len(directions) > 1 and operators <= MAX_OPERATORS:
            # pypdf joins turned text, such as the label of an axis, to the text before it.
            texts = [self._extract_directions((each,)).strip() for each in sorted(directions)]
            text = "\n".join(filter(None, texts))
        text = text.encode("utf-8", "replace").decode()
        bad = sum(map(is_bad_character, text)) + len(GLYPH_NAME.findall(text)) * 2
        shown = sum(not char.isspace() for char in text)
        # One or two may be bullets of a symbol font.
        if bad >= 3 and bad > MAX_BAD_SHARE * shown:
            self.is_unmapped = True
        return text

    def _extract_directions(self, directions: tuple[int, ...], **visitors: Any) -> str:
        """Return the text of some directions without what its fonts do not map to characters."""
        if not self.has_unmapped_fonts:
            return self.page.extract_text(orientations=directions, **visitors)
        runs: list[tuple[str, Any]] = []

        def note_run(text: str, _matrix: Any, _text_matrix: Any, font: Any, _size: Any) -> None:
            runs.append((text, font))

        text = self.page.extract_text(orientations=directions, visitor_text=note_run, **visitors)
        return self._leave_out_unmapped(text, runs)

    def _leave_out_unmapped(self, text: str, runs: list[tuple[str, Any]]) -> str:
        """Return the text of a page without its runs in fonts that have no map."""
        kept = []
        position = 0
        for run, font in runs:
            shown = run.strip()
            if not shown or font is None or is_mapped(font):
                continue
            self.is_unmapped = True
            start = text.find(shown, position)
            if start < 0:  # it was written in a different order
                return ""
            kept.append(text[position:start])
            position = start + len(shown)
        return "".join(kept) + text[position:]

    def _look_at_resources(self, holder: Any, seen: set[int], depth: int) -> None:
        """Note the fonts and pictures of the page, or of a form on it, and check their streams."""
        resources = resolve(holder.get("/Resources"))
        if not isinstance(resources, dict) or id(resources) in seen:
            return
        seen.add(id(resources))
        for reference in resolve_entries(resources.get("/Font")):
            font = resolve(reference)
            if not isinstance(font, dict):
                continue
            self.has_unmapped_fonts = self.has_unmapped_fonts or not is_mapped(font)
            self._check_stream(font.get("/ToUnicode"))
        for reference in resolve_entries(resources.get("/XObject")):
            found = resolve(reference)
            if not isinstance(found, dict):
                continue
            if found.get("/Subtype") == "/Image":
                self.has_picture = True
                sides = [resolve(found.get(side)) for side in ("/Width", "/Height")]
                if all(isinstance(side, int) for side in sides):
                    self.pixels = max(self.pixels, sides[0] * sides[1])
            elif found.get("/Subtype") == "/Form":
                self._check_stream(reference)
                if depth < MAX_DEPTH:
                    self._look_at_resources(found, seen, depth + 1)

    def _look_at_content(self, text: str) -> None:
        """Check the content of the page, and note whether it shows pictures instead of text."""
        reference = self.page.get("/Contents")
        content = resolve(reference)
        if content is None:
            # A page may have no content, but must not name content that is missing.
            self.is_damaged = self.is_damaged or reference is not None
            return
        # The content is one stream, or a list of its parts.
        parts = [reference]
        if isinstance(content, list):
            parts = content
        for part in parts:
            self._check_stream(part)
        letters = sum(letter.isalnum() for letter in text)
        if letters == 0 and not self.has_picture and not self.is_unmapped:
            data = self.page.get_contents().get_data()
            has_inline_picture = re.search(rb"\bBI\b.{0,2000}?\bID\b", data, re.DOTALL)
            curves = re.findall(rb"\d\s+[cvy]\s", data[: 1 << 22])
            self.is_picture = bool(has_inline_picture) or len(curves) >= MANY_CURVES
        elif self.has_picture:
            is_scan = letters < STAMP_LETTERS and self.pixels >= SCAN_PIXELS
            self.is_picture = letters == 0 or is_scan

    def _check_stream(self, reference: Any) -> None:
        """Note damage of a stream."""
        stream = resolve(reference)
        if stream is None or not hasattr(stream, "get_data"):
            return
        key = getattr(reference, "idnum", None) or id(stream)
        if key not in self.checked:
            self.checked[key] = is_whole(stream)
        if not self.checked[key]:
            self.is_damaged = True


def is_whole(stream: Any) -> bool:
    """Return whether a compressed stream ends as it should, which pypdf does not check."""
    first = resolve(stream.get("/Filter"))
    if isinstance(first, list) and first:
        first = resolve(first[0])
    # pypdf has no public name for the compressed bytes.
    data = getattr(stream, "_data", b"")
    if first not in ("/FlateDecode", "/Fl") or not data:
        return True
    try:
        if _reaches_end(data, zlib.MAX_WBITS):
            return True
        # Some programs leave out the checksum at the end, without loss.
        return _reaches_end(data[2:], -zlib.MAX_WBITS)
    except zlib.error:
        return False


def _reaches_end(data: bytes, bits: int) -> bool:
    """Return whether compressed data has its end; raise zlib.error if it is damaged."""
    decompressor = zlib.decompressobj(bits)
    while data and not decompressor.eof:
        decompressor.decompress(data, CHECKED_BYTES)
        data = decompressor.unconsumed_tail
    return decompressor.eof


def find_direction(text_matrix: Sequence[float], matrix: Sequence[float]) -> int:
    """Return the direction of text in degrees, rounded as pypdf does for `orientations`.

    Args:
        text_matrix: The six numbers of the operator Tm. The first two are the direction of a line
            of text, the next two the direction from the feet of its letters to their tops.
        matrix: The six numbers of all operators cm so far.
    """
    upward = text_matrix[2] * matrix[1] + text_matrix[3] * matrix[3]
    if abs(upward) > LEAST_UPWARD:
        return 0 if upward > 0 else 180
    rise = text_matrix[0] * matrix[1] + text_matrix[1] * matrix[3]
    return 90 if rise > 0 else 270


def is_mapped(font: Any) -> bool:
    """Return whether a font says which characters its codes are.

    Fonts of one byte mostly have names for their codes. Those of several bytes number the shapes of
    letters; without a map from these numbers, pypdf mistakes them for other characters.
    """
    if resolve(font.get("/ToUnicode")) is not None:
        return True
    if font.get("/Subtype") == "/Type0":
        encoding = resolve(font.get("/Encoding"))
        return isinstance(encoding, str) and KNOWN_CODES.match(encoding) is not None
    if font.get("/Subtype") == "/Type3":
        names = resolve(font.get("/CharProcs"))
        if isinstance(names, dict) and names:
            return not all(GLYPH_NAME.fullmatch(str(name)) for name in names)
    return True


def is_bad_character(char: str) -> bool:
    """Return whether a character is for private use, a replacement character, or a control code."""
    code = ord(char)
    is_control = (code < 0x20 and not char.isspace()) or 0x7F <= code < 0xA0
    return is_control or 0xE000 <= code <= 0xF8FF or code == 0xFFFD or code >= 0xF0000


# Values of fields and texts of annotations.


def iter_values(page: Any) -> Iterator[str]:
    """Yield the values of a page's form fields, and the texts of its free text annotations."""
    seen = set()
    for reference in resolve_list(page.get("/Annots")):
        annotation = resolve(reference)
        if not isinstance(annotation, dict):
            continue
        flags = resolve(annotation.get("/F"))
        if isinstance(flags, int) and flags & HIDDEN_FLAGS:
            continue
        line = ""
        if annotation.get("/Subtype") == "/FreeText":
            line = read_text(annotation.get("/Contents"))
        elif annotation.get("/Subtype") == "/Widget":
            line = read_field(annotation)
        if line.strip() and line not in seen:
            # A field with several widgets on a page is read once.
            if annotation.get("/Subtype") == "/Widget":
                seen.add(line)
            yield line


def read_text(value: Any) -> str:
    """Return a text, which may be in a stream."""
    found = resolve(value)
    if hasattr(found, "get_data"):
        data = found.get_data()
        # As in strings: UTF-16 or UTF-8 with a byte order mark, else Latin-1.
        encoding = "utf-16" if data[:2] in (b"\xfe\xff", b"\xff\xfe") else "latin-1"
        if data.startswith(b"\xef\xbb\xbf"):
            encoding = "utf-8-sig"
        found = data.decode(encoding, "replace")
    if isinstance(found, bytes):
        found = found.decode("latin-1")
    if not isinstance(found, str):
        return ""
    return found.replace("\r\n", "\n").replace("\r", "\n")


def find_inherited(field: Any, name: str) -> Any:
    """Return an entry of a field, which the field may inherit from its parents."""
    for _ in range(MAX_DEPTH):
        if not isinstance(field, dict):
            break
        value = resolve(field.get(name))
        if value is not None:
            return value
        field = resolve(field.get("/Parent"))
    return None


def read_field(widget: Any) -> str:
    """Return the name and value of a form field, or "" for one without a value."""
    flags = resolve_number(find_inherited(widget, "/Ff"))
    kind = find_inherited(widget, "/FT")
    label = find_inherited(widget, "/TU") or find_inherited(widget, "/T")
    name = " ".join(read_text(label).split())
    value = find_inherited(widget, "/V")
    text = ""
    if kind == "/Btn":
        if flags & PUSH_BUTTON:
            return ""
        return _read_button(widget, name, value, bool(flags & RADIO))
    if kind == "/Tx" and not flags & PASSWORD:
        text = read_text(value)
    elif kind == "/Ch":
        shown = _read_options(find_inherited(widget, "/Opt"))
        values = [value]
        if isinstance(value, list):
            values = value
        chosen = [read_text(each) for each in values]
        text = ", ".join(shown.get(each, each) for each in chosen)
    if not text.strip():
        return ""
    if not name:
        return text
    return f"{name}: {text}"


def _read_button(widget: Any, name: str, value: Any, is_radio: bool) -> str:
    """Return whether a box is ticked, or which of several round buttons is chosen."""
    state = resolve(widget.get("/AS"))
    if state is None:
        state = value
    is_on = isinstance(state, str) and state not in ("/Off", "")
    if not is_radio:
        box = "[x]" if is_on else "[ ]"
        return f"{box} {name}"
    chosen = ""
    if is_on:
        chosen = str(state).removeprefix("/")
    if not chosen:
        return ""
    return f"{name}: {chosen}"


def _read_options(options: Any) -> dict[str, str]:
    """Return the text that a field of choices shows for each of its values."""
    shown = {}
    for reference in resolve_list(options):
        option = resolve(reference)
        if isinstance(option, list) and len(option) == 2:
            shown[read_text(option[0])] = read_text(option[1])
    return shown
