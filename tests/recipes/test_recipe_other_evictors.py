"""Which evictors KVzip's adapter serves is decided by the divergences in a folder."""

import json

import pytest

from recipes.smollm2 import other_evictors


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(other_evictors, "Bench", lambda folder: None)
    monkeypatch.setattr(other_evictors, "hash_shipped", lambda name: f"hash of {name}")

    def build(**divergences):
        """Divergences by evictor: alone, with its own adapter, with KVzip's; over six passages."""
        with (tmp_path / other_evictors.MEASURED).open("w") as file:
            for evictor, (alone, own, ours) in divergences.items():
                adapters = {"": alone, evictor: own, "kvzip": ours}
                for adapter, mean in adapters.items():
                    if mean is None:
                        continue
                    for passage in range(6):
                        kl = {f"{ratio:g}": mean + passage / 100 for ratio in (0.3, 0.1, 0.05)}
                        row = {"passage": str(passage), "evictor": evictor, "adapter": adapter}
                        if adapter:
                            row["hash"] = f"hash of {adapter}"
                        file.write(json.dumps({**row, "kl": kl}) + "\n")
        return other_evictors.Comparison(tmp_path)

    return build


def test_an_adapter_serves_where_it_is_nearly_the_best(comparison, capsys):
    found = comparison(
        better=(0.4, 0.3, 0.2),
        alike=(0.4, 0.3, 0.31),
        worse=(0.4, 0.2, 0.3),
        harmed=(0.2, 0.3, 0.25),
        without=(0.4, None, 0.2),
    )
    evictors = ["better", "alike", "worse", "harmed", "without"]
    lowest = {"better": 0.05, "alike": 0.05, "without": 0.05}
    assert found.list_served(evictors) == lowest
    with found.file.open("a") as file:  # an interrupted run
        row = {"passage": "7", "evictor": "better", "adapter": "", "kl": {"0.3": 9.0}}
        file.write(json.dumps(row) + "\n")
    assert found.list_served(evictors) == lowest
    table = capsys.readouterr().out
    assert "| better | 0.3 | 6 | 0.4250 | 0.3250 | 0.2250 | 0.1000 (0.1000 to 0.1000) |" in table
    assert "| without | 0.05 | 6 | 0.4250 |  | 0.2250 | 0.2000 (0.2000 to 0.2000) |" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_an_adapter_serves_from_the_lowest_ratio_at_which_it_helps(comparison):
    found = comparison(contrast=(0.4, 0.3, 0.2))
    rows = [json.loads(line) for line in found.file.read_text().splitlines()]
    for row in rows:
        if row["adapter"] == other_evictors.ADAPTER:
            row["kl"]["0.05"] = 0.9
        else:
            row["kl"]["0.05"] = 0.88 if row["adapter"] else 0.85
    found.file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert found.list_served(["contrast"]) == {"contrast": 0.1}


def test_what_is_measured_is_not_measured_again(comparison, monkeypatch):
    found = comparison(snapkv=(0.4, 0.3, 0.2))
    cases = [type("Case", (), {"name": str(number)}) for number in range(6)]
    found.bench = type("Bench", (), {"load_cases": lambda self, split: cases})()
    monkeypatch.setattr(found, "prepare", lambda *_: pytest.fail("measured again"))
    found.measure("snapkv", texts=6)


def test_rows_of_an_adapter_that_shipped_before_do_not_count(comparison, monkeypatch):
    found = comparison(snapkv=(0.4, 0.3, 0.2))
    assert found.list_served(["snapkv"]) == {"snapkv": 0.05}
    with found.file.open("a") as file:  # from before rows had a hash
        row = {"passage": "7", "evictor": "snapkv", "adapter": "kvzip", "kl": {"0.3": 9.0}}
        file.write(json.dumps(row) + "\n")
    assert len(found.load_rows()) == 18
    monkeypatch.setattr(other_evictors, "hash_shipped", lambda name: f"another {name}")
    fresh = other_evictors.Comparison(found.file.parent)
    assert {adapter for _, _, adapter in fresh.load_rows()} == {other_evictors.ALONE}
