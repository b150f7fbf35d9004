"""A program that reads a PDF, DOCX or HTML file from its standard input and writes the text.

extract.py runs it with bounds on memory and time, because a small file can expand without limit. It
imports nothing of the package, so it starts fast.
"""

import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

# Their content is not text of the page. It runs to their own end tag, whatever is in between.
HIDDEN_TAGS = ("script", "style", "title", "noscript")
# Tags before and after which a browser breaks the line.
BLOCKS = """
address article aside blockquote body br caption center dd details dialog dir div dl dt fieldset
figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li main menu nav
ol optgroup option p pre search section select summary table tbody textarea tfoot thead tr ul
"""
# What a tag puts into the text.
SEPARATORS = {"td": " ", "th": " ", **dict.fromkeys(BLOCKS.split(), "\n")}
# Names of a Word document's XML: what stands around paragraphs, rows and cells, or around a part of
# a paragraph, and is no text itself; what holds the text of a paragraph; and signs.
WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
AROUND = ("sdt", "sdtContent", "customXml", "ins", "moveTo")
INSIDE = ("r", "hyperlink", "smartTag", "fldSimple", "bdo", "dir", "ruby", "rubyBase")
SIGNS = {"tab": "\t", "ptab": "\t", "cr": "\n", "noBreakHyphen": "-"}
# An equation's own namespace, and what is put before some of its parts.
MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
MATH_SIGNS = {"den": "/", "sub": "_", "sup": "^"}
# What repeats a text box for older programs.
FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"
MAX_PAGES = 20_000  # of a PDF
MAX_TEXT_BYTES = 64 << 20  # no model reads as much
EXIT_MISSING_LIBRARY = 3  # the exit status if a library is not installed


class TooManyPagesError(Exception):
    """A PDF has more than MAX_PAGES pages."""


def extract_pdf(content: bytes) -> str:
    """Return the text of the pages; refuse more than MAX_PAGES instead of leaving some out."""
    from pypdf import PdfReader

    pages = PdfReader(io.BytesIO(content)).pages
    if len(pages) > MAX_PAGES:
        raise TooManyPagesError
    return "\n\n".join(page.extract_text() for page in pages)


def extract_docx(content: bytes) -> str:
    """Return the text of the paragraphs, tables and text boxes."""
    from docx import Document

    return "\n\n".join(iter_blocks(Document(io.BytesIO(content)).element.body))


def iter_blocks(container: Any) -> Iterator[str]:
    """Yield the paragraphs and tables in the XML of a document or a cell.

    A table has a line for each row, with tabs between the cells. Text boxes follow the paragraph
    that they belong to. Read from the XML, since python-docx leaves out what is in content controls
    and in tracked insertions.
    """
    for block in _iter_parts(container, ("p", "tbl")):
        if block.tag == WORD + "p":
            yield _read_paragraph(block)
            for box in _iter_boxes(block):
                yield from iter_blocks(box)
            continue
        lines = []
        for row in _iter_parts(block, ("tr",)):
            cells = []
            for cell in _iter_parts(row, ("tc",)):
                text = " ".join(iter_blocks(cell))
                cells.append(" ".join(text.split()))
            lines.append("\t".join(cells))
        yield "\n".join(lines)


def _iter_parts(container: Any, names: Sequence[str]) -> Iterator[Any]:
    """Yield the elements of some names in an element, also those inside of content controls and
    the like.
    """
    for element in container:
        if element.tag in [WORD + name for name in names]:
            yield element
        elif element.tag in [WORD + name for name in AROUND]:
            yield from _iter_parts(element, names)


def _iter_boxes(paragraph: Any) -> Iterator[Any]:
    """Yield the contents of a paragraph's text boxes, but not of boxes in them or deleted ones."""
    box_tag = WORD + "txbxContent"
    for box in paragraph.iter(box_tag):
        parents = takewhile(lambda parent: parent is not paragraph, box.iterancestors())
        if not {parent.tag for parent in parents} & {box_tag, WORD + "del", FALLBACK}:
            yield box


