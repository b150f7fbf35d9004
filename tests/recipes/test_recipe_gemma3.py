"""The recipe of Gemma's adapter: its commands, the widened adapter, the page of its figures."""

import json

import pytest
import torch
from typer.testing import CliRunner

from recipes import gemma3
from restorekv import tasks
from restorekv.cli import app
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.models import build_model


def test_the_page_is_made_from_the_stored_figures():
    records = gemma3.load_records()
    assert gemma3.PAGE.read_text("utf-8") == gemma3.make_page(records)
    measured = {row["benchmark"] for row in records["kvzip"]["rows"]}
    assert measured == set(gemma3.BENCHMARKS)


def test_benchmarks_have_their_shortest_names():
    for spec in gemma3.BENCHMARKS:
        assert tasks.make_benchmark(spec).spec == spec


def test_a_widened_adapter_begins_as_copies(tmp_path):
    model = build_model("qwen3")
    adapter = RestoreAdapter.create(model, 2, rank=2)
    adapter.add_ratio_vectors()
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    wide = gemma3.widen_adapter(adapter, 6)
    assert wide.restore_tokens == wide.card.restore_tokens == 6
    assert wide.embeddings[:2].equal(adapter.embeddings)
    assert not wide.embeddings[2:4].equal(adapter.embeddings)
    torch.testing.assert_close(wide.embeddings[2:4], adapter.embeddings, rtol=0, atol=1.5)
    assert wide.ratio_vectors[4:].equal(adapter.ratio_vectors)
    for name, value in adapter.lora_parameters.items():
        assert wide.lora_parameters[name].equal(value)
    wide.save_pretrained(tmp_path / "wide")
    assert RestoreAdapter.from_pretrained(model, tmp_path / "wide").restore_tokens == 6


def test_commands_have_flags_that_exist(tmp_path):
    """Each command's flags are those of its help."""
    for name in ("short-1", "more-11"):
        place = tmp_path / "data" / name
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
    commands = [
        *gemma3.list_builds(tmp_path, tmp_path),
        gemma3.list_first_training(tmp_path, "cpu"),
    ]
    commands.append(gemma3.list_wide_training(tmp_path, "cuda:0"))
    assert len(commands) == 2 + len(gemma3.SEEDS) + 2
    for command in commands:
        words = command[: 2 if command[0] == "data" else 1]
        # Typer cuts long lines of its help where the terminal is narrow.
        shown = CliRunner(env={"COLUMNS": "300"}).invoke(app, [*words, "--help"]).output
        flags = {word for word in command if word.startswith("--")}
        assert flags and all(flag in shown for flag in flags), flags
    assert "more-11" not in " ".join(commands[-2]) and "more-11" in " ".join(commands[-1])


def test_without_data_a_sentence_says_so(tmp_path):
    with pytest.raises(SystemExit, match="There is no data in"):
        gemma3.list_first_training(tmp_path, "cpu")


def test_an_evictor_without_an_adapter_has_rows_of_its_own():
    record = gemma3.load_records()["kvzip"]
    alone = [row for row in record["rows"] if not row["restored"]]
    rows = list(gemma3.list_rows({"rows": alone, "closer": []}))
    assert len(rows) == len(alone)
    assert all(row.count("|") == 9 for row in rows)
    assert "% less" not in "".join(rows)


def test_benchmarks_can_be_asked_one_after_the_other(tmp_path, monkeypatch):
    """A later call for one benchmark keeps the stored figures of the others."""
    stored = gemma3.load_records()["kvzip"]

    def select(benchmark: str) -> dict:
        """Return what a run of one benchmark would have measured."""
        name = f"_{benchmark.replace(':', '-').replace(',', '-')}_"
        return {
            "rows": [row for row in stored["rows"] if row["benchmark"] == benchmark],
            "closer": [row for row in stored["closer"] if row["benchmark"] == benchmark],
            "facts": {cell: fact for cell, fact in stored["facts"].items() if name in cell},
        }

    monkeypatch.setattr(gemma3, "answer_grid", lambda grid, *_: grid.benchmarks[0])
    monkeypatch.setattr(gemma3, "make_record", select)
    monkeypatch.setattr(gemma3, "STORED", {"kvzip": tmp_path / "figures.json"})
    for benchmark in gemma3.BENCHMARKS:
        gemma3.score(tmp_path, "cpu", "kvzip", [benchmark])
    record = gemma3.load_records()["kvzip"]
    assert gemma3.make_page({"kvzip": record}) == gemma3.make_page({"kvzip": stored})
    assert record["facts"] == stored["facts"]

    # Asked again with another adapter, the others' figures say nothing any more.
    stored = json.loads(json.dumps(stored))
    for fact in stored["facts"].values():
        if fact["adapter"]:
            fact["adapter"]["hash"] = "0"
    gemma3.score(tmp_path, "cpu", "kvzip", [gemma3.BENCHMARKS[0]])
    left = {row["benchmark"] for row in gemma3.load_records()["kvzip"]["rows"]}
    assert left == {gemma3.BENCHMARKS[0]}
