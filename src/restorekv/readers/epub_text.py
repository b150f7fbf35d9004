"""The text of an electronic book (EPUB): its pages one after the other, each as html_text.py reads
one.

The container names the package document, which lists the files of the book and, in its spine, the
order in which they are read (EPUB 3.3, https://www.w3.org/TR/epub-33/; EPUB 2 is the same here).
Pages outside the main order, such as notes, are read at their place in the spine.
"""

import io
import posixpath
from typing import Any
from urllib.parse import unquote, urldefrag
from xml.etree import ElementTree
from zipfile import ZipFile

from restorekv.readers.charsets import decode_page
from restorekv.readers.html_text import extract_html

CONTAINER = "META-INF/container.xml"
ENCRYPTION = "META-INF/encryption.xml"
PACKAGE_TYPE = "application/oebps-package+xml"
# Types of files in the spine that have text; others are pictures, which may name a fallback page.
PAGE_TYPES = ("application/xhtml+xml", "text/html", "image/svg+xml")


class ProtectedBookError(Exception):
    """The pages of a book are encrypted, so that only the seller's program can read them."""


def extract_epub(content: bytes) -> tuple[str, dict[str, Any]]:
    """Return the text of a book and, if it lists pages that it does not have, how many ("missing").

    Raises:
        ProtectedBookError: Its pages are encrypted.
    """
    with ZipFile(io.BytesIO(content)) as book:
        files = set(book.namelist())
        pages = _list_pages(book)
        # Fonts are often encrypted in books without DRM, and no page needs them.
        if set(pages) & _list_encrypted(book, files):
            raise ProtectedBookError
        texts = []
        for page in pages:
            if page in files:
                html = decode_page(book.read(page), f"The page {page}")
                texts.append(extract_html(html.encode())[0])
    missing = len(pages) - len(texts)
    notices = {"missing": missing} if missing else {}
    return "\n\n".join(text for text in texts if text.strip()), notices


def _list_pages(book: ZipFile) -> list[str]:
    """Return the files of the pages of a book, in the order of reading."""
    package = _find_package(book)
    root = ElementTree.fromstring(book.read(package))
    items = {item.get("id", ""): item for item in root.iterfind("{*}manifest/{*}item")}
    pages = []
    for reference in root.iterfind("{*}spine/{*}itemref"):
        page = _find_page(items, reference.get("idref", ""))
        if page is not None:
            address = unquote(urldefrag(page.get("href", "")).url)
            pages.append(posixpath.normpath(posixpath.join(posixpath.dirname(package), address)))
    return pages


def _find_package(book: ZipFile) -> str:
    """Return the file of the package document; raise KeyError if there is none."""
    container = ElementTree.fromstring(book.read(CONTAINER))
    for file in container.iterfind("{*}rootfiles/{*}rootfile"):
        if file.get("media-type") == PACKAGE_TYPE:
            return file.get("full-path", "")
    raise KeyError(PACKAGE_TYPE)


def _find_page(items: dict[str, ElementTree.Element], name: str) -> ElementTree.Element | None:
    """Return the item with that id or, if it is not a page, the page that it names as fallback;
    None if there is no page.
    """
    tried = set()
    while name in items and name not in tried:
        tried.add(name)
        item = items[name]
        if item.get("media-type") in PAGE_TYPES:
            return item
        name = item.get("fallback", "")
    return None


def _list_encrypted(book: ZipFile, files: set[str]) -> set[str]:
    """Return the files of a book that are encrypted."""
    if ENCRYPTION not in files:
        return set()
    root = ElementTree.fromstring(book.read(ENCRYPTION))
    return {unquote(each.get("URI", "")) for each in root.iterfind(".//{*}CipherReference")}
