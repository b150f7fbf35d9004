"""The numbers of lists and headings in Word documents.

Word's own rules were checked beside another reader of documents; what stands here are its numbers.
"""

import pytest

docx = pytest.importorskip("docx")

from docx.oxml import parse_xml  # noqa: E402

from tests.helpers.word_files import NAMED, cell, read, row, run  # noqa: E402


def item(text: str, level: int = 0, of: int = 1, style: str = "", more: str = "") -> str:
    """Return a paragraph of a level of a list; with a style, the style says which."""
    own = f'<w:numPr><w:ilvl w:val="{level}"/><w:numId w:val="{of}"/></w:numPr>'
    if style:
        own = f'<w:pStyle w:val="{style}"/>'
    return f"<w:p><w:pPr>{own}{more}</w:pPr>{run(text) if text else ''}</w:p>"


def level(place: int, text: str, kind: str = "decimal", more: str = "") -> str:
    return (
        f'<w:lvl w:ilvl="{place}"><w:start w:val="1"/><w:numFmt w:val="{kind}"/>{more}'
        f'<w:lvlText w:val="{text}"/></w:lvl>'
    )


def define(number: int, *levels: str) -> str:
    return f'<w:abstractNum w:abstractNumId="{number}">{"".join(levels)}</w:abstractNum>'


def name(number: int, definition: int, more: str = "") -> str:
    return f'<w:num w:numId="{number}"><w:abstractNumId w:val="{definition}"/>{more}</w:num>'


def restart(place: int, number: int) -> str:
    return f'<w:lvlOverride w:ilvl="{place}"><w:startOverride w:val="{number}"/></w:lvlOverride>'


def number(blocks: list[str], *lists: str, styles: str = "") -> list[str]:
    """Return the blocks of a document with some lists and styles."""

    def prepare(document):
        root = document.part.numbering_part.element
        for child in list(root):
            root.remove(child)
        root.extend(list(parse_xml(f"<w:numbering {NAMED}>{''.join(lists)}</w:numbering>")))
        added = parse_xml(f"<w:styles {NAMED}>{styles}</w:styles>")
        document.styles.element.extend(list(added))

    return [line for line in read(*blocks, prepare=prepare).split("\n") if line]


CLAUSES = (
    define(0, level(0, "%1."), level(1, "%1.%2"), level(2, "(%3)", "lowerLetter")),
    name(1, 0),
)


def test_lists_of_python_docx_have_numbers():
    document = docx.Document()
    for text in ("a", "b"):
        document.add_paragraph(text, style="List Number")
    document.add_paragraph("c", style="List Bullet")
    document.add_paragraph("d", style="List Number")
    body = [element.xml for element in document.element.body[:-1]]
    assert read(*body) == "1. a\n\n2. b\n\nc\n\n3. d"


def test_deeper_levels_begin_again():
    blocks = [item("a"), item("b", 1), item("c", 2), item("d", 2), item("e", 1), item("f", 2)]
    blocks += [item("g"), item("h", 1)]
    expected = ["1. a", "1.1 b", "(a) c", "(b) d", "1.2 e", "(a) f", "2. g", "2.1 h"]
    assert number(blocks, *CLAUSES) == expected


def test_a_level_without_a_paragraph_counts_as_begun():
    assert number([item("a", 1), item("b"), item("c", 1)], *CLAUSES) == ["1.1 a", "2. b", "2.1 c"]


def test_a_level_may_go_on_after_the_one_above():
    going_on = '<w:lvlRestart w:val="0"/>'
    lists = (define(0, level(0, "Part %1"), level(1, "§%2", more=going_on)), name(1, 0))
    blocks = [item("a"), item("b", 1), item("c"), item("d", 1)]
    assert number(blocks, *lists) == ["Part 1 a", "§1 b", "Part 2 c", "§2 d"]


def test_lists_of_one_definition_count_together_unless_one_starts_anew():
    lists = (*CLAUSES, name(2, 0), name(3, 0, restart(0, 5)))
    blocks = [item("a"), item("b", of=2), item("c", of=3), item("d", of=3), item("e")]
    assert number(blocks, *lists) == ["1. a", "2. b", "5. c", "6. d", "7. e"]


def test_lists_of_two_definitions_count_apart():
    lists = (*CLAUSES, define(4, level(0, "%1)", "upperRoman")), name(9, 4))
    blocks = [item("a"), item("b", of=9), item("c"), item("d", of=9)]
    assert number(blocks, *lists) == ["1. a", "I) b", "2. c", "II) d"]


@pytest.mark.parametrize(
    ("kind", "start", "numbers"),
    [
        ("lowerLetter", 26, "z. aa. bb."),
        ("upperLetter", 52, "ZZ. AAA. BBB."),
        ("lowerRoman", 3, "iii. iv. v."),
        ("decimalZero", 8, "08. 09. 10."),
        ("lowerLetter", 0, ". a. b."),
        ("lowerLetter", 781, "781. 782. 783."),
        ("chicago", 1, "1. 2. 3."),
    ],
)
def test_kinds_of_numbers(kind, start, numbers):
    own = level(0, "%1.", kind).replace('w:start w:val="1"', f'w:start w:val="{start}"')
    found = number([item("x")] * 3, define(0, own), name(1, 0))
    assert [line.removesuffix(" x") for line in found] == numbers.split()


