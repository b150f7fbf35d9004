"""Answers kept: which questions count, what is counted of them, and intervals over contexts."""

from dataclasses import replace

import numpy as np
import pytest

from restorekv import tasks
from restorekv.evaluation.answers_kept import (
    EVERY,
    ContextAnswers,
    _split_contexts,
    collect_answers,
    count_kept,
    list_kept_rows,
    make_kept_table,
)
from restorekv.evaluation.frame import load_grid
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.results import ANSWERS, SUMMARY, load_results
from restorekv.evaluation.stats import MIN_FOR_INTERVAL
from tests.helpers.report_world import write_scores


@pytest.fixture
def run(tmp_path):
    """Six contexts of three questions: the full cache knows two of the three, the small cache half
    of them.
    """
    base = Cell("tiny", "tiny:count=6", "kvzip", "0.1")
    write_scores(tmp_path, Cell.full_cache(model="tiny", benchmark="tiny:count=6"), [[1, 1, 0]] * 6)
    write_scores(tmp_path, base, [[1, 0, 1]] * 3 + [[0, 1, 1]] * 3)
    write_scores(tmp_path, replace(base, adapter="auto"), [[1, 1, 0]] * 5 + [[0, 0.99, 0]])
    return tmp_path


def test_only_what_the_full_cache_knew_counts(run):
    found = {
        (row["method"], row["part"]): row for row in list_kept_rows(collect_answers(load_grid(run)))
    }
    base, restored = found["KVzip", EVERY], found["KVzip + RestoreKV", EVERY]
    assert (base["right"], base["kept"], base["contexts"]) == (12, 6, 6)
    assert (base["share"], base["low"], base["high"]) == (0.5, 0.5, 0.5)
    assert (restored["right"], restored["kept"]) == (12, 10), (
        "an answer that is almost right is not right"
    )


def test_the_table_says_how_many(run):
    table = make_kept_table(load_grid(run))
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    first = next(row for row in rows if row["texts"] == EVERY)
    assert first["kept"].startswith("6 (50 %), 50 %")
    assert len(table.figures) == len(table.rows)


def test_a_run_without_a_full_cache_has_no_table(tmp_path):
    write_scores(tmp_path, Cell("tiny", "tiny:count=6", "kvzip", "0.1"), [[1, 1, 1]] * 6)
    assert make_kept_table(load_grid(tmp_path)) is None


def test_a_full_cache_that_knows_nothing_has_no_table(tmp_path):
    write_scores(tmp_path, Cell.full_cache(model="tiny", benchmark="tiny:count=6"), [[0, 0, 0]] * 6)
    write_scores(tmp_path, Cell("tiny", "tiny:count=6", "kvzip", "0.1"), [[1, 1, 1]] * 6)
    assert make_kept_table(load_grid(tmp_path)) is None


@pytest.mark.parametrize("evictor", ["full", "kvzip"])
def test_a_cell_that_runs_is_not_counted_yet(run, evictor):
    """Of a full cache that runs some questions would count, of a small one none is known."""
    for result in load_results(run):
        if result.cell.evictor == evictor:
            (result.folder / SUMMARY).unlink()
            lines = (result.folder / ANSWERS).read_bytes().splitlines(keepends=True)
            (result.folder / ANSWERS).write_bytes(b"".join(lines[:4]))
    assert collect_answers(load_grid(run)) == {}


def test_rows_come_method_by_method_from_the_mildest_ratio():
    asked = [ContextAnswers(1, "text", 100, 2, 1)]
    keys = [("two", 0.1), ("one", 0.05), ("two", 0.3), ("one", 0.2)]
    rows = list(list_kept_rows(dict.fromkeys(keys, asked)))
    order = [("two", 0.3), ("two", 0.1), ("one", 0.2), ("one", 0.05)]
    assert [(row["method"], row["ratio"]) for row in rows] == order


def test_few_contexts_have_counts_alone(tmp_path):
    few = MIN_FOR_INTERVAL - 1
    write_scores(
        tmp_path, Cell.full_cache(model="tiny", benchmark="tiny:count=6"), [[1, 1, 1]] * few
    )
    write_scores(tmp_path, Cell("tiny", "tiny:count=6", "kvzip", "0.1"), [[1, 1, 0]] * few)
    table = make_kept_table(load_grid(tmp_path))
    (row,) = [dict(zip(table.columns, each, strict=True)) for each in table.rows]
    assert (row["right"], row["kept"]) == (f"{3 * few}", f"{2 * few}")


