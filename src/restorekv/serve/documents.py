"""What was uploaded, as text: UTF-8, Markdown and HTML as they are, PDF and DOCX through their libraries."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from importlib import import_module
from pathlib import PurePath

from restorekv.errors import RestoreKVError
from restorekv.model.tokenize import decoded

HIDDEN = {"script", "style", "head", "template", "noscript"}
BLOCKS = {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "blockquote", "pre"}
PAGES = 20_000  # of a PDF


def text_of(name: str, content: bytes) -> str:
    """Returns the text of a file by its name's ending; refuses what has none."""
    match PurePath(name).suffix.lower():
        case ".pdf":
            text = of_pdf(name, content)
        case ".docx":
            text = of_docx(name, content)
        case ".html" | ".htm":
            text = of_html(decoded(content, name))
        case _:
            text = decoded(content, name)
    if not text.strip():
        raise RestoreKVError(f"{name} has no text; give one with at least one word.")
    return text


def of_pdf(name: str, content: bytes) -> str:
    reader = library("pypdf", name)
    try:
        pages = reader.PdfReader(io.BytesIO(content)).pages[:PAGES]
        return "\n\n".join(page.extract_text() for page in pages)
    except Exception as error:  # a stranger's file: the library has errors of many kinds
        raise RestoreKVError(
            f"{name} is not a PDF that can be read ({type(error).__name__}); export it again."
        ) from None


def of_docx(name: str, content: bytes) -> str:
    reader = library("docx", name)
    try:
        return "\n\n".join(paragraph.text for paragraph in reader.Document(io.BytesIO(content)).paragraphs)
    except Exception as error:  # as above
        raise RestoreKVError(
            f"{name} is not a DOCX file that can be read ({type(error).__name__}); save it again."
        ) from None


def library(module: str, name: str) -> object:
    try:
        return import_module(module)
    except ImportError:
        raise RestoreKVError(f"Reading {name} needs the package {module}; pip install 'restorekv[serve]'.") from None


def of_html(page: str) -> str:
    """Returns what a browser would show as text."""
    reader = Words()
    reader.feed(page)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).splitlines())
    return "\n".join(line for line in lines if line)


class Words(HTMLParser):
    """Collects the text outside of scripts and the like."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.hidden = [], 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.hidden += tag in HIDDEN
        self.parts += "\n" if tag in BLOCKS else ""

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in HIDDEN and self.hidden > 0
        self.parts += "\n" if tag in BLOCKS else ""

    def handle_data(self, data: str) -> None:
        self.parts += data if not self.hidden else ""
