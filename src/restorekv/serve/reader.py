"""A program that reads a PDF, DOCX or HTML file from its standard input and writes the text.

documents.py runs it with bounds on memory and time, since a small file may unfold without end. It imports nothing of
the package, so that it starts fast.
"""

import contextlib
import io
import sys
from html.parser import HTMLParser

HIDDEN = {"script", "style", "head", "template", "noscript"}
BLOCKS = {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "blockquote", "pre"}
PAGES = 20_000  # of a PDF
LARGEST = 64 << 20  # bytes of a text; no model reads as much
MISSING = 3  # the exit status where a library is not installed


def of_pdf(content: bytes) -> str:
    from pypdf import PdfReader

    return "\n\n".join(page.extract_text() for page in PdfReader(io.BytesIO(content)).pages[:PAGES])


def of_docx(content: bytes) -> str:
    from docx import Document

    return "\n\n".join(paragraph.text for paragraph in Document(io.BytesIO(content)).paragraphs)


def of_html(content: bytes) -> str:
    """Returns what a browser would show as text."""
    reader = Words()
    reader.feed(content.decode())
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).splitlines())
    return "\n".join(line for line in lines if line)


class Words(HTMLParser):
    """Collects the text outside of scripts and the like."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in HIDDEN
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in HIDDEN and self.hidden > 0
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def main(kind: str, memory: int, seconds: int) -> int:
    """Returns the exit status; an error's kind is the last line of the standard error."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such bounds
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    try:
        text = {"pdf": of_pdf, "docx": of_docx, "html": of_html}[kind](sys.stdin.buffer.read())
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
