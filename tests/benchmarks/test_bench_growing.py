"""The benchmark of growing texts: what it measures adds up, and the page says what was stored."""

import json

import numpy as np
import pytest

from benchmarks import growing, serving
from benchmarks.__main__ import execute
from benchmarks.growing import ALONE, ONCE, Options
from restorekv.errors import RestoreKVError
from tests.helpers.pages import ROOT

PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("long-texts.md", "conversations.md"))


@pytest.mark.slow
def test_a_small_run_adds_up():
    result = growing.run_growing(
        Options("tiny", "tiny:count=2", "kvzip", "0.2", (2,), ("last",)), lambda _: None
    )
    rows = result["rows"]
    assert (
        set(rows) == {ONCE, ALONE, "2 parts, last"}
        and rows[ONCE]["kl_times"] == rows[ONCE]["seconds_times"] == 1
    )
    assert len({row["pairs"] for row in rows.values()}) == 1
    assert all(row["kl"] >= 0 and row["kl_low"] is None for row in rows.values())
    assert len(list(growing.make_tables(result))) == 2


@pytest.mark.slow
def test_composed_texts_are_asked_together():
    result = growing.run_growing(
        Options("tiny", "tiny:count=2", "kvzip", "0.2", (), (), 2), lambda _: None
    )
    assert result["texts"] == 1 and "composed" in result["rows"]


def test_divergence_is_weighed_by_tokens():
    lines = [
        {"sum": 1.0, "tokens": 10, "seconds": 1.0, "pairs": 5},
        {"sum": 9.0, "tokens": 10, "seconds": 1.0, "pairs": 5},
    ]
    twice = [{**line, "sum": 2 * line["sum"], "seconds": 3.0} for line in lines]
    figures = growing.summarize_lines(twice, lines)
    assert (
        figures["kl"] == pytest.approx(1.0)
        and figures["kl_times"] == 2
        and figures["seconds_times"] == 3
    )
    assert figures["kl_low"] is None, "two contexts have no interval"
    assert np.isfinite(growing.summarize_lines(twice * 3, lines * 3)["kl_low"])


def test_the_page_says_what_was_stored():
    stored = json.loads((ROOT / "paper" / "results" / "growing.json").read_text())
    rows = stored["appended"]["rows"]
    for restore in ("last", "every", "none"):
        base = rows[ALONE if restore == "none" else ONCE]["kl"]
        cells = [base, *(rows[f"{parts} parts, {restore}"]["kl"] for parts in (2, 4, 8, 16))]
        assert f'| `"{restore}"` | ' + " | ".join(f"{kl:.3f}" for kl in cells) + " |" in PAGE
    ten, composed = stored["ten parts"]["rows"], stored["composed"]["rows"]
    told = [
        ten["10 parts, last"]["kl"],
        ten[ONCE]["kl"],
        ten[ALONE]["kl"],
        composed["composed"]["kl"],
        composed[ONCE]["kl"],
        composed["composed, no adapter"]["kl"],
        composed[ALONE]["kl"],
    ]
    assert all(f"{kl:.3f}" in PAGE for kl in told)
    assert f"{ten['10 parts, last']['seconds_times']:.2f} of the time" in PAGE
    turns = stored["appended"]["turns"]
    assert (
        f"{turns['small, turn 2']:.2f} s" in PAGE and f"{turns['whole, first turn']:.1f} s" in PAGE
    )
    choice = stored["choice"]["rows"]
    assert all(
        choice[f"{parts} parts, last"]["kl"]
        == min(row["kl"] for name, row in choice.items() if name.startswith(f"{parts} parts"))
        for parts in (2, 4, 8)
    )


def test_the_servers_table_compares_rates():
    seconds = {
        "library": 10.0,
        "restorekv": 12.0,
        "transformers": 120.0,
        "prefill": 5.0,
        "compress": 6.0,
        "first token after a restart": 0.2,
    }
    options = {"model": "m", "tokens": 10, "questions": 4, "clients": 2, "answer": 3}
    result = {"options": options, "seconds": seconds, "machine": {"processor": "p"}}
    table, http, *_ = serving.make_tables(result)
    assert list(table.rows[1])[1:] == ["20.0", "10.0"] and "0.83 of the library" in http


def test_the_page_on_sizing_says_what_was_stored():
    page, stored = (
        (ROOT / "docs" / "serving.md").read_text(),
        json.loads((ROOT / "paper/results/serving.json").read_text()),
    )
    seconds, questions = stored["seconds"], stored["options"]["questions"]
    for name in ("library", "restorekv", "transformers"):
        assert f"| {60 * questions / seconds[name]:.0f} | measured" in page
    assert f"(to read it: {seconds['prefill']:.1f}) | {seconds['compress']:.1f} | measured" in page
    assert f"| {seconds['first token after a restart']:.2f} | measured" in page


def test_options_that_cannot_be_measured_are_refused():
    def make(**changed):
        given = {"parts": (2,), "restore": ("last",)} | changed
        return Options("tiny", "tiny:count=2", "kvzip", "0.2", **given)

    make()
    with pytest.raises(RestoreKVError, match="parts"):
        make(parts=(2, 0))
    with pytest.raises(RestoreKVError, match="restore"):
        make(restore=("last", "nosuch"))
    with pytest.raises(RestoreKVError, match="together"):
        make(together=2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--parts", "0"], "--parts"),
        (["--parts", "2", "--together", "2"], "together"),
        (["--restore", "nosuch"], "restore"),
        (["--together", "3"], "2 texts"),
    ],
)
def test_the_command_refuses_them_in_a_sentence(words, reason, capsys):
    given = ["growing", "--model", "tiny", "--benchmark", "tiny:count=2", *words]
    assert execute(given) != 0
    told = capsys.readouterr().err
    assert reason in told and "Traceback" not in told


def test_ways_that_a_text_refused_are_listed(monkeypatch):
    """A way that has no figures for all texts is in the table and in the result, with the cause."""
    line = {"sum": 1.0, "tokens": 10, "seconds": 1.0, "pairs": 5}

    def compare(model, tokenizer, options, group):
        yield ONCE, line
        yield "2 parts, last", line if group[0].sample.id.endswith("0") else "too short"

    monkeypatch.setattr(growing, "_compare_ways", compare)
    options = Options("tiny", "tiny:count=2", "kvzip", "0.2", (2,), ("last",))
    result = growing.run_growing(options, lambda _: None)
    assert set(result["rows"]) == {ONCE}
    (dropped,) = result["dropped"].items()
    assert dropped[0] == "2 parts, last" and dropped[1]["reason"] == "too short"
    assert 0 < dropped[1]["texts"] <= 2
    table, *_ = growing.make_tables(result)
    assert table.rows[-1][0] == "2 parts, last" and "too short" in table.rows[-1][1]


def test_parts_that_are_too_short_are_refused_by_every_text():
    result = growing.run_growing(
        Options("tiny", "tiny:count=1,low=64,high=64", "kvzip", "0.2", (32,), ("last",)),
        lambda _: None,
    )
    assert set(result["rows"]) == {ONCE, ALONE}
    assert result["dropped"]["32 parts, last"]["texts"] == 1