def _read_paragraph(element: Any) -> str:
    """Return the text of a paragraph, or of a part of one, without what was deleted from it."""
    parts = []
    for child in element:
        name = str(child.tag).removeprefix(WORD)
        if name == "t":
            parts.append(child.text or "")
        elif name in SIGNS:
            parts.append(SIGNS[name])
        elif name == "br":
            # The others end a page or a column.
            if child.get(WORD + "type", "textWrapping") == "textWrapping":
                parts.append("\n")
        elif name in INSIDE or name in AROUND:
            parts.append(_read_paragraph(child))
        elif name.startswith(MATH):
            parts.append(_read_equation(child, name.removeprefix(MATH)))
    return "".join(parts)


def _read_equation(element: Any, name: str) -> str:
    """Return the text of an equation or of a part of one, x^2 for a raised 2."""
    if name == "t":
        return element.text or ""
    text = _read_paragraph(element)
    return MATH_SIGNS.get(name, "") + text if text else ""


def extract_html(content: bytes) -> str:
    """Return what a browser would show as text."""
    collector = TextCollector()
    collector.feed(content.decode())
    collector.close()
    lines = []
    # A <pre> begins and ends a line, so that no line is in both kinds of groups.
    for preformatted, group in groupby(collector.parts, key=itemgetter(1)):
        text = "".join(part for part, _ in group)
        if preformatted:
            # A browser shows no line break at either end.
            kept = "\n".join(text.splitlines()).strip("\n")
            if kept.strip():
                lines.append(kept)
            continue
        for line in text.splitlines():
            words = line.split()
            if words:
                lines.append(" ".join(words))
    return "\n".join(lines)


class TextCollector(HTMLParser):
    """Collects the text outside of scripts and the like."""

    # Documented as an attribute to set, though typeshed has it as final.
    CDATA_CONTENT_ELEMENTS = HIDDEN_TAGS  # pyright: ignore[reportGeneralTypeIssues]

    def __init__(self) -> None:
        super().__init__()
        # Texts, and whether their white space is shown.
        self.parts: list[tuple[str, bool]] = []
        # The numbers of parts and of open <pre> at the start of each open <template>.
        self.template_starts: list[tuple[int, int]] = []
        self.open_pre = 0
        self.hidden = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Note what begins, which may be hidden, and break the line where a browser does."""
        self.hidden = tag in HIDDEN_TAGS
        if tag == "template":
            self.template_starts.append((len(self.parts), self.open_pre))
        self._add_separator(tag)
        if tag == "pre":
            self.open_pre += 1

    def handle_endtag(self, tag: str) -> None:
        """Note what ends; of a template, drop all that was in it."""
        self.hidden = False
        if tag == "template" and self.template_starts:
            start, self.open_pre = self.template_starts.pop()
            del self.parts[start:]
        if tag == "pre":
            self.open_pre = max(self.open_pre - 1, 0)
        self._add_separator(tag)

    def handle_data(self, data: str) -> None:
        """Take text that is shown."""
        if not self.hidden:
            self.parts.append((data, self.open_pre > 0))

    def _add_separator(self, tag: str) -> None:
        """Add what a tag puts into the text."""
        self.parts.append((SEPARATORS.get(tag, ""), self.open_pre > 0))


# A new kind also needs a row in FILE_TYPES and in CPU_SECONDS of extract.py.
EXTRACTORS = {"pdf": extract_pdf, "docx": extract_docx, "html": extract_html}


def main(kind: str, memory: int, seconds: int) -> int:
    """Read stdin, write its text to stdout, and return the exit status.

    On failure the last line of stderr is the error's type, or with EXIT_MISSING_LIBRARY the name of
    the library.

    Args:
        kind: A key of EXTRACTORS.
        memory: Bytes that this process may use.
        seconds: Seconds of processor time that it may use.
    """
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such bounds
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        text = EXTRACTORS[kind](sys.stdin.buffer.read())
        payload = text.replace("\0", "").encode(errors="replace")
        if len(payload) > MAX_TEXT_BYTES:
            raise MemoryError  # reported like a document that needs too much memory
    except ImportError as error:
        print(f"\n{error.name}", file=sys.stderr)
        return EXIT_MISSING_LIBRARY
    except BaseException as error:  # libraries raise many kinds of errors on a hostile file
        print(f"\n{type(error).__name__}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(payload)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
