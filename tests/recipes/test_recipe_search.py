"""The search of a recipe: variants differ in one thing, and their table compares them case
by case.
"""

import json
from dataclasses import asdict

import pytest

from recipes.smollm2 import search


def result(name: str, kl: list[float]) -> dict:
    rows = [
        {"name": str(n), "kl": {f"{ratio:g}": each for ratio in search.RATIOS}}
        for n, each in enumerate(kl)
    ]
    return {"variant": name, "seed": 0, "steps": 10, "seconds": 5.0, "development": rows}


def test_a_variant_changes_one_thing():
    bases = {"kvzip": "first", "": "scratch"}
    for name, variant in search.VARIANTS.items():
        own = asdict(variant)
        base = asdict(search.VARIANTS[bases[variant.init]])
        if name.startswith("root, n "):
            base = asdict(search.VARIANTS["root, n 4"])
        if name == "root, n 4":
            continue  # a first row of its own
        changed = [key for key in own if own[key] != base[key]]
        assert len(changed) <= 1 or name.endswith("knows r, relative"), (name, changed)


def test_gains_are_paired_with_the_first():
    better, first = [0.1, 0.3] * 3, [0.2, 0.4] * 3
    table = search.compare_results([result("lr 1e-3", better), result("first", first)])
    rows = [line.split(" | ") for line in table.splitlines()]
    assert len({len(row) for row in rows[2:]}) == 1 and len(rows) == 4
    assert "0.2000 | +0.1000 (+0.1000 to +0.1000)" in table, (
        "a gain of one tenth in every case has no width"
    )
    assert "0.3000 | +0.0000 (+0.0000 to +0.0000)" in table


def test_what_cannot_be_run_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(SystemExit, match="There is no variant 'nosuch'; choose from alone"):
        search.main(["run", str(tmp_path), "nosuch"])
    with pytest.raises(SystemExit, match="--steps is above 20"):
        search.main(["run", str(tmp_path), "first", "--steps", "20"])


def test_a_result_of_an_adapter_that_shipped_before_is_not_taken_for_current(
    tmp_path, monkeypatch, capsys
):
    measured = []

    class Bench:
        def __init__(self, folder):
            pass

        def measure_divergence(self, restorer):
            measured.append(restorer)
            return [{"name": "n", "kl": {f"{ratio:g}": 0.5 for ratio in search.RATIOS}}]

    monkeypatch.setattr(search, "Bench", Bench)
    monkeypatch.setattr(search, "Restorer", lambda bench, variant, seed: variant.init)
    monkeypatch.setattr(search, "hash_shipped", lambda name: f"one {name}")
    command = ["run", str(tmp_path), "shipped", "alone"]
    search.main(command)
    search.main(command)
    assert measured == ["kvzip", None]
    monkeypatch.setattr(search, "hash_shipped", lambda name: f"other {name}")
    search.main(["table", str(tmp_path)])
    assert "Began with another adapter than ships now: shipped." in capsys.readouterr().out
    search.main(command)
    assert measured == ["kvzip", None, "kvzip"], "alone has no adapter"
    trained = search.name_result("first", 0, 400)
    old = {**json.loads((tmp_path / "results" / "shipped, seed 0, 400 steps.json").read_text())}
    old |= {"variant": "first", "init_hash": "one kvzip"}
    (tmp_path / "results" / f"{trained}.json").write_text(json.dumps(old))
    with pytest.raises(SystemExit, match="another adapter than ships now"):
        search.main(["run", str(tmp_path), "first"])
