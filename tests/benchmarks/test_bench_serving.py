"""The benchmark of servers measures every side in as many rounds, by the same statistic."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("openai")

from benchmarks import serving
from benchmarks.serving import ROUNDS, Options


def test_every_side_is_the_fastest_of_as_many_rounds(monkeypatch, tmp_path):
    options = Options("tiny", 64, 2, 1, "fast", "0.5", 2)
    upload = SimpleNamespace(id="file")
    files = SimpleNamespace(create=lambda **_: upload, wait_for_processing=lambda *_, **__: None)
    commands = []

    @contextmanager
    def run_server(command, environment=None):
        commands.append(command[0])
        yield SimpleNamespace(files=files)

    measured = {"restorekv": iter([5.0, 3.0, 4.0]), "transformers.cli.transformers": None}
    measured["transformers.cli.transformers"] = iter([50.0, 70.0, 30.0])
    monkeypatch.setattr(serving, "run_server", run_server)
    monkeypatch.setattr(serving, "_ask_together", lambda *_: next(measured[commands[-1]]))
    monkeypatch.setattr(serving, "ask_about_upload", lambda *_, **__: iter(["token"]))
    result = serving.run_serving(options, lambda words: None)
    assert result["seconds"]["restorekv"] == 3.0
    assert result["seconds"]["transformers"] == 30.0
    assert result["rounds"] == ROUNDS
    assert all(next(rest, None) is None for rest in measured.values())
    *_, last = serving.make_tables(result)
    assert f"fastest of {ROUNDS} rounds" in last
