"""A benchmark's folder is continued with the options it was made with, and with no others."""

import pytest

from benchmarks import vllm_answers, vllm_memory, vllm_scores, vllm_steps
from benchmarks.folder_options import claim_folder
from restorekv.errors import RestoreKVError


def test_a_folder_is_continued_with_the_same_options_alone(tmp_path):
    folder = tmp_path / "new"
    claim_folder(folder, {"model": "tiny", "tokens": 128, "ratio": "0.1"})
    claim_folder(folder, {"model": "tiny", "tokens": 128, "ratio": "0.1"})
    with pytest.raises(RestoreKVError) as refusal:
        claim_folder(folder, {"model": "tiny", "tokens": 256, "ratio": "0.2"})
    text = str(refusal.value)
    assert str(folder) in text and "tokens 128, not 256" in text and "ratio 0.1, not 0.2" in text
    assert "model" not in text
    claim_folder(folder, {"model": "tiny", "tokens": 128, "ratio": "0.1"})


def test_work_of_unknown_options_is_refused(tmp_path):
    (tmp_path / "prompts.json").write_text("{}")
    with pytest.raises(RestoreKVError, match="so what they were made with is unknown"):
        claim_folder(tmp_path, {"model": "tiny"})


def test_steps_are_not_measured_on_documents_of_other_options(tmp_path):
    def make(*options):
        step_options = vllm_steps.StepOptions(*options)
        return vllm_steps._make_prompts(tmp_path, step_options, lambda words: None)

    prompts = make("tiny", 128, 1, "0.5", "snapkv", 4, 1)
    # Tokens of an answer and rounds are measured anew each time.
    assert make("tiny", 128, 1, "0.5", "snapkv", 8, 2) == prompts
    with pytest.raises(RestoreKVError, match="evictor snapkv, not knorm") as refusal:
        make("tiny", 128, 3, "0.5", "knorm", 4, 1)
    assert "documents 1, not 3" in str(refusal.value)


def test_answers_are_not_those_of_other_plans(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_answers, "SHORTEST", 100)
    monkeypatch.setattr(vllm_answers, "LONGEST", 160)
    monkeypatch.setattr(vllm_answers, "QUESTIONS", ("Who is named?",))

    def run(count, longest):
        vllm_answers.run_answers(tmp_path, count, longest, [], "tiny", lambda words: None)

    run(3, 130)
    run(3, 130)
    with pytest.raises(RestoreKVError, match="documents 3, not 2"):
        run(2, 130)
    with pytest.raises(RestoreKVError, match="longest 130, not 160"):
        run(3, 160)


def test_scores_are_not_those_of_another_evictor(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_scores, "_ask_vllm", lambda *arguments: None)
    monkeypatch.setattr(vllm_scores, "compare_sides", lambda *arguments: {})

    def run(benchmark, ratio, evictor):
        vllm_scores.run_scores(tmp_path, "tiny", benchmark, [ratio], evictor, lambda words: None)

    run("tiny:count=1", "0.5", "knorm")
    # Ratios have files of their own.
    run("tiny:count=1", "0.4", "knorm")
    with pytest.raises(RestoreKVError, match="evictor knorm, not random"):
        run("tiny:count=1", "0.5", "random")
    with pytest.raises(RestoreKVError, match="benchmark tiny:count=1, not tiny:count=2"):
        run("tiny:count=2", "0.5", "knorm")


def test_whole_documents_in_vllm_are_not_those_of_another_model(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_memory, "iterate_sides", lambda *arguments: iter(()))

    def run(model, tokens):
        options = vllm_memory.Options(model, tokens, 2, 1, ("0.5",), (1,), 4)
        vllm_memory.run_vllm(tmp_path, options, lambda words: None)

    run("tiny", 64)
    run("tiny", 128)
    with pytest.raises(RestoreKVError, match="model tiny, not smollm2"):
        run("smollm2", 64)
