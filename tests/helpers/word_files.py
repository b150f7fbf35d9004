"""Word documents made from XML, and what is read from them."""

import io

import docx

from restorekv.readers.docx_text import extract_docx

SCHEMA = "http://schemas.openxmlformats.org"
NAMESPACES = {
    "w": f"{SCHEMA}/wordprocessingml/2006/main",
    "m": f"{SCHEMA}/officeDocument/2006/math",
    "mc": f"{SCHEMA}/markup-compatibility/2006",
}
NAMED = " ".join(f'xmlns:{name}="{uri}"' for name, uri in NAMESPACES.items())


def make(*blocks: str, prepare=None) -> bytes:
    """Return a document made of XML blocks; `prepare` changes it before it is saved."""
    document = docx.Document()
    end = document.element.body[-1]
    for child in list(docx.oxml.parse_xml(f"<w:body {NAMED}>{''.join(blocks)}</w:body>")):
        end.addprevious(child)
    if prepare:
        prepare(document)
    target = io.BytesIO()
    document.save(target)
    return target.getvalue()


def read(*blocks: str, prepare=None) -> str:
    return extract_docx(make(*blocks, prepare=prepare))[0]


def run(text: str, properties: str = "") -> str:
    return f'<w:r><w:rPr>{properties}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def raised(text: str, value: str = "superscript") -> str:
    return run(text, f'<w:vertAlign w:val="{value}"/>')


def paragraph(*parts: str) -> str:
    return f"<w:p>{''.join(parts)}</w:p>"


def cell(text: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{paragraph(run(text) if text else '')}</w:tc>"


def row(*cells: str, properties: str = "") -> str:
    return f"<w:tr><w:trPr>{properties}</w:trPr>{''.join(cells)}</w:tr>"
