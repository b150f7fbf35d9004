"""The search of a recipe: variants differ in one thing, and their table compares them case
by case.
"""

from dataclasses import asdict

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