def test_the_interval_is_that_of_a_bootstrap_over_contexts():
    """An independent bootstrap, context by context, comes to the same interval."""
    rng = np.random.default_rng(0)
    contexts = [(rng.integers(1, 6), rng.random()) for _ in range(60)]
    by_context = [list(rng.random(count) < chance) for count, chance in contexts]
    figures = count_kept(
        [
            ContextAnswers(name, "text", 500, len(kept), int(sum(kept)))
            for name, kept in enumerate(by_context)
        ]
    )
    shares = []
    for _ in range(4000):
        drawn = [kept for place in rng.integers(0, 60, 60) for kept in by_context[place]]
        shares.append(np.mean(drawn))
    low, high = np.percentile(shares, (2.5, 97.5))
    assert figures["share"] == pytest.approx(np.mean(np.concatenate(by_context)))
    assert (figures["low"], figures["high"]) == (
        pytest.approx(low, abs=0.02),
        pytest.approx(high, abs=0.02),
    )


def test_free_answers_are_right_from_half_of_the_words():
    assert (
        tasks.make_benchmark("xquad").correct_threshold
        == tasks.make_benchmark("fairytaleqa").correct_threshold
        == 0.5
    )
    assert tasks.make_benchmark("ruler").correct_threshold == 1


def test_kinds_of_text_and_lengths_are_told_apart():
    contexts = [
        ContextAnswers(1, "RULER", 400, right=1, kept=1),
        ContextAnswers(2, "XQuAD", 900, right=1, kept=0),
        ContextAnswers(3, "XQuAD", 1024, right=2, kept=1),
    ]
    counts = {
        part: (sum(each.right for each in own), sum(each.kept for each in own))
        for part, own in _split_contexts(contexts, with_total=True).items()
    }
    assert counts == {
        EVERY: (4, 2),
        "RULER": (1, 1),
        "XQuAD": (3, 1),
        "1 to 512 tokens": (1, 1),
        "513 to 1,024 tokens": (3, 1),
    }


def test_the_longest_texts_have_a_row_too():
    """Lengths of which the longest were left out would not add up to all texts."""
    lengths = (512, 513, 8192, 8193, 100_000)
    contexts = [ContextAnswers(length, "text", length, 1, 1) for length in lengths]
    counts = {part: len(own) for part, own in _split_contexts(contexts, with_total=True).items()}
    assert counts.pop(EVERY) == sum(counts.values()) == 5
    assert counts == {
        "1 to 512 tokens": 1,
        "513 to 1,024 tokens": 1,
        "4,097 to 8,192 tokens": 1,
        "over 8,192 tokens": 2,
    }


def test_methods_that_were_asked_other_texts_have_no_common_row():
    def ask(*numbers):
        return [ContextAnswers(number, f"kind {number % 2}", 100, 2, 1) for number in numbers]

    def parts(second):
        rows = list_kept_rows({("one", 0.1): ask(0, 1, 2), ("two", 0.1): second})
        return {row["part"] for row in rows}

    assert parts(ask(0, 1, 2)) == {EVERY, "kind 0", "kind 1"}
    assert parts(ask(0, 2)) == {"kind 0", "kind 1"}


def test_a_sentence_that_names_the_reference_is_right():
    xquad = tasks.make_benchmark("xquad")

    def answer(prediction, *references, score=0.2):
        return {"score": score, "prediction": prediction, "references": list(references)}

    assert xquad.is_right(answer("The Panthers defense surrendered 308 points.", "308"))
    assert xquad.is_right(answer("It was Henry Hall, a keeper.", "H. Hall", "Henry Hall"))
    assert xquad.is_right(answer("Seven.", "eight", score=0.5)), "half of the words in common"
    assert not xquad.is_right(answer("The Panthers defense surrendered 3081 points.", "308"))
    assert not xquad.is_right(answer("It was Jack.\nQuestion: Who is Henry Hall?", "Henry Hall"))
    assert not xquad.is_right(answer("There is no such thing.", "no")), "a word, not a verdict"
    assert not xquad.is_right(answer("Anything.", "the"))
    qasper = tasks.make_benchmark("qasper")
    assert qasper.is_right(answer("The corpus has 300 papers.", "300 papers", score=0.4))
    assert qasper.is_right(answer("Seven.", "eight", score=0.5))
    assert not qasper.is_right(answer("Seven.", "eight", score=0.4))
    longbench = tasks.make_benchmark("longbench")
    papers = answer("The corpus has 300 papers.", "300 papers", score=0.4)
    assert longbench.is_right({**papers, "task": "qasper"}), "as the benchmark of that name"
    assert not longbench.is_right({**papers, "task": "qmsum"}), "summaries have no short answer"
    assert longbench.is_right({**papers, "task": "qmsum", "score": 0.5})
    ruler = tasks.make_benchmark("ruler")
    assert not ruler.is_right(answer("308", "308", score=0.9))
