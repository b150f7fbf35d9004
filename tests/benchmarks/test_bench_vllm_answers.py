"""The benchmark of answers in vLLM, all but vLLM itself."""

import json

import pytest

from benchmarks import vllm_answers
from benchmarks.vllm_answers import MODES, count_equal, make_tables, plan_documents, run_answers
from restorekv.errors import RestoreKVError
from restorekv.storage.cache_file import open_cache_file
from tests.helpers.pages import ROOT


def test_documents_differ_in_everything():
    plans = plan_documents(30)
    assert (plans[0].tokens, plans[-1].tokens) == (300, 6000)
    assert [plan.tokens for plan in plans] == sorted({plan.tokens for plan in plans})
    assert {plan.evictor for plan in plans} == set(vllm_answers.EVICTORS)
    assert {plan.ratio for plan in plans} == set(vllm_answers.RATIOS)
    assert {plan.allocation for plan in plans} == set(vllm_answers.ALLOCATIONS)
    assert {plan.kv_dtype for plan in plans} == {"model", "int8"}
    assert {plan.restored for plan in plans} == {True, False}


def test_halves_of_characters_do_not_count():
    assert count_equal(["a", "b", "c"], ["a", "b\ufffd", "d"]) == 2


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A run with the toy, whose answers a stand-in for vLLM takes from the files."""
    calls = []

    def answer(place):
        job = json.loads(place.read_text("utf-8"))
        calls.append(job)
        texts = []
        for path in sorted(place.parent.glob("document-*.json")):
            texts += json.loads(path.read_text("utf-8"))["answers"]
        wrong = [*texts[:-1], texts[-1] + "x"]
        found = {"rounds": [texts, wrong], "seconds": [1.0, 0.5], "preemptions": 3}
        place.with_suffix(".out.json").write_text(json.dumps(found), "utf-8")
        return 0

    monkeypatch.setattr(vllm_answers, "run_side", answer)
    monkeypatch.setattr(vllm_answers, "LONGEST", 400)
    monkeypatch.setattr(vllm_answers, "EVICTORS", ("snapkv", "kvzip"))

    def run(modes, longest=400):
        return run_answers(tmp_path, 2, longest, modes, "tiny", lambda words: None)

    return run, calls, tmp_path


def test_a_run_is_counted_and_goes_on_where_it_stopped(asked):
    run, calls, folder = asked
    result = run(["in process", "preemption"])
    assert [row["equal"] for row in result["rows"]] == [39, 39]
    assert [row["asked"] for row in result["rows"]] == [40, 40]
    assert len(calls) == 2 and len(calls[0]["prompts"]) == 20
    assert calls[1]["options"]["num_gpu_blocks_override"] == vllm_answers.FEW_BLOCKS
    for plan in plan_documents(2):
        cache = open_cache_file(folder / "store" / f"{plan.name}.rkv")
        assert cache is not None
    run(list(MODES))
    assert len(calls) == len(MODES)
    memory = calls[-1]["transfer"]["kv_connector_extra_config"]["documents_memory"]
    sizes = [path.stat().st_size for path in (folder / "store").iterdir()]
    assert max(sizes) <= memory < max(sizes) * 2
    table, line = make_tables(result)
    assert table.rows[0][:2] == ["in process", "39 of 40"] and "2 documents" in line


def test_long_documents_are_left_out(asked):
    run, calls, _ = asked
    result = run(["in process"], longest=399)
    assert [each["tokens"] for each in result["documents"]] == [vllm_answers.SHORTEST]
    assert len(calls[0]["prompts"]) == len(vllm_answers.QUESTIONS)


def test_an_engine_that_ends_is_reported(asked, monkeypatch):
    run, _, _ = asked

    monkeypatch.setattr(vllm_answers, "run_side", lambda place: 1)
    with pytest.raises(RestoreKVError, match="in process"):
        run(["in process"])


def test_the_page_shows_the_stored_result():
    result = json.loads(
        (ROOT / "benchmarks" / "results" / "answers" / "2026-11-24-vllm-cpu.json").read_text()
    )
    page = (ROOT / "docs" / "vllm.md").read_text()
    assert len(result["documents"]) == 30 and result["questions"] == 10
    for row in result["rows"]:
        line = next(line for line in page.splitlines() if line.startswith(f"| {row['mode']} "))
        assert f"{row['equal']} of {row['asked']}" in line
        assert not row["preemptions"] or f"({row['preemptions']} preemptions)" in line