def test_a_legal_level_writes_digits():
    levels = (level(0, "Article %1", "upperRoman"), level(1, "%1.%2", more="<w:isLgl/>"))
    found = number([item("a"), item("b", 1)], define(0, *levels), name(1, 0))
    assert found == ["Article I a", "1.1 b"]


def test_what_follows_a_number_is_one_space_or_nothing():
    levels = (level(0, "%1)", more='<w:suff w:val="nothing"/>'), level(1, "%2)"))
    found = number([item("a"), item("b", 1)], define(0, *levels), name(1, 0))
    assert found == ["1)a", "1) b"]


HEADINGS = (
    '<w:style w:type="paragraph" w:styleId="Top"><w:pPr><w:numPr><w:numId w:val="1"/>'
    "</w:numPr></w:pPr></w:style>"
    '<w:style w:type="paragraph" w:styleId="Sub"><w:basedOn w:val="Top"/><w:pPr><w:numPr>'
    '<w:ilvl w:val="0"/><w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
    '<w:style w:type="paragraph" w:styleId="Own"><w:basedOn w:val="Sub"/></w:style>'
    '<w:style w:type="paragraph" w:styleId="Off"><w:basedOn w:val="Top"/><w:pPr><w:numPr>'
    '<w:numId w:val="0"/></w:numPr></w:pPr></w:style>'
    '<w:style w:type="paragraph" w:styleId="Round"><w:basedOn w:val="Round"/></w:style>'
)


def test_styles_say_list_and_level():
    lists = (
        define(0, level(0, "%1."), level(1, "%1.%2", more='<w:pStyle w:val="Sub"/>')),
        name(1, 0),
    )
    styles = ("Top", "Sub", "Own", "Off", "Round", "Nowhere", "Top")
    blocks = [item(style, style=style) for style in styles]
    expected = ["1. Top", "1.1 Sub", "1.2 Own", "Off", "Round", "Nowhere", "2. Top"]
    assert number(blocks, *lists, styles=HEADINGS) == expected
    off = [item("a", style="Top"), item("b", of=0), item("c", style="Top")]
    assert number(off, *lists, styles=HEADINGS) == ["1. a", "b", "2. c"]


def test_a_definition_may_name_a_style_with_a_list():
    linked = define(7).replace(
        "></w:abstractNum>", '><w:numStyleLink w:val="Top"/></w:abstractNum>'
    )
    lists = (*CLAUSES, linked, name(8, 7))
    found = number([item("a", of=8), item("b"), item("c", of=8)], *lists, styles=HEADINGS)
    assert found == ["1. a", "2. b", "3. c"]


def test_numbers_stand_in_cells_also_without_a_text():
    rows = "".join(row(cell_of(item("")), cell(text)) for text in ("first", "second"))
    merged = row(cell_of(item(""), "<w:vMerge/>"), cell("third"))
    found = number([f"<w:tbl>{rows}{merged}</w:tbl>", item("after")], *CLAUSES)
    assert found == ["1.\tfirst", "2.\tsecond", "2.\tthird", "3. after"]


def cell_of(block: str, properties: str = "") -> str:
    return f"<w:tc><w:tcPr>{properties}</w:tcPr>{block}</w:tc>"


def test_deleted_and_hidden_paragraphs_do_not_count():
    gone = item("", more="<w:rPr><w:del/></w:rPr>")
    hidden = item("", more="<w:rPr><w:vanish/></w:rPr>")
    joined = item("a ", more="<w:rPr><w:del/></w:rPr>")
    assert number([gone, joined, item("b"), hidden, item("c")], *CLAUSES) == ["1. a b", "2. c"]


def test_a_text_box_counts_apart():
    box = f"<w:r><w:pict><w:txbxContent>{item('inside')}</w:txbxContent></w:pict></w:r>"
    outside = item("a").replace("</w:p>", f"{box}</w:p>")
    assert number([outside, item("b")], *CLAUSES) == ["1. a", "1. inside", "2. b"]


@pytest.mark.parametrize(
    "lists",
    [
        (),
        (name(1, 3),),
        (define(0), name(1, 0)),
        (define(0, level(0, "")), name(1, 0)),
        (define(0, level(0, "•", "bullet")), name(1, 0)),
        (define(0, level(12, "%1")), name(1, 0)),
    ],
)
def test_a_list_without_a_number_has_none(lists):
    assert number([item("a")], *lists) == ["a"]


def test_values_that_are_no_numbers_and_long_texts_are_bounded():
    long = level(0, "%1" + "x" * 100_000).replace('w:start w:val="1"', 'w:start w:val="-7x"')
    (found,) = number([item("a")], define(0, long), name(1, 0))
    assert found.startswith("0xxx") and len(found) < 300
    high = level(0, "%1.").replace('w:start w:val="1"', 'w:start w:val="99999999999999999999"')
    assert number([item("a"), item("b")], define(0, high), name(1, 0)) == ["32767. a", "32767. b"]
