"""Word documents whose parts are named, missing or written in other ways than Word's own."""

import io
from collections.abc import Callable
from zipfile import ZipFile

import pytest

pytest.importorskip("docx")

from restorekv.errors import RestoreKVError
from restorekv.readers.docx_text import extract_docx
from restorekv.readers.extract import read_document
from tests.helpers.word_files import cell, make, paragraph, row, run

RELATIONS = "word/_rels/document.xml.rels"
PICTURE = (
    '<Relationship Id="rId99" Target="{}" Type="http://schemas.openxmlformats.org/officeDocument/'
    '2006/relationships/image"/></Relationships>'
)


def rewrite(content: bytes, change: Callable[[str, bytes], tuple[str, bytes] | None]) -> bytes:
    """Return a document whose parts are changed; None from `change` leaves one out."""
    target = io.BytesIO()
    with ZipFile(io.BytesIO(content)) as old, ZipFile(target, "w") as new:
        for name in old.namelist():
            changed = change(name, old.read(name))
            if changed is not None:
                new.writestr(*changed)
    return target.getvalue()


def replace(old: str, new: str) -> Callable[[str, bytes], tuple[str, bytes]]:
    return lambda name, content: (name, content.replace(old.encode(), new.encode()))


def test_a_strict_document_has_other_names_for_the_same_elements():
    def write_strictly(name, content):
        for kind in ("wordprocessingml", "officeDocument"):
            usual = f"http://schemas.openxmlformats.org/{kind}/2006/"
            content = content.replace(
                usual.encode(), f"http://purl.oclc.org/ooxml/{kind}/".encode()
            )
        return name, content

    def add_margin(document):
        document.sections[0].header.paragraphs[0].text = "Head"

    equation = "<m:oMath><m:f><m:num><m:r><m:t>1</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f></m:oMath>"  # noqa: E501
    table = "<w:tbl>" + row(cell("a"), cell("b")) + "</w:tbl>"
    content = make(paragraph(run("Half: "), equation), table, prepare=add_margin)
    strict = rewrite(content, write_strictly)
    with ZipFile(io.BytesIO(strict)) as parts:
        assert b"openxmlformats.org/wordprocessingml" not in parts.read("word/document.xml")
    assert extract_docx(strict)[0] == "Head\n\nHalf: 1/2\n\na\tb"


@pytest.mark.parametrize("target", ["NULL", "media/no.png", "#place", "../../no.png"])
def test_a_picture_may_be_missing(target):
    add = replace("</Relationships>", PICTURE.format(target))
    content = rewrite(
        make(paragraph(run("Text."))),
        lambda name, part: add(name, part) if name == RELATIONS else (name, part),
    )
    assert extract_docx(content)[0] == "Text."


@pytest.mark.parametrize(
    "rename", [lambda name: name.replace("/", "\\"), str.upper, lambda name: f"/{name}"]
)
def test_names_of_parts_have_several_spellings(rename):
    content = rewrite(make(paragraph(run("Text."))), lambda name, part: (rename(name), part))
    assert extract_docx(content)[0] == "Text."


def test_the_document_may_have_another_name():
    content = rewrite(
        make(paragraph(run("Text."))),
        lambda name, part: (
            name.replace("document.xml", "main2.xml"),
            part.replace(b"word/document.xml", b"word/main2.xml"),
        ),
    )
    assert extract_docx(content)[0] == "Text."


@pytest.mark.parametrize(
    "lost", ["word/document.xml", "word/styles.xml", "word/numbering.xml", "_rels/.rels"]
)
def test_a_document_without_a_part_with_text_is_refused(lost):
    content = rewrite(
        make(paragraph(run("Text."))), lambda name, part: None if name == lost else (name, part)
    )
    with pytest.raises(RestoreKVError, match="not a file of its kind that can be read; save it"):
        read_document("a.docx", content)


def test_a_workbook_is_not_a_document():
    content = rewrite(make(paragraph(run("Text."))), replace("w:body", "w:sheet"))
    with pytest.raises(RestoreKVError, match="not a file of its kind that can be read; save it"):
        read_document("a.docx", content)
