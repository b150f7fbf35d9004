"""Blocks of a page: cells, tables, charts, and the folder that is written whole or not at all."""

import csv
import io
from dataclasses import replace

import pytest
from markupsafe import Markup
from matplotlib.image import imread
from rich.console import Console

from paper.markdown import markdown
from restorekv.errors import RestoreKVError
from restorekv.evaluation import charts, draw
from restorekv.evaluation.charts import BLUE, MARKERS, SKY, VERMILION, Axis, Bars, Chart, Line, Mark, Panel
from restorekv.evaluation.report.page import Details, Points, Section, page, write
from restorekv.evaluation.tables import Table, TableCell, TableRow, gain, number, percent, score

LINE = Panel([Line(Mark("line", BLUE, "o"), [0, 1], [0, 1], ([0, 0.5], [0.5, 1]))], title="<title>")


def chart(name):
    return Chart(name, "C", [LINE], "alt", [{"x": 0}])


def test_numbers():
    assert [number(2.25, sign=True), number(-0.04, sign=True), number(-1.0), number(None)] == [
        "+2.2",
        "0.0",
        "−1.0",
        "–",
    ]
    assert percent(0.1234) == "12.3 %" and percent(None) == "–"


@pytest.mark.parametrize(
    ("figures", "text", "tone", "strong"),
    [
        ((2.0, 1.0, 3.0), "▲ +2.0", "up", True),
        ((2.0, -1.0, 5.0), "▲ +2.0", "up", False),
        ((-2.0, -3.0, -1.0), "▼ −2.0", "down", True),
        ((0.01, -1.0, 1.0), "= 0.0", "even", False),
        ((2.0,), "▲ +2.0", "up", False),
    ],
)
def test_gain_has_arrow_sign_and_weight(figures, text, tone, strong):
    made = gain(*figures)
    assert (made.text, made.tone, made.strong) == (text, tone, strong)
    assert made.small == (
        "" if len(figures) == 1 else f"{number(figures[1], 1, True)} to {number(figures[2], 1, True)}"
    )


def test_cells():
    assert score(91.44, 88.5, 94.0) == TableCell("91.4", "88.5 to 94.0")
    assert gain(1.0, 0.5, 1.5, of="80.0", more="9 % back").plain == "80.0 ▲ +1.0 (+0.5 to +1.5; 9 % back)"


def test_page_escapes_all_but_markup():
    html = page("<a & b>", [Section("<s>", "<i>", ["<p>", Markup("<em>so</em>"), Points(["<li>"])])], ["<sum>"])
    for word in (
        "&lt;a &amp; b&gt;",
        "&lt;s&gt;",
        "&lt;i&gt;",
        "&lt;p&gt;",
        "&lt;li&gt;",
        "&lt;sum&gt;",
        "<em>so</em>",
    ):
        assert word in html
    assert "<s>" not in html


def test_table_without_data_writes_its_texts(tmp_path):
    head = [["", TableCell("RULER", columns=2)], ["method", "0.1", "0.05"]]
    made = Table(
        "t", "T", head, [["KVzip", 1234, gain(1.0, 0.5, 1.5, of="80.0")], TableRow(["x", "y", "z"], strong=True)]
    )
    write(tmp_path / "out", "Title", [Section("S", blocks=[Details("more", [made])])])
    with (tmp_path / "out" / "csv" / "t.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["method", "RULER 0.1", "RULER 0.05"], ["KVzip", "1,234", "80.0 ▲ +1.0 (+0.5 to +1.5)"], ["x", "y", "z"],
        ]  # fmt: skip


