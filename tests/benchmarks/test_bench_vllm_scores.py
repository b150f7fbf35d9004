"""The benchmark of scores through HTTP, all but vLLM itself."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("openai")

from benchmarks import vllm_scores
from benchmarks.vllm_scores import locate_answers, locate_cache, make_tables, run_scores
from restorekv.storage.cache_file import open_cache_file


class StandIn:
    """An OpenAI client whose server answers as `ask` did, but for the first question of all."""

    def __init__(self, folder):
        self.folder = folder
        self.uploads = {}
        self.asked = []
        self.deleted = []
        self.files = SimpleNamespace(
            create=self.upload, wait_for_processing=lambda *_, **__: None, delete=self.delete
        )
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self.answer))

    def upload(self, file, purpose):
        name, content = file
        assert content == (self.folder / name).read_bytes() and purpose == "user_data"
        self.uploads[name] = iter(
            json.loads((self.folder / name.replace(".rkv", "-ask.json")).read_text())["answers"]
        )
        return SimpleNamespace(id=name)

    def delete(self, name):
        self.deleted.append(name)

    def answer(self, model, messages, temperature, max_tokens):
        file, text = messages[0]["content"]
        said = next(self.uploads[file["file"]["file_id"]])
        if not self.asked:
            said = "wrong"
        self.asked.append((text["text"], temperature))
        choice = SimpleNamespace(message=SimpleNamespace(content=said))
        return SimpleNamespace(choices=[choice])


@pytest.fixture
def run(monkeypatch, tmp_path):
    client = StandIn(tmp_path)
    commands = []

    @contextmanager
    def run_server(command, environment):
        assert environment["RESTOREKV_VLLM"] == "1"
        commands.append(command)
        yield client

    monkeypatch.setattr(vllm_scores, "run_server", run_server)

    def run():
        return run_scores(tmp_path, "tiny", "tiny:count=2", ["0.2"], "kvzip", lambda words: None)

    return run, client, commands, tmp_path


def test_both_sides_are_scored_and_a_run_goes_on_where_it_stopped(run):
    run, client, commands, folder = run
    result = run()
    (row,) = result["rows"]
    assert row["contexts"] == 2 and row["restored"]
    assert row["questions"] == len(client.asked) and row["equal"] == row["questions"] - 1
    # The one wrong answer costs the score of its question, if that was right.
    assert 0 < row["vllm"] <= row["ask"]
    assert row["ask"] - row["vllm"] <= 100 / row["questions"] + 1e-9
    caches = sorted(folder.glob("*.rkv"))
    assert len(caches) == len(client.deleted) == 2
    assert open_cache_file(caches[0]).manifest.ratio == "1/5"
    assert "vllm" in commands[0] and len(commands) == 1

    # All is there: no server starts. Without one answer, that context alone is asked again.
    assert run()["rows"] == result["rows"] and len(commands) == 1
    asked = len(client.asked)
    next(folder.glob("*-vllm.json")).unlink()
    run()
    assert len(commands) == 2 and asked < len(client.asked) < 2 * asked

    table, line = make_tables(result)
    assert table.rows[0][0] == "0.2" and table.rows[0][1] == "yes" and "2 contexts" in line


def test_answers_of_sides_and_ratios_do_not_mix(tmp_path):
    sample = SimpleNamespace(id="a")
    places = {
        locate_answers(tmp_path, side, sample, ratio)
        for side in ("ask", "vllm")
        for ratio in ("0.1", "0.05")
    }
    assert len(places) == 4


def test_a_passage_of_a_book_gets_a_file_in_the_folder(tmp_path):
    sample = SimpleNamespace(id="book/passage")
    assert locate_cache(tmp_path, sample, "0.1").parent == tmp_path
    assert locate_answers(tmp_path, "ask", sample, "0.1").parent == tmp_path
