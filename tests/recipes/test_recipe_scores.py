"""The recipe of SmolLM2's scores, on the tiny model: complete, resumable, and counted."""

import json

import pytest

from recipes.smollm2 import scores
from restorekv.evaluation.answers_kept import EVERY
from restorekv.evaluation.run import LocalPool


def test_scores_are_written_with_answers_kept_and_made_once(tmp_path):
    benchmarks = ["tiny:low=100,high=160,count=2"]
    given = (tmp_path / "run", ["kvzip"], benchmarks, LocalPool(), scores.RATIOS, "tiny")
    results = scores.run_scores(*given)
    scores.write_result(results, tmp_path / "scores.json")
    stored = json.loads((tmp_path / "scores.json").read_text())
    rows = {(row["restored"], row["ratio"]) for row in stored["rows"] if row["method"] != "full"}
    assert rows == {(restored, ratio) for restored in (False, True) for ratio in (0.3, 0.1, 0.05)}
    assert all("gain" in row for row in stored["rows"] if row["restored"])
    assert "answers" not in stored and stored["kept"][0]["part"] == "all texts"
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.jsonl")}
    scores.run_scores(*given)
    assert files and files == {path: path.stat().st_mtime_ns for path in files}


FIRST = "tiny:low=100,high=160,count=2"


def measure(folder, benchmarks, path):
    """Measure benchmarks in a folder of their own and add them to the result at `path`."""
    given = (folder, ["kvzip"], benchmarks, LocalPool(), ("0.3",), "tiny")
    scores.write_result(scores.run_scores(*given), path)
    return json.loads(path.read_text())


def rename(stored, title, benchmark):
    """Return a result whose only benchmark has another name, as another benchmark would."""
    text = json.dumps(stored)
    (old,) = {fact["benchmark"]["title"] for fact in stored["facts"].values()}
    (spec,) = {row["benchmark"] for row in stored["rows"]}
    renamed = json.loads(text.replace(json.dumps(old), json.dumps(title)).replace(spec, benchmark))
    renamed["facts"] = {f"{benchmark} {name}": fact for name, fact in renamed["facts"].items()}
    return renamed


def test_benchmarks_can_be_measured_one_after_the_other(tmp_path):
    path = tmp_path / "scores.json"
    first = rename(measure(tmp_path / "one", [FIRST], path), "Other", "other")
    path.write_text(json.dumps(first))
    both = measure(tmp_path / "two", [FIRST], path)
    assert {row["benchmark"] for row in both["rows"]} == {"other", both["rows"][-1]["benchmark"]}
    assert len(both["rows"]) == 2 * len(first["rows"])
    assert len(both["facts"]) == 2 * len(first["facts"])
    total = {row["method"]: row for row in both["kept"] if row["part"] == EVERY}
    alone = {row["method"]: row for row in first["kept"] if row["part"] == EVERY}
    for method, row in total.items():
        assert row["right"] == 2 * alone[method]["right"] and "low" in row
    again = measure(tmp_path / "two", [FIRST], path)
    assert {**again, "date": ""} == {**both, "date": ""}


def test_a_result_of_another_evictor_stays_as_it_is(tmp_path):
    """It is another file's; without --result the command writes into KVzip's."""
    path = tmp_path / "scores.json"
    measure(tmp_path / "one", [FIRST], path)
    before = path.read_bytes()
    given = (tmp_path / "two", ["snapkv"], [FIRST], LocalPool(), ("0.3",), "tiny")
    with pytest.raises(SystemExit, match="is of kvzip, not of snapkv"):
        scores.write_result(scores.run_scores(*given), path)
    assert path.read_bytes() == before


def test_a_result_that_does_not_say_its_texts_does_not_stay(tmp_path, capsys):
    """What it counted cannot be added to what is counted now."""
    path = tmp_path / "scores.json"
    first = rename(measure(tmp_path / "one", [FIRST], path), "Other", "other")
    del first["kept_by_context"]
    path.write_text(json.dumps(first))
    both = measure(tmp_path / "two", [FIRST], path)
    assert "other" not in {row["benchmark"] for row in both["rows"]}
    assert {row["part"] for row in both["kept"]} == {row["part"] for row in first["kept"]}
    assert "does not say which texts it counted" in capsys.readouterr().out


def test_more_questions_take_the_place_of_fewer(tmp_path):
    path = tmp_path / "scores.json"
    measure(tmp_path / "one", ["tiny:low=100,high=160,count=1"], path)
    both = measure(tmp_path / "two", [FIRST], path)
    assert {row["benchmark"] for row in both["rows"]} == {"tiny:count=2,low=100,high=160"}


def test_figures_of_another_adapter_do_not_stay(tmp_path, capsys):
    path = tmp_path / "scores.json"
    text = json.dumps(rename(measure(tmp_path / "one", [FIRST], path), "Other", "other"))
    (digest,) = {
        fact["adapter"]["hash"] for fact in json.loads(text)["facts"].values() if fact["adapter"]
    }
    path.write_text(text.replace(digest, "0" * 16))
    both = measure(tmp_path / "two", [FIRST], path)
    assert "other" not in {row["benchmark"] for row in both["rows"]}
    assert "other adapters" in capsys.readouterr().out


def test_two_settings_of_a_benchmark_count_every_context_once(tmp_path):
    """A folder may hold two counts of one benchmark; the smaller one's contexts are in both."""
    path = tmp_path / "scores.json"
    measure(tmp_path / "run", ["tiny:low=100,high=160,count=1"], path)
    given = (tmp_path / "run", ["kvzip"], [FIRST], LocalPool(), ("0.3",), "tiny")
    results = [
        *scores.run_scores(*given),
        *scores.load_results(tmp_path / "run"),
    ]
    results = list({result.cell.name: result for result in results}.values())
    path.unlink()
    scores.write_result(results, path)
    first = json.loads(path.read_text())
    contexts = {len(each) for each in first["kept_by_context"].values()}
    assert max(contexts) <= 2
    scores.write_result(results, path)
    again = json.loads(path.read_text())
    assert again["kept"] == first["kept"]
    assert again["kept_by_context"] == first["kept_by_context"]


def test_former_settings_do_not_stay_beside_new_ones(tmp_path):
    """A result of before may name its kinds of text with settings, such as "Tiny (count=1)"."""
    path = tmp_path / "scores.json"
    first = measure(tmp_path / "run", [FIRST], path)
    (title,) = {fact["benchmark"]["title"] for fact in first["facts"].values()}
    for entries in first["kept_by_context"].values():
        for entry in entries:
            entry[0] = f"{title} (count=2)"
        entries += [[f"{title} (count=1)", *entry[1:]] for entry in entries]
    path.write_text(json.dumps(first))
    again = measure(tmp_path / "run", [FIRST], path)
    assert {len(each) for each in again["kept_by_context"].values()} <= {1, 2}
