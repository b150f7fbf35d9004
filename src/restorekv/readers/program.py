"""A program that reads a PDF, DOCX or HTML file from its standard input and writes the text.

extract.py runs it with bounds on memory and time, since a small file may unfold without end. It
imports nothing of the package, so it starts fast.
"""

import contextlib
import io
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

HIDDEN = ("script", "style", "title", "noscript")  # nothing but their own end tag ends them
BLOCKS = """
address article aside blockquote body br caption center dd details dialog dir div dl dt fieldset
figcaption figure footer form h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li main menu nav
ol optgroup option p pre search section select summary table tbody textarea tfoot thead tr ul
"""
BREAKS = {"td": " ", "th": " ", **dict.fromkeys(BLOCKS.split(), "\n")}
PAGES = 20_000  # of a PDF
LARGEST = 64 << 20  # bytes of a text; no model reads as much
MISSING = 3  # the exit status where a library is not installed


def extract_pdf(content: bytes) -> str:
    """Return the text of the pages."""
    from pypdf import PdfReader

    pages = PdfReader(io.BytesIO(content)).pages[:PAGES]
    return "\n\n".join(page.extract_text() for page in pages)


def extract_docx(content: bytes) -> str:
    """Return the text of the paragraphs and tables."""
    from docx import Document

    return "\n\n".join(iter_blocks(Document(io.BytesIO(content))))


def iter_blocks(place: Any) -> Iterator[str]:
    """Yield the paragraphs and tables of a document or a cell.

    A table has a line for each row, with tabs between the cells.
    """
    from docx.table import _Cell

    for block in place.iter_inner_content():
        if not hasattr(block, "rows"):
            yield block.text
            continue
        lines = []
        for row in block.rows:
            # Not row.cells, which repeats merged cells.
            cells = []
            for element in row._tr.tc_lst:
                text = " ".join(iter_blocks(_Cell(element, block)))
                cells.append(" ".join(text.split()))
            lines.append("\t".join(cells))
        yield "\n".join(lines)


def extract_html(content: bytes) -> str:
    """Return what a browser would show as text."""
    collector = TextCollector()
    collector.feed(content.decode())
    collector.close()
    lines = []
    for line in "".join(collector.parts).splitlines():
        words = line.split()
        if words:
            lines.append(" ".join(words))
    return "\n".join(lines)


class TextCollector(HTMLParser):
    """Collects the text outside of scripts and the like."""

    # Documented as an attribute to set, though typeshed has it as final.
    CDATA_CONTENT_ELEMENTS = HIDDEN  # pyright: ignore[reportGeneralTypeIssues]

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.templates: list[int] = []  # how many parts there were before each open template
        self.hidden = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Note what begins, which may be hidden, and break the line where a browser does."""
        self.hidden = tag in HIDDEN
        if tag == "template":
            self.templates.append(len(self.parts))
        self.parts.append(BREAKS.get(tag, ""))

    def handle_endtag(self, tag: str) -> None:
        """Note what ends; of a template, drop all that was in it."""
        self.hidden = False
        if tag == "template" and self.templates:
            del self.parts[self.templates.pop() :]
        self.parts.append(BREAKS.get(tag, ""))

    def handle_data(self, data: str) -> None:
        """Take text that is shown."""
        if not self.hidden:
            self.parts.append(data)


EXTRACTORS = {"pdf": extract_pdf, "docx": extract_docx, "html": extract_html}


def main(kind: str, memory: int, seconds: int) -> int:
    """Write the text; return the exit status. An error's type is the last line of stderr."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such bounds
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        text = EXTRACTORS[kind](sys.stdin.buffer.read())
        payload = text.replace("\0", "").encode(errors="replace")
        if len(payload) > LARGEST:
            raise MemoryError
    except ImportError as error:
        print(f"\n{error.name}", file=sys.stderr)
        return MISSING
    except BaseException as error:  # a stranger's file: the libraries have errors of many kinds
        print(f"\n{type(error).__name__}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(payload)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
