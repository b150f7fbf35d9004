"""Blocks of a page: cells, tables, charts, and the folder that is written whole or not at all."""

import base64
import csv
import io
import sys

import pytest
from markupsafe import Markup
from matplotlib.image import imread
from rich.console import Console

from paper.markdown import render_markdown
from restorekv.cli import execute
from restorekv.errors import RestoreKVError
from restorekv.evaluation.charts import (
    BLUE,
    MARKERS,
    NARROW,
    VERMILION,
    Chart,
    Mark,
    make_figure,
    plot_line,
)
from restorekv.evaluation.frame import GridResults, make_frame
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.grid_tables import make_tables
from restorekv.evaluation.report import Section, mark_up_cell, render_page, write_page
from restorekv.evaluation.survivors import save_plot
from restorekv.evaluation.tables import (
    Table,
    format_gain,
    format_number,
    format_percent,
    format_score,
)
from tests.helpers import report_world

LINE = Mark("line", BLUE, "o")


def chart(name, mark=LINE):
    figure, (axes,) = make_figure([("<title>", NARROW, 3.0)])
    plot_line(axes, mark, [0, 1], [0, 1], ([0, 0.5], [0.5, 1]))
    return Chart(name, "C", figure, "alt", figures=[{"x": 0}])


def test_numbers():
    assert [format_number(2.25, sign=True), format_number(-0.04, sign=True)] == ["+2.2", "0.0"]
    assert [format_number(-1.0), format_number(None)] == ["−1.0", "–"]
    assert format_percent(0.1234) == "12.3 %" and format_percent(None) == "–"


@pytest.mark.parametrize(
    ("figures", "text", "look"),
    [
        ((2.0, 1.0, 3.0), "▲ +2.0 (+1.0 to +3.0)", "up bold"),
        ((2.0, -1.0, 5.0), "≈ +2.0 (−1.0 to +5.0)", "even"),
        ((-2.0, -3.0, -1.0), "▼ −2.0 (−3.0 to −1.0)", "down bold"),
        ((0.01, -1.0, 1.0), "= 0.0 (−1.0 to +1.0)", "even"),
        ((2.0,), "▲ +2.0", "up"),
    ],
)
def test_gain_has_arrow_sign_and_weight(figures, text, look):
    assert format_gain(*figures) == text
    assert mark_up_cell(text).startswith(f'<span class="{look}">')


def test_cells():
    assert format_score(91.44, 88.5, 94.0) == "91.4 (88.5 to 94.0)"
    assert format_score(91.44) == format_score(91.44, None, None) == "91.4"
    assert format_gain(2.0, few=True) == "≈ +2.0" and format_gain(0.0, few=True) == "= 0.0"
    assert format_gain(1.0, 0.5, 1.5, "9 % back") == "▲ +1.0 (+0.5 to +1.5; 9 % back)"
    assert mark_up_cell("*59.0* (+1.0)") == "<em>59.0</em> <small>(+1.0)</small>"
    assert mark_up_cell("<b>") == "&lt;b&gt;"


def test_page_escapes_all_but_markup():
    html = render_page(
        "<a & b>", [Section("<s>", "<i>", ["<p>", Markup("<em>so</em>"), ["<li>"]])], ["<sum>"]
    )
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


def test_a_stranger_s_text_is_escaped_wherever_it_stands():
    evil = "<script>\"&'</script>"
    figure, _ = make_figure([(evil, NARROW, 3.0)])
    blocks = [
        Table("t", evil, [evil], [[f"▲ {evil} ({evil})"]], evil),
        Section(evil, blocks=[[evil]]),
        Chart("c", evil, figure, evil, evil, [{evil: evil}]),
    ]
    html = render_page(evil, [Section(evil, evil, blocks, evil)], [evil], evil)
    assert "<script" not in html and html.count("&lt;script&gt;") == 16


