"""Which questions share a batch of the library's own engine."""

import time
from threading import Timer

import pytest

pytest.importorskip("fastapi")

from restorekv.serve.embedded import Embedded
from restorekv.serve.store import Store
from tests.helpers.models import build_model


@pytest.fixture
def engine(tiny_tokenizer, tmp_path):
    return Embedded(build_model("qwen3"), tiny_tokenizer, Store(tmp_path, 1 << 30), 1 << 30, 64)


def test_a_batch_waits_for_those_whose_questions_the_last_one_answered(engine):
    """And no longer than a small share of what it took."""
    engine.last = 2, 100.0
    engine.questions.put("first")
    Timer(0.2, engine.questions.put, ["second"]).start()
    assert engine.gather() == (["first", "second"], True)
    engine.last = 2, 1.0
    engine.questions.put("alone")
    start = time.perf_counter()
    assert engine.gather() == (["alone"], True)
    assert 0.04 < time.perf_counter() - start < 1


def test_a_client_who_asks_alone_is_answered_at_once(engine):
    engine.last = 1, 100.0
    engine.questions.put("alone")
    start = time.perf_counter()
    assert engine.gather() == (["alone"], True)
    assert time.perf_counter() - start < 2
    engine.questions.put(None)
    assert engine.gather() == ([], False)
