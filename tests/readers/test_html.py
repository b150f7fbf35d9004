"""HTML pages: columns, raised text, hidden text, forms, equations and character sets."""

import codecs

import pytest

from restorekv.errors import RestoreKVError
from restorekv.readers.charsets import decode_page
from restorekv.readers.extract import extract_text, load_document
from restorekv.readers.html_text import extract_html


def read(page: str) -> str:
    return extract_html(page.encode())[0]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ("<tr><td>a<td><td>c<tr><td></td><td>b</td><td></td></tr>", "a\t\tc\n\tb\t"),
        (
            "<thead><tr><th rowspan=2>Year<th colspan=2>Sales<th>Tax<tr><th>Q1<th>Q2<th>%"
            "<tbody><tr><td rowspan=0>2020<td>1<td>2<td>3<tr><td>4<td>5<td>6"
            "<tfoot><tr><td>All<td>5",
            "Year\tSales\t\tTax\nYear\tQ1\tQ2\t%\n2020\t1\t2\t3\n2020\t4\t5\t6\nAll\t5",
        ),
        ("<tr><td>a<td rowspan=2>b<tr><td>c<tr><td>d<td>e", "a\tb\nc\tb\nd\te"),
        (f"<tr><td rowspan=2>{'x' * 201}<td>1<tr><td>2", "x" * 201 + "\t1\n\t2"),
        ("<caption>Ages</caption><tr><td>a<td>b</tr><tr></tr>", "Ages\na\tb"),
        ("<tr hidden><td>no<tr><td>a<td style='display: none'>no<td>c", "a\tc"),
        ("<tr><td colspan=3>Title<tr><td>a<td>b<td>c", "Title\na\tb\tc"),
        ("<tr><td>a<br>b<p>c</p><td>d", "a b c\td"),
        ("<tr><td>left<td><table><tr><td>1<td>2</table>", "left\n1\t2"),
        ("<tr><td>one<p>two</p></table><table><tr><td>x</table>", "one\ntwo\nx"),
        ("<template><tr><td>no</td></tr></template><tr><td>a<td>b", "a\tb"),
        ("<tr><td>a</tr>stray<tr><td>b", "stray\na\nb"),
    ],
)
def test_values_of_tables_stay_in_their_columns(rows, text):
    assert read(f"<table>{rows}</table>") == text


@pytest.mark.parametrize(
    ("ruby", "text"),
    [
        ("漢<rt>かん</rt>字<rt>じ</rt>", "漢(かん)字(じ)"),
        ("漢<rp>（</rp><rt>かん</rt><rp>）</rp>字<rp>（<rt>じ<rp>）", "漢(かん)字(じ)"),
        ("食<rt>た</rt>べ<rt></rt>物<rt>もの", "食(た)べ物(もの)"),
        ("<rb>漢<rt hidden>かん", "漢"),
    ],
)
def test_readings_of_words_do_not_join_the_words(ruby, text):
    assert read(f"<p>a<ruby>{ruby}</ruby>b") == f"a{text}b"


def test_words_are_whole_where_a_browser_may_break_them():
    """German pages have soft hyphens in every long word, which no question has."""
    page = "<p>Rechts&shy;schutz&#173;ver\xadsicherung, super<wbr>calif</p><pre>a&shy;b</pre>"
    assert read(page) == "Rechtsschutzversicherung, supercalif\nab"
    assert read("<p>x&shy;</p><p>&shy;</p>") == "x"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("10<sup>6</sup> m<sup>2</sup>", "10^6 m^2"),
        ("10<sup>6</sup>5 10<sup>-6</sup> 2<sup>n+1</sup>", "10^(6)5 10^-6 2^(n+1)"),
        ("10<sup>6 </sup>people", "10^6 people"),
        ("the 1<sup>st</sup> at 20<sup>°</sup>C", "the 1st at 20°C"),
        ("H<sub>2</sub>O log<sub>2</sub>8 T<sub>max</sub>", "H2O log_(2)8 T_max"),
        ("10<sub>2</sub> SO<sub>4</sub><sup>2-</sup>", "10_2 SO4^(2-)"),
        ("2<sup>1</sup>/<sub>2</sub> cups", "2 1/2 cups"),
        ("12<sup><a href='#n3'>3</a></sup> 13<a href='#n4'><sup>4</sup></a>", "12[3] 13[4]"),
        ("14<sup class=r><a href='#c'><span>[</span>3<span>]</span></a></sup>.", "14[3]."),
        ("<a href='#area'>km<sup>2</sup></a>", "km^2"),
        ("15<a role=doc-noteref href=n.html>5</a>", "15[5]"),
        ("10<span style='vertical-align:super'>6</span>", "10^6"),
        ("<b>10<sup>6</b>7", "10^(6)7"),
        ("a\x11b\x15c", "abc"),
    ],
)
def test_raised_and_lowered_text_changes_no_number(page, text):
    assert read(page) == text


