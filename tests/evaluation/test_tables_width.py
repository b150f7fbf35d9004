"""Tables keep their numbers whole in terminals of 80 columns; wide ones are drawn as several."""

import io
import random
import re

import pytest
import torch
from rich.console import Console

from restorekv.cli import facts_demo, survivors_view
from restorekv.evaluation.survivors import Survivors
from restorekv.evaluation.tables import (
    Table,
    fit_widths,
    format_gain,
    format_percent,
    format_score,
    measure_cells,
)

WIDTH = 80


def draw(renderable, width=WIDTH) -> list[str]:
    """Return the lines of a terminal."""
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    return lines


def find_words(lines) -> set[str]:
    return set(re.sub("[│┃┏┓┡┩└┘━─┴┬┼╇┳┻]", " ", "\n".join(lines)).split())


def make_table(metrics: int) -> Table:
    """Return scores as `eval` prints them, with intervals, gains and large sizes."""
    figures = random.Random(metrics)
    columns = ["part", "method", "r", "score", "gain", "bytes"]
    columns += [f"metric {number}" for number in range(metrics)]
    rows = []
    for number in range(4):
        low, score, high = sorted(figures.uniform(-100, 100) for _ in range(3))
        gain = format_gain(score, low, high, f"{format_percent(0.1234, 0)} back")
        size = f"{figures.randint(10**7, 10**9):,} ({format_percent(score / 100, 2)})"
        row = [f"part {number}", "Expected Attention + RestoreKV", "0.05"]
        row += [format_score(score, low, high), gain, size]
        row += [f"{figures.uniform(0, 10**6):,.3f}" for _ in range(metrics)]
        rows.append(row)
    return Table("t", "Title", columns, rows, "A note.", left=(0, 1), keys=3)


@pytest.mark.parametrize("metrics", [0, 1, 3, 12])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_number_of_a_table_is_broken_or_cut(metrics, width):
    table = make_table(metrics)
    lines = draw(table, width)
    words = find_words(lines)
    for row in table.rows:
        for word in " ".join(row).split():
            if any(letter.isdigit() for letter in word):
                assert word in words
    text = "\n".join(lines)
    assert text.count("Title") == text.count("A note.") == 1
    # Every part of a table that was divided says what its rows are.
    assert text.count("┏") == text.count("method")


def test_a_table_that_fits_is_one():
    text = "\n".join(draw(make_table(0), 200))
    assert text.count("┏") == 1 and "Expected Attention + RestoreKV" in text


def test_the_numbers_of_the_demo_are_whole(monkeypatch):
    monkeypatch.setattr(facts_demo, "output", Console(width=WIDTH, file=io.StringIO()))
    long = "a tower of 123,456.25 tons and many words that say no more than that"
    answers = dict.fromkeys(facts_demo.CACHES, long)
    question = facts_demo.ShownQuestion(
        long, "1,234,567.5", answers, dict.fromkeys(facts_demo.CACHES, True)
    )
    shown = facts_demo.ShownText("tower", 1000, 1, 1, [question], [])
    words = find_words(draw(facts_demo.tabulate_answers(shown)))
    assert {"123,456.25", "1,234,567.5"} <= words


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 32])
@pytest.mark.parametrize("tokens", [9, 4_321, 1_234_567])
def test_the_numbers_of_inspect_are_whole(monkeypatch, heads, tokens):
    monkeypatch.setattr(survivors_view, "output", Console(width=WIDTH, file=io.StringIO()))
    counts = torch.full((3, heads), tokens)
    monkeypatch.setattr(Survivors, "per_head", property(lambda _: counts))
    monkeypatch.setattr(Survivors, "per_layer", property(lambda _: counts.float().mean(-1)))
    table = survivors_view.tabulate_heads(object.__new__(Survivors))
    words = find_words(draw(table))
    assert f"{tokens:,}.0" in words and any(word.startswith(f"{tokens:,}") for word in words)


def test_words_may_be_broken_and_numbers_may_not():
    assert measure_cells(["a" * 16, "one two"]) == (12, 16)
    assert measure_cells(["1" * 16, "one two"]) == (16, 16)
    assert measure_cells(["one two\nthree"]) == (5, 7)


def test_columns_that_lack_little_get_it_first():
    assert fit_widths([(5, 30), (5, 6)], 14) == [8, 6]
    assert fit_widths([(5, 6), (5, 30)], 14) == [6, 8]
    assert fit_widths([(5, 6), (5, 30)], 4) == [5, 5]
