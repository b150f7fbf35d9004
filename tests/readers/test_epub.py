"""Electronic books: the order of their pages, missing and encrypted ones, and files of other
kinds.
"""

import io
import zipfile

import pytest

from restorekv.errors import RestoreKVError
from restorekv.readers import extract
from restorekv.readers.epub_text import extract_epub
from restorekv.readers.extract import extract_text, read_document

HTML = "application/xhtml+xml"
CONTAINER = """<?xml version="1.0"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>
<rootfile full-path="OPS/book.pdf" media-type="application/pdf"/>
<rootfile full-path="OPS/package.opf" media-type="application/oebps-package+xml"/>
</rootfiles></container>"""


def page(body: str) -> str:
    return (
        '<?xml version="1.0" encoding="UTF-8"?><html xmlns="http://www.w3.org/1999/xhtml"><head>'
        '<title/><script src="a.js"/><style>p {color: red}</style></head>'
        f"<body>{body}</body></html>"
    )


def item(name: str, href: str, kind: str = HTML, more: str = "") -> str:
    return f'<item id="{name}" href="{href}" media-type="{kind}" {more}/>'


def make(items: list[str], spine: list[str], files: dict[str, str | bytes]) -> bytes:
    """Return a book with the items and spine of its package document, and its other files."""
    references = "".join(f'<itemref idref="{name}"/>' for name in spine)
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0">'
        f"<manifest>{''.join(items)}</manifest><spine>{references}</spine></package>"
    )
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as book:
        book.writestr("mimetype", "application/epub+zip")
        for name, content in files.items():
            book.writestr(name, content)
        book.writestr("META-INF/container.xml", CONTAINER)
        book.writestr("OPS/package.opf", package)
    return target.getvalue()


def test_pages_are_read_in_the_order_of_the_spine():
    content = make(
        [item("one", "text/first%20page.xhtml"), item("two", "text/second.xhtml#start")],
        ["two", "one"],
        {
            "OPS/text/first page.xhtml": page("<h1>Late</h1><p>The mill <a id='x'/>burned.</p>"),
            "OPS/text/second.xhtml": page("<p>The mill stood.</p><p>It ground rye.</p>"),
            "OPS/text/third.xhtml": page("<p>Nobody lists me.</p>"),
        },
    )
    text, notices = extract_epub(content)
    assert text == "The mill stood.\nIt ground rye.\n\nLate\nThe mill burned."
    assert notices == {}
    # In a process of its own, as all users read it.
    assert extract_text("book.EPUB", content) == text


def test_a_package_beside_the_container_and_pages_of_utf_16():
    content = make(
        [item("one", "../one.xhtml")],
        ["one"],
        {"one.xhtml": page("<p>Grüße aus Łódź</p>").replace("UTF-8", "UTF-16").encode("utf-16")},
    )
    assert extract_epub(content)[0] == "Grüße aus Łódź"


def test_a_picture_is_read_as_the_page_that_stands_in_for_it():
    content = make(
        [
            item("map", "map.jpg", "image/jpeg", 'fallback="described"'),
            item("described", "map.xhtml"),
            item("photo", "photo.jpg", "image/jpeg"),
            item("loop", "loop.jpg", "image/jpeg", 'fallback="loop"'),
        ],
        ["map", "photo", "loop", "unknown"],
        {"OPS/map.jpg": b"\xff\xd8", "OPS/map.xhtml": page("<p>A map of the fords.</p>")},
    )
    assert extract_epub(content) == ("A map of the fords.", {})


def test_missing_pages_are_counted():
    items = [item("one", "one.xhtml"), item("two", "two.xhtml")]
    content = make(items, ["one", "two"], {"OPS/one.xhtml": page("<p>Only this.</p>")})
    extraction = read_document("book.epub", content)
    assert extraction.text == "Only this."
    assert "1 page that it lists is missing" in extraction.warning


def encryption(address: str) -> str:
    return (
        '<encryption xmlns="urn:oasis:names:tc:opendocument:xmlns:container">'
        '<EncryptedData xmlns="http://www.w3.org/2001/04/xmlenc#"><CipherData>'
        f'<CipherReference URI="{address}"/></CipherData></EncryptedData></encryption>'
    )


def test_a_book_with_copy_protection_is_refused_and_encrypted_fonts_are_not():
    items = [item("one", "page%20one.xhtml")]
    files = {"OPS/page one.xhtml": page("<p>Readable.</p>")}
    open_book = make(
        items, ["one"], {**files, "META-INF/encryption.xml": encryption("OPS/fonts/serif.otf")}
    )
    assert extract_text("book.epub", open_book) == "Readable."
    protected = make(
        items, ["one"], {**files, "META-INF/encryption.xml": encryption("OPS/page%20one.xhtml")}
    )
    with pytest.raises(RestoreKVError, match=r"book\.epub is protected against copying"):
        extract_text("book.epub", protected)


def test_a_book_of_pictures_has_no_text():
    pictures = make(
        [item("one", "one.xhtml")], ["one"], {"OPS/one.xhtml": page('<img src="1.jpg"/>')}
    )
    with pytest.raises(RestoreKVError, match="has no text"):
        extract_text("book.epub", pictures)


def make_zip(**files: str) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target.getvalue()


@pytest.mark.parametrize("content", [b"plain words", make_zip(a="b"), make([], [], {})[:-40]])
def test_other_files_are_refused_in_a_sentence(content):
    with pytest.raises(RestoreKVError, match=r"book\.epub is not a file of its kind"):
        extract_text("book.epub", content)


def test_a_book_that_is_named_as_a_text_says_how_to_name_it():
    content = make([item("one", "one.xhtml")], ["one"], {"OPS/one.xhtml": page("<p>Words</p>")})
    with pytest.raises(RestoreKVError, match=r"name it \.docx or \.epub"):
        extract_text("book.txt", content)


def test_a_book_that_expands_without_limit_is_refused(monkeypatch):
    monkeypatch.setattr(extract, "MEMORY_BYTES", 192 << 20)
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as book:
        book.writestr("META-INF/container.xml", CONTAINER)
        package = f"<package><manifest>{item('a', 'a.xhtml')}</manifest><spine><itemref idref='a'/>"
        book.writestr("OPS/package.opf", package + "</spine></package>")
        with book.open("OPS/a.xhtml", "w", force_zip64=True) as entry:
            for _ in range(256):
                entry.write(b" " * (1 << 20))
    with pytest.raises(RestoreKVError, match="takes too long or too much memory"):
        extract_text("book.epub", target.getvalue())