@pytest.mark.parametrize(
    ("equation", "text"),
    [
        ("<mfrac><mn>1</mn><mn>2</mn></mfrac>", "3 1/2 x"),
        (
            "<mfrac><mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow><mrow><mn>2</mn><mi>a</mi></mrow>"
            "</mfrac>",
            "3((a+b)/(2a)) x",
        ),
        ("<mo>+</mo><msup><mn>10</mn><mn>6</mn></msup><mn>5</mn>", "3+10^(6)5 x"),
        ("<mo>+</mo><msqrt><mi>b</mi><mo>-</mo><mn>1</mn></msqrt>", "3+sqrt(b-1) x"),
        ("<mo>+</mo><mroot><mn>8</mn><mn>3</mn></mroot>", "3+root(8, 3) x"),
        (
            "<semantics><mo>+</mo><annotation>no</annotation></semantics><msub><mi>y</mi><mn>1</mn>"
            "</msub>",
            "3+y_1 x",
        ),
    ],
)
def test_equations_of_pages(equation, text):
    assert read(f"<p>3<math>{equation}</math> x") == text


def test_equations_of_katex_and_mathjax_are_read_once():
    """They write MathML for screen readers, and pieces that their styles place."""
    mathml = (
        "<math><semantics><msup><mn>10</mn><mn>6</mn></msup>"
        "<annotation encoding=application/x-tex>10^6</annotation></semantics></math>"
    )
    pieces = "<span>1<span>0</span><span style='height:0.8em'>6</span></span>"
    shown_by_katex = f"<span class=katex-html aria-hidden=true>{pieces}</span>"
    katex = f"<span class=katex><span class=katex-mathml>{mathml}</span>{shown_by_katex}</span>"
    mathjax = f"<span class=MathJax><nobr aria-hidden=true>{pieces}</nobr><span>{mathml}</span>"
    assert read(f"<p>{katex} people, {katex}.") == "10^6 people, 10^6."
    assert read(f"<p>{mathjax} people") == "10^6 people"
    # Both can be set to write no MathML.
    assert read(f"<p>a {shown_by_katex}<nobr>{pieces}</nobr>") == "a 106106"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("a<p hidden>no<p>b", "a\nb"),
        ("a<div style='color:red; display:none'>no<div>no</div>no</div>b", "a\nb"),
        ("a<i style='visibility:hidden'>no<b style='visibility:visible'>yes</b>no</i>b", "ayesb"),
        ("<ul><li hidden>no<li>a</ul><p aria-hidden=true>b", "a\nb"),
        ("<p hidden style='display:block'>a", "a"),
        ("a<!-- no --><template>no</template><noscript>no</noscript><style>no</style>", "a"),
        ("<div hidden>only</div>", "only"),
        ("<noscript>Needs <b>scripts</b></noscript><script>no</script>", "Needs scripts"),
        ("a<iframe src=x>no</iframe>b<video src=x>no <a href=x>no</a></video>", "a b"),
        ("<frameset><frame src=x><noframes>only</noframes></frameset>", "only"),
        ("<p>It costs <del>100</del>80", "It costs 80"),
        ("<table hidden><tr><td>no</table>yes", "yes"),
        ("a<template><table><tr><td>no</template>b", "ab"),
    ],
)
def test_hidden_text_is_read_only_if_there_is_no_other(page, text):
    assert read(page) == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("a<br>b<br/>c<hr>d", "a\nb\nc\nd"),
        ("<ul><li>a<li>b</ul><dl><dt>c<dd>d</dl>", "a\nb\nc\nd"),
        ("<select><option>a<option selected>b</select>", "a\n[x] b"),
        ("Name<input value='Zoë'>City<input type=password value=no>", "Name Zoë City"),
        (
            "<input type=hidden value=no>a<input type=checkbox checked>b<input type=radio>",
            "a [x] b [ ]",
        ),
        ("a<img src=x alt='a red house'>b<img alt=''>", "a a red house b"),
        ("<button>Save</button><button>Stop</button>", "Save Stop"),
        ("<q>a</q>", '"a"'),
        ("<b style='display:block'>a</b><i style='Display: flex'>b</i>c", "a\nb\nc"),
        ("<pre><b style='display:flex'>a\n</b><b style='display:flex'>\n</b>b</pre>", "a\n\nb"),
        ("<span style='display:block; float:left'>A</span>gnes", "Agnes"),
        ("<p hidden>no<b style='display:block'>no</b></p>1<b style='display:inline'>0", "10"),
        ("<svg><text>10</text><text>20<tspan dy=-1>a</tspan></text></svg>", "10 20a"),
        ("<svg><text><tspan x=0>one</tspan><tspan x=0 dy=1em>two</tspan></text></svg>", "one two"),
        ("<svg><metadata>no</metadata><desc>no</desc><text>10</text></svg>", "10"),
    ],
)
def test_nothing_merges_words(page, text):
    assert read(page) == text


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<ol><li>a<li>b</li></ol>c", "1. a\n2. b\nc"),
        ("<ol start=5><li>a<li value=9>b<li>c</ol>", "5. a\n9. b\n10. c"),
        ("<ol start=-1><li>a<li>b<li>c</ol>", "-1. a\n0. b\n1. c"),
        ("<ol start=x><li>a</ol>", "1. a"),
        ("<ol reversed><li>a<li>b<li>c</ol>", "3. a\n2. b\n1. c"),
        ("<ol reversed start=10><li>a<li>b</ol>", "10. a\n9. b"),
        ("<ol reversed><li>a<li value=7>b<li>c</ol>", "3. a\n7. b\n6. c"),
        ("<ol type=a start=26><li>a<li>b</ol>", "z. a\naa. b"),
        ("<ol type=I><li>a<li type=i>b<li value=4>c</ol>", "I. a\nii. b\nIV. c"),
        ("<ol style='list-style-type: upper-latin'><li>a</ol>", "A. a"),
        ("<ol style='list-style: none'><li>a</ol>", "a"),
        (
            "<ol style='list-style: inside'><li>a<li style='list-style-type: square'>b</ol>",
            "1. a\nb",
        ),
        ("<ol><li style='display: inline'>a<li>b</ol>", "a\n2. b"),
        ("<ul><li>a<li type=1>b</ul>", "a\n2. b"),
        # Each list counts for itself, and goes on after what is inside of it.
        (
            "<ol><li>a<ul><li>b</ul><li>c<ol><li>d<li>e</ol>f<li>g</ol><ol><li>h</ol>",
            "1. a\nb\n2. c\n1. d\n2. e\nf\n3. g\n1. h",
        ),
        ("<ol reversed><li>a<ol reversed><li>b<li>c</ol><li>d</ol>", "2. a\n2. b\n1. c\n1. d"),
        ("<ol><li><ol><li>a</ol></ol>", "1. 1. a"),
        # A number is in the line of its item's first words.
        ("<ol><li>\n<p>a<p>b</li>\n<li><div><b>c</b></div></ol>", "1. a\nb\n2. c"),
        ("<ol><li><input type=checkbox>a<li><math><mn>3</mn></math></ol>", "1. [ ] a\n2. 3"),
        ("<ol><li><pre>a\n  b</pre></ol>", "1.\na\n  b"),
        ("<ol><li><table><tr><td>a<td>b</table>c</ol>", "1.\na\tb\nc"),
        ("<ol><li><a href='#n'><sup>1</sup></a> a<li><sup>2</sup>b</ol>", "1. [1] a\n2. ^(2)b"),
        # What has no text has no number, and what is hidden is not counted.
        ("<ol><li></li><li>a<li> <br></ol>b", "2. a\nb"),
        (
            "<ol reversed><li hidden>no<li>a<li style='visibility: hidden'>no<li>b</ol>",
            "3. a\n1. b",
        ),
        ("<li>a<p>b", "a\nb"),
        ("<ol><li>a<table><tr><td><li>b</table></ol>", "1. a\nb"),
        ("<table><tr><td>a<td><ol><li>b<li>c</ol></table>", "a\t1. b 2. c"),
        ("<ol></ul><li>a</ol></ol><ol reversed><li>b", "1. a\n1. b"),
    ],
)
def test_items_of_a_list_have_their_numbers(page, text):
    assert read(page) == text


