"""Blocks of a page: cells, tables, charts, and the folder that is written whole or not at all."""

import csv

import pytest
from markupsafe import Markup
from matplotlib.image import imread

from restorekv.errors import RestoreKVError
from restorekv.evaluation.report import (  # fmt: skip
    Cell,
    Chart,
    Details,
    Mark,
    Panel,
    Points,
    Row,
    Section,
    chart,
    draw,
    gain,
    number,
    page,
    percent,
    running,
    score,
    table,
    verdict,
    write,
)


def flat(axes):
    draw.line(axes, Mark("line", draw.BLUE, "o"), [0, 1], [0, 1], ([0, 0.5], [0.5, 1]))


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
    assert score(91.44, 88.5, 94.0) == Cell("91.4", "88.5 to 94.0")
    assert running(3, 104).text == "running (3 of 104 contexts)"
    assert [verdict(holds).text for holds in (True, False, None)] == ["✓ holds", "✗ does not hold", "○ open"]


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
    head = [["", Cell("RULER", columns=2)], ["method", "0.1", "0.05"]]
    made = table("t", "T", head, [["KVzip", 1234, gain(1.0, 0.5, 1.5, of="80.0")], Row(["x", "y", "z"], strong=True)])
    write(tmp_path / "out", "Title", [Section("S", blocks=[Details("more", [made])])])
    with (tmp_path / "out" / "csv" / "t.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["method", "RULER 0.1", "RULER 0.05"], ["KVzip", "1,234", "80.0 ▲ +1.0 (+0.5 to +1.5)"], ["x", "y", "z"],
        ]  # fmt: skip


def test_svg_follows_the_page_s_colours_and_keeps_ids_apart():
    made = [draw.svg(Panel(flat, "<title>"), name, 'a "chart"') for name in ("one", "two")]
    for text in made:
        assert text.startswith('<svg role="img" aria-label="a &#34;chart&#34;"')
        assert "&lt;title&gt;" in text and draw.BLUE not in text and "var(--0072b2)" in text
        assert "metadata" not in text and "<?xml" not in text
    ids = [{part.split('"')[0] for part in text.split(' id="')[1:]} for text in made]
    assert ids[0] and not ids[0] & ids[1]


def test_every_colour_has_a_dark_twin():
    html = page("t", [Section("s", blocks=[chart(flat, "c", "C", "alt", [{"x": 0}])])])
    for light, dark in draw.DARK.items():
        assert html.count(f"--{light[1:]}: {light};") == 1 and html.count(f"--{light[1:]}: {dark};") == 1


@pytest.mark.parametrize("marker", draw.MARKERS)
def test_legend_draws_every_marker(marker):
    assert draw.outline(marker).startswith("M") and draw.outline(marker).endswith("Z")
    assert "var(--d55e00)" in draw.swatch(Mark("m", draw.VERMILION, marker, dashed=True, hollow=True))


@pytest.mark.parametrize("hatch", draw.HATCHES)
def test_legend_draws_every_hatch(hatch):
    assert draw.HATCHES[hatch] in draw.swatch(Mark("m", draw.SKY, hatch=hatch))


def test_no_break_within_units_and_equations():
    html = page("95 % at r = 0.05", [Section("s", "KL of a = 3 and 5 apples; B = floor(r T)")], ["12.5 % x"])
    for word in (
        "95\u00a0% at r\u00a0=\u00a00.05",
        "a\u00a0=\u00a03 and 5 apples; B\u00a0= floor(r T)",
        "12.5\u00a0% x",
    ):
        assert word in html


def test_names_are_files_once():
    one = table("a", "T", ["x"], [["1"]])
    for blocks in ([one, one], [table("no/file", "T", ["x"], [["1"]])]):
        with pytest.raises(ValueError, match="names no file or names two"):
            page("t", [Section("s", blocks=blocks)])


def test_a_report_is_replaced_whole(tmp_path):
    out = tmp_path / "out"
    first = [Section("s", blocks=[chart(flat, "old", "C", "alt", [{"x": 0}])])]
    write(out, "first", first)
    broken = Chart("new", "C", [Panel(lambda axes: 1 / 0)], "alt", [{"x": 0}])
    with pytest.raises(ZeroDivisionError):
        write(out, "second", [Section("s", blocks=[broken])])
    assert "<h1>first</h1>" in (out / "index.html").read_text() and imread(out / "png" / "old.png").shape[1] >= 300 * 4
    write(out, "third", [Section("s", "text")])
    assert "<h1>third</h1>" in (out / "index.html").read_text() and not (out / "png" / "old.png").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("<h1>mine</h1>")
    (tmp_path / "file").write_text("mine")
    for place, words in {"site": "no report", "file": "is a file", "none/out": "does not exist"}.items():
        with pytest.raises(RestoreKVError, match=words):
            write(tmp_path / place, "t", [])
    (tmp_path / "empty").mkdir()
    assert write(tmp_path / "empty", "t", []).exists()