def test_a_table_is_the_same_in_a_terminal_and_in_markdown():
    rows = [["KVzip [a]", gain(1.0, 0.5, 1.5, of="80.0")], TableRow(["a|b", TableCell("2", tone="note")], strong=True)]
    made = Table("t", "T [b]", ["method", "r = 0.1"], rows, "N")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(made)
    text = console.export_text()
    for word in ("T [b]", "method", "KVzip [a]", "80.0", "▲ +1.0", "+0.5 to +1.5", "a|b", "N"):
        assert word in text
    lines = markdown("P", ["S"], [Section("H", blocks=[made, chart("c")])]).splitlines()
    assert lines[0] == "# P" and "| method | r = 0.1 |" in lines and "| --- | ---: |" in lines
    assert "| KVzip [a] | 80.0 ▲ +1.0 (+0.5 to +1.5) |" in lines and r"| **a\|b** | *2* |" in lines
    assert "![C. alt.](svg/c.svg)" in lines


def test_svg_follows_the_page_s_colors_and_keeps_ids_apart():
    made = [draw.inline(LINE, name, 'a "chart"') for name in ("one", "two")]
    for text in made:
        assert text.startswith('<svg role="img" aria-label="a &#34;chart&#34;"')
        assert "&lt;title&gt;" in text and BLUE not in text and "var(--0072b2)" in text
        assert "metadata" not in text and "<?xml" not in text
    ids = [{part.split('"')[0] for part in text.split(' id="')[1:]} for text in made]
    assert ids[0] and not ids[0] & ids[1]


def test_every_color_has_a_dark_twin():
    html = page("t", [Section("s", blocks=[chart("c")])])
    for light, dark in charts.DARK.items():
        assert html.count(f"--{light[1:]}: {light};") == 1 and html.count(f"--{light[1:]}: {dark};") == 1


def legend(panels):
    return [entry for legend in draw.figure(Chart("c", "", panels)).legends for entry in legend.legend_handles]


@pytest.mark.parametrize("marker", MARKERS)
def test_legend_draws_every_marker(marker):
    line = Line(Mark("m", VERMILION, marker, dashed=True, hollow=True), [0], [0])
    (entry,) = legend([Panel([line]), Panel([line])])
    assert (entry.get_marker(), entry.get_color(), entry.get_markerfacecolor()) == (marker, VERMILION, "#fefefe")
    assert entry.get_label() == "m" and legend([Panel([replace(line, mark=Mark("", VERMILION))])]) == []


def test_legend_draws_every_hatch():
    marks = [Mark(hatch or "plain", SKY, hatch=hatch) for hatch in ("", "//", "xx")]
    entries = legend([Panel(Bars(["a"], {mark: [1] for mark in marks}))])
    assert [entry.get_hatch() or "" for entry in entries] == ["", "//", "xx"]


def test_no_break_within_units_and_equations():
    html = page("95 % at r = 0.05", [Section("s", "KL of a = 3 and 5 apples; B = floor(r T)")], ["12.5 % x"])
    for word in (
        "95\u00a0% at r\u00a0=\u00a00.05",
        "a\u00a0=\u00a03 and 5 apples; B\u00a0= floor(r T)",
        "12.5\u00a0% x",
    ):
        assert word in html


def test_names_are_files_once():
    one = Table("a", "T", ["x"], [["1"]])
    for blocks in ([one, one], [Table("no/file", "T", ["x"], [["1"]])]):
        with pytest.raises(ValueError, match="names no file or names two"):
            page("t", [Section("s", blocks=blocks)])


def test_a_report_is_replaced_whole(tmp_path):
    out = tmp_path / "out"
    first = [Section("s", blocks=[chart("old")])]
    write(out, "first", first)
    broken = Chart("new", "C", [Panel([], y=Axis(log=True))], "alt", [{"x": 0}])
    with pytest.raises(ValueError):
        write(out, "second", [Section("s", blocks=[broken])])
    assert "<h1>first</h1>" in (out / "index.html").read_text() and imread(out / "png" / "old.png").shape[1] >= 300 * 4
    write(out, "third", [Section("s", "text")])
    assert "<h1>third</h1>" in (out / "index.html").read_text() and not (out / "png" / "old.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<h1>mine</h1>")
    (tmp_path / "file").write_text("mine")
    for place, words in {"site": "not a report", "file": "is a file", "none/out": "does not exist"}.items():
        with pytest.raises(RestoreKVError, match=words):
            write(tmp_path / place, "t", [])
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty", "t", []).exists()