def test_table_without_figures_writes_its_texts(tmp_path):
    rows = [["KVzip", "1,234", "80.0 " + format_gain(1.0, 0.5, 1.5)], ["x", "y", "z"]]
    made = Table("t", "T", ["method", "RULER 0.1", "RULER 0.05"], rows, strong=[1])
    write_page(tmp_path / "out", "Title", [Section("S", blocks=[Section("more", blocks=[made])])])
    with (tmp_path / "out" / "csv" / "t.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [list(made.columns), *rows]


def test_a_table_is_the_same_in_a_terminal_and_in_markdown():
    rows = [["KVzip [a]", "80.0 " + format_gain(1.0, 0.5, 1.5)], ["a|b", "*2*"]]
    made = Table("t", "T [b]", ["method", "r = 0.1"], rows, "N", strong=[1])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(made)
    text = console.export_text()
    for word in ("T [b]", "method", "KVzip [a]", "80.0", "▲ +1.0", "+0.5 to +1.5", "a|b", "N"):
        assert word in text
    lines = render_markdown("P", ["S"], [Section("H", blocks=[made, chart("c")])]).splitlines()
    assert lines[0] == "# P" and "| method | r = 0.1 |" in lines and "| --- | ---: |" in lines
    assert "| KVzip [a] | 80.0 ▲ +1.0 (+0.5 to +1.5) |" in lines and r"| **a\|b** | *2* |" in lines
    assert "![C. alt.](svg/c.svg)" in lines


def test_a_page_and_its_files_show_one_picture(tmp_path):
    index = write_page(tmp_path / "out", "t", [Section("s", blocks=[chart("c")])])
    drawn = (tmp_path / "out" / "svg" / "c.svg").read_bytes()
    assert b"&lt;title&gt;" in drawn and b"metadata" not in drawn
    assert chart("c").render("svg") == drawn, "the same chart has the same bytes"
    assert base64.b64encode(drawn).decode() in index.read_text()


@pytest.mark.parametrize("marker", MARKERS)
def test_legend_draws_every_marker(marker):
    made = chart("c", Mark("m", VERMILION, marker, dashed=True, hollow=True))
    [legend] = made.composed.legends
    [entry] = legend.legend_handles
    assert (entry.get_marker(), entry.get_color()) == (marker, VERMILION)
    assert (entry.get_markerfacecolor(), entry.get_label()) == ("#fefefe", "m")
    [legend] = chart("c", Mark("", VERMILION)).composed.legends
    assert not legend.legend_handles and legend.get_title().get_text() == "C"


def block_package(monkeypatch, package):
    """Make a package of the extra `eval` look as if it were not installed."""
    for name in [*sys.modules]:
        if name.startswith("restorekv.evaluation.") and name.endswith(
            ("report", "charts", "plots")
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("package", ["matplotlib", "jinja2", "pandas"])
def test_a_package_of_the_extra_is_named_where_it_is_missing(
    package, tmp_path, monkeypatch, capsys
):
    report_world.write_cell(tmp_path, Cell("tiny", "qasper", "kvzip", "0.1"))
    block_package(monkeypatch, package)
    assert execute(["report", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert f"needs the package {package}; run pip install 'restorekv[eval]'." in " ".join(
        told.split()
    )
    assert not (tmp_path / "report").exists()


def test_only_frames_and_pictures_need_the_extra(tmp_path, monkeypatch):
    cell = report_world.write_cell(tmp_path, Cell("tiny", "qasper", "kvzip", "0.1"))
    for package in ("matplotlib", "jinja2", "pandas"):
        block_package(monkeypatch, package)
    scores, held = make_tables(GridResults([cell]))
    assert "| KVzip | 0.1 |" in scores.to_markdown() and len(held.rows) == 1
    with pytest.raises(RestoreKVError, match="package pandas"):
        make_frame([cell])
    with pytest.raises(RestoreKVError, match=r"package (matplotlib|pandas)"):
        save_plot(None, tmp_path / "picture.png", "title")


def test_names_are_files_once():
    one = Table("a", "T", ["x"], [["1"]])
    for blocks in ([one, one], [Table("no/file", "T", ["x"], [["1"]])]):
        with pytest.raises(ValueError, match="is not a file name or is used twice"):
            render_page("t", [Section("s", blocks=blocks)])


def test_a_report_is_replaced_whole(tmp_path):
    out = tmp_path / "out"
    first = [Section("s", blocks=[chart("old")])]
    write_page(out, "first", first)
    broken = Chart("new", "C", None)
    with pytest.raises(AttributeError):
        write_page(out, "second", [Section("s", blocks=[broken])])
    assert (
        "<h1>first</h1>" in (out / "index.html").read_text()
        and imread(out / "png" / "old.png").shape[1] >= 300 * 4
    )
    write_page(out, "third", [Section("s", "text")])
    assert (
        "<h1>third</h1>" in (out / "index.html").read_text()
        and not (out / "png" / "old.png").exists()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<h1>mine</h1>")
    (tmp_path / "file").write_text("mine")
    for place, words in {
        "site": "not a report",
        "file": "is a file",
        "none/out": "does not exist",
    }.items():
        with pytest.raises(RestoreKVError, match=words):
            write_page(tmp_path / place, "t", [])
    (tmp_path / "empty").mkdir()
    assert write_page(tmp_path / "empty", "t", []).exists()
