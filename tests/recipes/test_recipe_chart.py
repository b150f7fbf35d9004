"""`make charts`: the README's chart and table and the tables of two pages say what the stored
result holds.
"""

import json
from pathlib import Path

import pytest

from recipes.smollm2 import chart

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "paper" / "results" / "smollm2-scores.json"


def test_the_chart_is_drawn_and_the_page_is_up_to_date(tmp_path):
    drawn = tmp_path / "chart.svg"
    places = ["--chart", str(drawn)]
    pages = {"--page": chart.PAGE, "--choosing": chart.CHOOSING, "--readme": chart.README}
    for flag, page in pages.items():
        copy = tmp_path / page.name
        copy.write_bytes(page.read_bytes())
        places += [flag, str(copy)]
    chart.main([str(RESULT), *places])
    for page in pages.values():
        assert (tmp_path / page.name).read_text() == page.read_text()
    text = drawn.read_text()
    assert "<svg" in text and all(
        f">{word}<" in text for word in ("RULER", "FairytaleQA", "KVzip restored")
    )


def test_the_table_has_every_row_of_the_result():
    result = json.loads(RESULT.read_text())
    lines = chart.make_table(result).splitlines()[2:]
    small = [row for row in result["rows"] if row["method"] != "full" and not row["restored"]]
    assert len(lines) == len(small) + len({row["benchmark"] for row in result["rows"]})
    for row in result["rows"]:
        # A restored cache shares its line, and so the bytes, with the evictor alone.
        size = "" if row["restored"] else f" {row['bytes'] / 1e6:.1f} "
        assert any(f"| {row['score']:.1f} |" in line and size in line for line in lines), row


def test_the_summary_of_answers_kept_has_the_numbers_of_the_result():
    result = json.loads(RESULT.read_text())
    lines = chart.make_kept_summary(result, "kvzip").splitlines()[2:]
    kept = {(row["part"], row["method"], row["ratio"]): row for row in result["kept"]}
    assert len(lines) == len(chart.group_kept_rows(result)) > 5
    for line in lines:
        part, right, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for ratio, cell in zip((0.3, 0.1, 0.05), cells, strict=True):
            alone = kept[part, "KVzip", ratio]
            restored = kept[part, "KVzip + RestoreKV", ratio]
            assert cell == f"{alone['kept']} / {restored['kept']}"
            assert int(right) == alone["right"] == restored["right"]


def test_evictors_are_next_to_each_other_on_the_texts_that_several_have():
    results = [json.loads(path.read_text()) for path in (RESULT, *chart.OTHERS)]
    lines = chart.make_evictors_table(results).splitlines()[2:]
    rows = []
    for result in results:
        for row in result["rows"]:
            # A line for each small cache, with what its restored one has.
            if row["method"] != "full" and not row["restored"]:
                rows.append(row)
    shared = {row["benchmark"] for row in rows if chart.evictor_of(row) != "kvzip"}
    rows = [row for row in rows if row["benchmark"] in shared]
    assert len(lines) == len(rows) > 5
    for row in rows:
        name = chart.name_evictor(chart.evictor_of(row))
        wanted = f"| {name} | {row['score']:.1f} |"
        assert any(wanted in line and f"| {row['kl']:.3f} |" in line for line in lines), row


def test_answers_that_an_evictor_keeps_are_next_to_those_of_the_first():
    results = [json.loads(path.read_text()) for path in (RESULT, *chart.OTHERS)]
    lines = chart.make_evictors_kept_table(results).splitlines()[2:]
    kept = {
        (row["method"], row["ratio"]): row for row in results[0]["kept"] if row["part"] == "RULER"
    }
    cells = chart.compare_kept_answers(results[0], results[-1], ["RULER"], 0.1)
    assert any(line.endswith(f"| 0.1 | {' | '.join(cells)} |") for line in lines)
    right, alone, restored, of_first, more = cells
    assert int(right) == kept["KVzip", 0.1]["right"]
    assert int(of_first) == kept["KVzip + RestoreKV", 0.1]["kept"]
    own = [
        sum(each[3] for each in contexts)
        for contexts in chart.list_kept_by_context(results[-1], ["RULER"], 0.1)
    ]
    assert [int(alone), int(restored)] == own
    share = 100 * (int(restored) - int(of_first)) / int(right)
    assert more.startswith(f"{share:+.0f} %")
    assert [chart.format_points(each) for each in (0.004, -0.004, 0.12)] == ["0", "0", "+12"]


