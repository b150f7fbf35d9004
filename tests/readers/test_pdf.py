"""PDFs: what of them cannot be read is said, and values of forms are read."""

import re
import warnings
import zlib

import pytest

pytest.importorskip("pypdf")

from pypdf import PageObject

from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.readers import pdf_text
from restorekv.readers.extract import extract_text, load_document, read_document
from tests.helpers.pdf import FONT, PICTURE, Pdf, line, make_pdf_with_a_damaged_page, make_stream


def test_a_whole_pdf_is_read_without_a_warning():
    pdf = Pdf()
    pdf.add_text("One.")
    pdf.add_page()  # an empty page lacks nothing
    pdf.add_page(zlib.compress(line("Two.")), "/Filter/FlateDecode")
    found = read_document("a.pdf", pdf.make())
    assert found.text.split() == ["One.", "Two."] and found.warning == ""


FLATE = "/Filter/FlateDecode"
COMPRESSED = zlib.compress(line("Zoë owns the red house, and nobody else does.") * 40)


@pytest.mark.parametrize(
    ("content", "entries"),
    [
        (COMPRESSED[: len(COMPRESSED) // 2], FLATE),
        (COMPRESSED[:20] + b"\xff" * 20 + COMPRESSED[40:], FLATE),
        (COMPRESSED[:-4] + b"abcd", FLATE),
        (b"no zlib at all", FLATE),
        (b"BT /F 9 Tf (no end", ""),
        (line("One"), "/Filter/Unknown"),
    ],
    ids=["cut", "bytes", "checksum", "none", "string", "filter"],
)
def test_a_damaged_page_is_named(content, entries):
    pdf = Pdf()
    pdf.add_text("One.")
    pdf.add_page(content, entries)
    pdf.add_text("Three.")
    found = read_document("a.pdf", pdf.make())
    assert "One." in found.text and "Three." in found.text
    assert found.warning.startswith("Not all of a.pdf could be read: page 2 is damaged.")


def test_a_stream_that_lacks_only_its_checksum_is_whole():
    pdf = Pdf()
    pdf.add_page(zlib.compress(line("One."))[:-4], FLATE)
    assert read_document("a.pdf", pdf.make()).warning == ""


def test_a_damaged_form_and_missing_content_are_named():
    pdf = Pdf()
    pdf.add_text("One.")
    form = pdf.add(make_stream(b"no zlib", "/Type/XObject/Subtype/Form/BBox[0 0 9 9]" + FLATE))
    pdf.add_page(line("Two.") + b" /X Do", objects=f"/X {form} 0 R")
    pdf.pages.append(pdf.add("<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Contents 998 0 R>>"))
    assert "pages 2-3 are damaged" in read_document("a.pdf", pdf.make()).warning


def test_pages_that_the_file_lists_and_lacks_are_counted():
    pdf = Pdf()
    pdf.add_text("One.")
    pdf.listed = 2
    assert "2 pages that it lists are missing" in read_document("a.pdf", pdf.make()).warning


def test_pages_of_pictures_are_named():
    pdf = Pdf()
    pdf.add_text("One.")
    for _ in range(2):
        picture = pdf.add(PICTURE.format(9, 9))
        pdf.add_page(b"/X Do", objects=f"/X {picture} 0 R")
    logo = pdf.add(PICTURE.format(9, 9))
    pdf.add_page(line("Four.") + b" /X Do", objects=f"/X {logo} 0 R")
    scan = pdf.add(PICTURE.format(1700, 2200))
    pdf.add_page(line("Scanned 2024") + b" /X Do", objects=f"/X {scan} 0 R")
    pdf.add_page(b"BI /W 1 /H 1 /BPC 8 /CS /G ID a EI")
    pdf.add_page(b"0 0 m 1 1 2 2 3 3 c " * 300 + b"f")
    warning = read_document("a.pdf", pdf.make()).warning
    assert "pages 2-3, 5-7 are pictures without text" in warning


def test_a_pdf_without_readable_text_is_refused_with_its_pages():
    pdf = Pdf()
    picture = pdf.add(PICTURE.format(9, 9))
    pdf.add_page(b"/X Do", objects=f"/X {picture} 0 R")
    pdf.add_page(b"BT /G 9 Tf <00240025> Tj ET")
    with pytest.raises(RestoreKVError) as refusal:
        read_document("a.pdf", pdf.make())
    assert str(refusal.value) == (
        "a.pdf has no text that can be read: page 1 is pictures without text, page 2 is in a font "
        "that does not say which characters it shows; save it again or run OCR on it, or give its "
        "text."
    )


def test_text_in_a_font_without_a_map_is_left_out_and_named():
    """As characters, the numbers of its shapes would be other words."""
    pdf = Pdf()
    pdf.add_page(line("Price:") + b" BT /G 9 Tf 0 -20 Td <00140015> Tj ET " + line("Euros"))
    found = read_document("a.pdf", pdf.make())
    assert found.text.split() == ["Price:", "Euros"]
    assert "page 1 is in a font that does not say" in found.warning


def test_pages_of_characters_that_are_none_are_named():
    pdf = Pdf()
    pdf.add_page(b"BT /F 9 Tf (\\001\\002\\003\\004\\005 a) Tj ET")
    pdf.add_page(line("A long line of text with a bullet that is none of a character.") + b"")
    assert "page 1 is in a font" in read_document("a.pdf", pdf.make()).warning


def test_turned_text_is_not_joined_to_other_text():
    """As in charts, and on the first page of papers that arXiv has stamped."""
    stamp = b"BT /F 9 Tf 0 20 -20 0 9 9 Tm (2 Mar 2023) Tj ET "
    title = b"BT /F 9 Tf 1 0 0 1 30 9 Tm (Old) Tj 1 0 0 1 50 9 Tm (mills) Tj ET "
    axis = b"q 0 1 -1 0 70 60 cm BT /F 9 Tf 0 0 Td (Tons) Tj ET Q"
    pdf = Pdf()
    pdf.add_page(stamp + title + axis)
    assert extract_text("a.pdf", pdf.make()).split("\n") == ["Old mills", "2 Mar 2023", "Tons"]
    pdf = Pdf()
    fonts = f"/Resources<</Font<</F {pdf.add(FONT)} 0 R>>>>"
    chart = pdf.add(make_stream(title + axis, f"/Type/XObject/Subtype/Form{fonts}"))
    pdf.add_page(b"/X Do", objects=f"/X {chart} 0 R")
    pdf.add_page(axis)
    assert extract_text("a.pdf", pdf.make()) == "Old mills\nTons\n\nTons"


def test_turned_text_of_a_page_with_many_drawings_costs_no_more_passes(monkeypatch):
    """A scatter plot of thousands of marks would take the time limit."""
    marks = b"0 0 m 1 1 l S " * (pdf_text.MAX_OPERATORS // 3)
    passes = []

    def count_pass(page, extract=PageObject.extract_text, **options):
        passes.append(options["orientations"])
        return extract(page, **options)

    monkeypatch.setattr(PageObject, "extract_text", count_pass)
    for drawing in (b"", marks):
        pdf = Pdf()
        pdf.add_page(line("Tons") + drawing + b"BT /F 9 Tf 0 1 -1 0 70 60 Tm (Mills) Tj ET")
        text, _ = pdf_text.extract_pdf(pdf.make())
        assert text.startswith("Tons") and text.endswith("Mills")
    assert passes == [pdf_text.DIRECTIONS, (0,), (90,), pdf_text.DIRECTIONS]


def test_values_of_forms_and_free_texts_are_read_once():
    pdf = Pdf()
    fields = [
        "/Subtype/Widget/FT/Tx/T(name)/V(Zo\\353 Miller)",
        "/Subtype/Widget/FT/Tx/T(city)/TU(City of birth)/V(Ghent)",
        "/Subtype/Widget/FT/Tx/T(secret)/Ff 8192/V(hunter2)",
        "/Subtype/Widget/FT/Tx/T(hidden)/F 2/V(no)",
        "/Subtype/Widget/FT/Tx/T(empty)/V()",
        "/Subtype/Widget/FT/Btn/T(Member)/AS/Yes",
        "/Subtype/Widget/FT/Btn/T(Student)/AS/Off",
        "/Subtype/Widget/FT/Btn/Ff 32768/T(pay)/V/Monthly/AS/Monthly",
        "/Subtype/Widget/FT/Btn/Ff 32768/T(pay)/V/Monthly/AS/Off",
        "/Subtype/Widget/FT/Btn/Ff 65536/T(Send)",
        "/Subtype/Widget/FT/Ch/T(land)/V(be)/Opt[[(be)(Belgium)][(fr)(France)]]",
        "/Subtype/FreeText/Contents(A note that is typed on the page.)",
        "/Subtype/Text/Contents(A sticky note.)",
    ]
    parent = pdf.add("<</FT/Tx/T(total)/V(42)>>")
    fields += [f"/Subtype/Widget/Parent {parent} 0 R"] * 2
    numbers = [pdf.add(f"<</Type/Annot/Rect[0 0 9 9]{field}>>") for field in fields]
    pdf.add_text("Form.", f"/Annots[{' '.join(f'{number} 0 R' for number in numbers)}]")
    found = read_document("a.pdf", pdf.make())
    assert found.warning == ""
    assert found.text.splitlines() == [
        "Form.",
        "name: Zoë Miller",
        "City of birth: Ghent",
        "[x] Member",
        "[ ] Student",
        "pay: Monthly",
        "land: Belgium",
        "A note that is typed on the page.",
        "total: 42",
    ]


def test_a_form_that_a_program_draws_is_refused():
    pdf = Pdf()
    pdf.add_text("Please wait...")
    pdf.more_in_root = "/NeedsRendering true"
    with pytest.raises(RestoreKVError, match="only Adobe's reader shows; print it"):
        read_document("a.pdf", pdf.make())


def test_many_pages_are_named_in_short():
    pdf = Pdf()
    for number in range(1, 41):
        if number % 2:
            pdf.add_text("Text.")
        else:
            pdf.add_page(b"BI /W 1 /H 1 /BPC 8 /CS /G ID a EI")
    warning = read_document("a.pdf", pdf.make()).warning
    assert "pages 2, 4, 6, 8, 10, 12, 14, 16 and 12 more are pictures" in warning


def test_python_warns_of_what_was_not_read(tmp_path):
    path = tmp_path / "a.pdf"
    path.write_bytes(make_pdf_with_a_damaged_page("One."))
    with pytest.warns(RestoreKVWarning, match=re.escape("a.pdf could be read: page 2 is damaged")):
        assert load_document(path).strip() == "One."
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extract_text("a.txt", b"One.")
