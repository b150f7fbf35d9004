"""The recipe of SmolLM2's scores, on the tiny model: complete, resumable, and counted."""

import json

from recipes.smollm2 import scores
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
