"""How answers and compressions share the time of the server's own engine."""

import pytest

from restorekv.serve import embedded
from restorekv.serve.caches import NOTHING_MADE
from restorekv.serve.embedded import SHARE, SLICE, EmbeddedEngine
from restorekv.serve.engine import CacheState
from restorekv.serve.store import Store


@pytest.fixture
def engine(model, tiny_tokenizer, tmp_path):
    store = Store(tmp_path / "store", 1 << 20)
    yield EmbeddedEngine(model, tiny_tokenizer, store, memory=1 << 20, waiting=None)
    store.close()


def test_answers_wait_for_a_compression_and_for_nothing_else(engine, monkeypatch):
    slept = []
    monkeypatch.setattr(embedded.time, "sleep", slept.append)
    assert engine.making == NOTHING_MADE
    for _ in range(10):
        engine._yield_to_compression(SLICE / SHARE)
    assert slept == []
    engine.making = ("a key", CacheState("prefill", 0.5))
    for _ in range(4):
        engine._yield_to_compression(SLICE / SHARE / 2)
    # Half a slice is saved up until it is a whole one.
    assert slept == [pytest.approx(SLICE)] * 2