def test_deep_pages_take_no_long_time():
    words = read("<ol>" + "<div>" * 2_000 + "<li>a" * 2_000)
    assert words.endswith("\n2000. a")
    words = read("<ol reversed><li>" * 2_000 + "a")
    assert words == "1. " * 2_000 + "a"
    words = read("<sup>" * 2000 + "<div><table><tr><td>" * 300 + "words")
    assert words == "words" or words.count("words") == 1


NAMED = {
    "latin-1": ("<meta charset=ISO-8859-1>Zoë", "cp1252"),
    "cp1252": ("<meta http-equiv=content-type content='text/html;charset=cp1252'>€", "cp1252"),
    "Shift_JIS": ("<html><head><meta charset='Shift_JIS'>漢字", "cp932"),
    "XML": ('<?xml version="1.0" encoding="ISO-8859-2"?><p>Łódź', "iso8859-2"),
    "GB2312": ("<meta charset=gb2312>汉字", "gb18030"),
    "a comment": ("<!-- <meta charset=shift_jis> --><meta charset=utf-8>Zoë", "utf-8"),
    "nothing": ("<p>Zoë", "utf-8"),
    "UTF-16 that cannot be": ("<meta charset=utf-16>Zoë", "utf-8"),
    "Latin-1 over UTF-8": ("<meta charset=iso-8859-1>Zoë", "utf-8"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_page_is_decoded_as_it_says(name):
    page, charset = NAMED[name]
    assert decode_page(page.encode(charset), "a.html") == page


def test_marks_of_unicode_go_first():
    page = "<meta charset=shift_jis>Zoë"
    for mark, charset in (
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
    ):
        assert decode_page(mark + page.encode(charset), "a.html") == page
    page = '<?xml version="1.0" encoding="utf-16"?>Zoë'
    assert decode_page(page.encode("utf-16-be"), "a.html") == page


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<meta charset=utf-8>Zo\xeb", r"a\.html is not UTF-8 text \(byte 22\)"),
        (b"<p>Zo\xeb", r"a\.html is not UTF-8 text"),
        (b"<meta charset=shift_jis>\x81", "says that it is shift_jis, and byte 24 is not; save"),
        (b"<meta charset=rot13>a", "names the character set 'rot13', which is not known; save"),
        (b"<meta charset=utf-7>a", "which is not known"),
        (b"<meta charset=latin1>\0\xeb", "is binary"),
    ],
)
def test_bytes_that_are_no_text_are_refused(content, message):
    with pytest.raises(RestoreKVError, match=message):
        decode_page(content, "a.html")


def test_a_page_is_read_by_its_program():
    page = "<meta charset=windows-1252><table><tr><td>Zoë<td>10<sup>6</sup></table>"
    assert extract_text("a.html", page.encode("cp1252")) == "Zoë\t10^6"


def test_lines_of_windows_end_as_python_reads_them(tmp_path):
    """The same text is the same cache from a command, an upload and a program."""
    file = tmp_path / "register.txt"
    file.write_bytes(b"Ada\r\nBo\rCy\n")
    assert load_document(file) == file.open().read() == "Ada\nBo\nCy\n"
    assert extract_text("register.txt", file.read_bytes()) == "Ada\nBo\nCy\n"