def test_kept_answers_to_other_questions_are_not_compared():
    results = [json.loads(path.read_text()) for path in (RESULT, *chart.OTHERS)]
    for contexts in results[-1]["kept_by_context"].values():
        contexts[0][1] += 1  # tokens of its text
    with pytest.raises(ValueError, match="not asked the same"):
        chart.make_evictors_kept_table(results)


def test_evictors_that_were_asked_other_texts_are_not_compared():
    results = [json.loads(path.read_text()) for path in (RESULT, *chart.OTHERS)]
    chart.find_full_cache(results[1], "ruler:length=1024,per_task=5")["score"] += 1
    with pytest.raises(ValueError, match="does not answer the same in ruler"):
        chart.make_evictors_table(results)


def test_an_evictor_without_an_adapter_has_empty_cells(tmp_path):
    result = json.loads(RESULT.read_text())
    result["rows"] = [row for row in result["rows"] if not row["restored"]]
    assert "|  |" in chart.make_table(result).splitlines()[3]
    chart.draw_chart(result, "kvzip", tmp_path / "chart.svg")


def test_answers_kept_are_a_row_for_each_ratio_and_text():
    counts = {"right": 20, "kept": 15, "contexts": 12, "share": 0.75, "low": 0.5, "high": 0.9}
    rows = []
    for method, kept in (("KVzip", 15), ("KVzip restored", 18)):
        for ratio in (0.1, 0.05):
            row = counts | {"method": method, "ratio": ratio, "part": "all texts", "kept": kept}
            rows += [row, row | {"part": "513 to 1,024 tokens"}, row | {"part": "few", "right": 9}]
    # Twelve texts, of two right answers each; at 0.05 too few are lost for a share.
    kept = {"KVzip at 0.1": 1, "KVzip restored at 0.1": 2}
    by_context = {}
    for name, each in (kept | {"KVzip at 0.05": 2, "KVzip restored at 0.05": 2}).items():
        by_context[name] = [["stories", 700, 2, each]] * 12
    result = {"kept": rows, "kept_by_context": by_context}
    lines = chart.make_kept_table(result).splitlines()
    assert lines[0].endswith("| KVzip | KVzip restored | lost ones back |")
    assert lines[2:] == [
        "| all texts | 0.1 | 20 | 15 (75 %, 50 to 90) | 18 (75 %, 50 to 90) | 100 %, 100 to 100 |",
        "| all texts | 0.05 | 20 | 15 (75 %, 50 to 90) | 18 (75 %, 50 to 90) |  |",
    ]
    by_context["KVzip at 0.1"] = [["plays", 700, 2, 1]] * 12
    with pytest.raises(ValueError, match="is not asked the same"):
        chart.make_kept_table(result)


def test_genres_are_a_row_for_each_ratio():
    genres = {
        "kvzip alone at 0.1": {"chat_logs": 0.2, "plays": 0.4, "code": 0.1},
        "kvzip restored at 0.1": {"chat_logs": 0.1, "plays": 0.1, "code": 0.12},
        "h2o alone at 0.1": {"chat_logs": 1.0},
    }
    lines = chart.make_genres_table({"genres": genres}, "kvzip").splitlines()[2:]
    assert lines == [
        "| 0.1 | 3 | 0.233 | 0.107 | 50 % | -20 % (code) | 75 % (plays) |",
    ]


def test_a_share_whose_interval_is_not_known_has_none():
    assert chart.format_share({"share": 0.5}) == "50 %"
