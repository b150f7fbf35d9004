"""Word documents: columns, notes, margins, tracked changes, symbols, fields and equations."""

import pytest

docx = pytest.importorskip("docx")

from docx.opc.packuri import PackURI  # noqa: E402
from docx.opc.part import Part  # noqa: E402

from restorekv.errors import RestoreKVError  # noqa: E402
from restorekv.readers.extract import read_document  # noqa: E402
from tests.helpers.word_files import NAMED, SCHEMA, cell, make, paragraph, raised, read, row, run  # noqa: E402


def test_values_of_tables_stay_in_their_columns():
    first = '<w:vMerge w:val="restart"/>'
    down = "<w:vMerge/>"
    indent = '<w:gridBefore w:val="1"/>'
    text = read(
        "<w:tbl>",
        row(cell("a"), cell(""), cell("c")),
        row(cell("wide", '<w:gridSpan w:val="2"/>'), cell("z")),
        row(cell("end"), cell("wide", '<w:gridSpan w:val="2"/>')),
        row(cell("q"), cell("tall", first), properties=indent),
        row(cell(""), cell("x"), cell("", down)),
        row(cell("no"), properties="<w:del/>"),
        "</w:tbl>",
    )  # fmt: skip
    assert text == "a\t\tc\nwide\t\tz\nend\twide\n\tq\ttall\n\tx\ttall"


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ((run("10"), raised("6"), run(" m"), raised("2")), "10^6 m^2"),
        ((run("10"), raised("1"), raised("2"), run("5")), "10^(12)5"),
        ((run("H"), raised("2", "subscript"), run("O")), "H2O"),
        ((run("log"), raised("2", "subscript"), run("8")), "log_(2)8"),
        ((run("1"), raised("st"), run(" "), raised("a b")), "1st ^(a b)"),
    ],
)
def test_raised_and_lowered_text_changes_no_number(parts, text):
    assert read(paragraph(*parts)) == text


def test_a_style_may_raise_text():
    def add_style(document):
        style = document.styles.add_style("Power", docx.enum.style.WD_STYLE_TYPE.CHARACTER)
        style.font.superscript = True

    text = read(paragraph(run("10"), run("6", '<w:rStyle w:val="Power"/>')), prepare=add_style)
    assert text == "10^6"


def add_notes(document):
    """Add a footnote and an endnote, both with the id 2."""
    for kind in ("footnote", "endnote"):
        note = paragraph(f"<w:r><w:{kind}Ref/></w:r>", run(f"A {kind}."))
        blob = (
            f"<w:{kind}s {NAMED}>"
            f'<w:{kind} w:id="0" w:type="separator">{paragraph(run("no"))}</w:{kind}>'
            f'<w:{kind} w:id="2">{note}</w:{kind}>'
            f"</w:{kind}s>"
        )
        package = document.part.package
        part = Part(PackURI(f"/word/{kind}s.xml"), "application/xml", blob.encode(), package)
        document.part.relate_to(part, f"{SCHEMA}/officeDocument/2006/relationships/{kind}s")


def test_notes_are_read_and_their_marks_change_no_number():
    style = '<w:vertAlign w:val="superscript"/>'
    text = read(
        paragraph(run("12"), f'<w:r><w:rPr>{style}</w:rPr><w:footnoteReference w:id="2"/></w:r>'),
        paragraph(run("13"), '<w:r><w:endnoteReference w:id="2"/></w:r>'),
        prepare=add_notes,
    )
    assert text == "12[1]\n\n13[2]\n\n[1] A footnote.\n\n[2] A endnote."


def test_headers_and_footers_are_read_if_they_are_shown():
    def add_margins(document):
        section = document.sections[0]
        section.header.paragraphs[0].text = "Head"
        section.footer.paragraphs[0].text = "Foot"
        section.first_page_header.paragraphs[0].text = "First"
        section.even_page_footer.paragraphs[0].text = "Even"
        document.add_section()

    def show_first(document):
        add_margins(document)
        document.sections[0].different_first_page_header_footer = True

    assert read(paragraph(run("Text.")), prepare=add_margins).split() == ["Head", "Text.", "Foot"]
    shown = read(paragraph(run("Text.")), prepare=show_first).split()
    assert sorted(shown) == ["First", "Foot", "Head", "Text."]


def test_symbols_are_read_and_unknown_ones_counted():
    parts = [
        '<w:r><w:t>20</w:t><w:sym w:font="Symbol" w:char="F0B0"/><w:t>C</w:t></w:r>',
        run(" \uf0b1 5 \uf06dm", '<w:rFonts w:ascii="Symbol"/>'),
        '<w:r><w:sym w:font="Wingdings" w:char="F0FC"/></w:r>',
        '<w:r><w:sym w:font="Webdings" w:char="F021"/></w:r>',
    ]
    found = read_document("a.docx", make(paragraph(*parts)))
    assert found.text == "20°C ± 5 μμ✓�"
    assert "1 symbol is of a font whose characters are not known" in found.warning


def test_files_that_word_inserts_are_not_lost_without_a_word():
    """Some converters write a whole document so: a page of HTML that Word reads as it opens."""
    chunk = "<w:altChunk/>"
    found = read_document("a.docx", make(paragraph(run("Intro.")), chunk))
    assert found.text == "Intro."
    assert "1 file that it inserts is not read" in found.warning
    linked = paragraph(run("Master."), "<w:subDoc/>")
    assert "2 files that it inserts are" in read_document("a.docx", make(linked, chunk)).warning
    with pytest.raises(RestoreKVError, match="no text that can be read: 1 file that it inserts"):
        read_document("a.docx", make(chunk))


