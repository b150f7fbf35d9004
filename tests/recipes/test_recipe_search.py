"""The search of a recipe: variants differ in one thing, and their table compares them case by case."""

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

PLACE = Path(__file__).parents[2] / "recipes" / "smollm2" / "search.py"


@pytest.fixture(scope="module")
def search():
    spec = importlib.util.spec_from_file_location("smollm2_search", PLACE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["smollm2_search"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["smollm2_search"]


def result(search, name: str, kl: list[float]) -> dict:
    rows = [
        {"name": str(n), "kl": {f"{ratio:g}": each for ratio in search.RATIOS}}
        for n, each in enumerate(kl)
    ]
    return {"variant": name, "seed": 0, "steps": 10, "seconds": 5.0, "development": rows}


def test_a_variant_changes_one_thing(search):
    first = asdict(search.VARIANTS["first"])
    scratch = asdict(search.VARIANTS["scratch"])
    for name, variant in search.VARIANTS.items():
        own = asdict(variant)
        base = first if own["init"] else scratch
        changed = [key for key in own if own[key] != base[key]]
        assert len(changed) <= 1 or name in ("shift, weight 1", "scratch"), (name, changed)


def test_gains_are_paired_with_the_first(search):
    table = search.compare(
        [result(search, "lr 1e-3", [0.1, 0.3]), result(search, "first", [0.2, 0.4])]
    )
    rows = [line.split(" | ") for line in table.splitlines()]
    assert len({len(row) for row in rows[2:]}) == 1 and len(rows) == 4
    assert "0.2000 | +0.1000 (+0.1000 to +0.1000)" in table, (
        "a gain of one tenth in every case has no width"
    )
    assert "0.3000 | +0.0000 (+0.0000 to +0.0000)" in table