def test_one_of_several_forms_is_read():
    new = f"<mc:Choice Requires='wps'>{run('new')}</mc:Choice>"
    old = f"<mc:Fallback>{run('old')}</mc:Fallback>"
    empty = "<mc:Choice Requires='wps'><w:r/></mc:Choice>"
    alternatives = "<mc:AlternateContent>{}</mc:AlternateContent>"
    text = read(
        paragraph(alternatives.format(new + old), run(" "), alternatives.format(empty + old)),
        alternatives.format(f"<mc:Choice Requires='x'>{paragraph(run('block'))}</mc:Choice>"),
    )
    assert text == "new old\n\nblock"


def field(kind: str) -> str:
    return f'<w:r><w:fldChar w:fldCharType="{kind}"/></w:r>'


def test_what_is_deleted_or_hidden_is_not_read():
    deleted_end = "<w:pPr><w:rPr><w:del/></w:rPr></w:pPr>"
    text = read(
        paragraph(deleted_end, run("one ")),
        paragraph(run("line"), f"<w:moveFrom>{run('no')}</w:moveFrom>", run("no", "<w:vanish/>")),
        paragraph(run("a"), '<w:r><w:br w:type="page"/></w:r>', run("b")),
    )
    assert text == "one line\n\na\nb"


def test_the_codes_of_fields_are_not_read():
    inner = [field("begin"), field("separate"), run("100"), field("end")]
    whole = [field("begin"), *inner, field("separate"), run("200"), field("end")]
    assert read(paragraph(run("Sum: "), *whole, run("."))) == "Sum: 200."
    # A field without an end hides nothing.
    assert read(paragraph(run("Sum: "), field("begin"), run("200"))) == "Sum: 200"


def test_old_form_fields_are_read():
    box = '<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:checkBox><w:checked/></w:checkBox></w:ffData></w:fldChar></w:r>'  # noqa: E501
    entries = '<w:listEntry w:val="a"/><w:listEntry w:val="b"/>'
    choice = f'<w:r><w:fldChar w:fldCharType="begin"><w:ffData><w:ddList><w:result w:val="1"/>{entries}</w:ddList></w:ffData></w:fldChar></w:r>'  # noqa: E501
    assert read(paragraph(box, field("end"), run(" "), choice, field("end"))) == "[x] b"


def text_of(text: str) -> str:
    return f"<m:r><m:t>{text}</m:t></m:r>"


def fraction(top: str, bottom: str, properties: str = "") -> str:
    return f"<m:f>{properties}<m:num>{top}</m:num><m:den>{bottom}</m:den></m:f>"


HIDDEN_DEGREE = '<m:radPr><m:degHide m:val="1"/></m:radPr><m:deg/>'
EQUATIONS = {
    "mixed": (fraction(text_of("1"), text_of("2")), "3 1/2 x"),
    "long": ("<m:r><m:t>=</m:t></m:r>" + fraction(text_of("a+b"), text_of("2a")), "3=(a+b)/(2a) x"),
    "binomial": (
        fraction(text_of("n"), text_of("k"), '<m:fPr><m:type m:val="noBar"/></m:fPr>'),
        "3binom(n, k) x",
    ),
    "scripts": (
        f"<m:sSubSup><m:e>{text_of('a')}</m:e><m:sub>{text_of('1')}</m:sub>"
        f"<m:sup>{text_of('2')}</m:sup></m:sSubSup>{text_of('5')}",
        "3a_1^(2)5 x",
    ),
    "power of a sum": (
        f"<m:sSup><m:e>{text_of('a+b')}</m:e><m:sup>{text_of('n+1')}</m:sup></m:sSup>",
        "3(a+b)^(n+1) x",
    ),
    "root": (f"<m:rad>{HIDDEN_DEGREE}<m:e>{text_of('b-1')}</m:e></m:rad>", "3sqrt(b-1) x"),
    "cube root": (
        f"<m:rad><m:deg>{text_of('3')}</m:deg><m:e>{text_of('8')}</m:e></m:rad>",
        "3root(8, 3) x",
    ),
    "sum": (
        '<m:nary><m:naryPr><m:chr m:val="∑"/></m:naryPr>'
        f"<m:sub>{text_of('i=1')}</m:sub><m:sup>{text_of('n')}</m:sup><m:e>{text_of('i')}</m:e>"
        "</m:nary>",
        "3∑_(i=1)^n i x",
    ),
    "parentheses": (f"<m:d><m:e>{text_of('a')}</m:e><m:e>{text_of('b')}</m:e></m:d>", "3(a|b) x"),
    "function": (
        f"<m:func><m:fName>{text_of('sin')}</m:fName><m:e>{text_of('y')}</m:e></m:func>",
        "3sin(y) x",
    ),
    "matrix": (
        f"<m:m><m:mr><m:e>{text_of('1')}</m:e><m:e>{text_of('2')}</m:e></m:mr>"
        f"<m:mr><m:e>{text_of('3')}</m:e><m:e>{text_of('4')}</m:e></m:mr></m:m>",
        "3[1, 2; 3, 4] x",
    ),
    "deleted": (f"<w:del>{text_of('7')}</w:del><w:ins>{text_of('+8')}</w:ins>", "3+8 x"),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_equations_change_no_number(name):
    equation, text = EQUATIONS[name]
    assert read(paragraph(run("3"), f"<m:oMath>{equation}</m:oMath>", run(" x"))) == text
