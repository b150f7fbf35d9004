"""How answers and compressions share the time of the server's own engine."""

import pytest

from restorekv.errors import RestoreKVWarning, TextTooLongError, UnlikeContextsError
from restorekv.generation.sampling import SamplingConfig
from restorekv.serve import caches, embedded
from restorekv.serve.caches import CompressionJob
from restorekv.serve.document_checks import compose_documents
from restorekv.serve.embedded import SHARE, SLICE, EmbeddedEngine
from restorekv.serve.engine import CacheState, ServedQuestion
from restorekv.serve.store import Store
from tests.helpers.compressing import TEXT, compress_with, make_adapter
from tests.helpers.hybrids import LATENT, WITH_STATES, build_hybrid


@pytest.fixture
def engine(model, tiny_tokenizer, tmp_path):
    store = Store(tmp_path / "store", 1 << 20)
    yield EmbeddedEngine(model, tiny_tokenizer, store, memory=1 << 20, max_waiting=None)
    store.close()


def test_restore_tokens_take_positions_from_the_answer(engine, model, tiny_tokenizer, monkeypatch):
    """They lie between document and question, so the answer must end n positions earlier."""
    small = compress_with(
        model, tiny_tokenizer, TEXT, evictor="knorm", ratio=0.5, adapter=make_adapter(model)
    )
    assert small.manifest.restore_tokens > 2
    monkeypatch.setattr(engine, "load_document", lambda document: small)
    limits = []
    for room in (0, small.manifest.restore_tokens):
        question = ServedQuestion([object()], (), "Which code?", "", 8, SamplingConfig())
        prompt = engine.encode_question(question, small.context)
        positions = small.context.num_tokens + len(prompt) + room + 2
        monkeypatch.setattr(caches, "count_usable_positions", lambda model, most=positions: most)
        if room:
            engine.prepare(question)
            limits.append(question.limit)
            continue
        with pytest.raises(TextTooLongError, match="shorten them"):
            engine.prepare(question)
    assert limits == [2]


def test_a_short_text_is_asked_together_with_a_restored_one(
    engine, model, tiny_tokenizer, monkeypatch
):
    """The text is too short for its ratio, so it is kept whole and nothing is restored."""
    options = {"evictor": "knorm", "ratio": 0.5, "adapter": make_adapter(model)}
    restored = compress_with(model, tiny_tokenizer, TEXT, **options)
    with pytest.warns(RestoreKVWarning, match="too short"):
        short = compress_with(model, tiny_tokenizer, "Goats", **options)
    monkeypatch.setattr(engine, "load_document", lambda document: document)
    question = ServedQuestion([short, restored], (), "Which code?", "", 8, SamplingConfig())
    active = engine.prepare(question)
    tokens = short.manifest.tokens + restored.manifest.tokens
    assert active.context.text_tokens == tokens
    assert active.cache.restore_length == restored.manifest.restore_tokens


@pytest.mark.parametrize("kind", ["qwen3", *WITH_STATES[:1], *LATENT[1:2]])
def test_documents_that_the_model_cannot_join_are_refused(kind, tiny_tokenizer):
    """The sentence says what a client can do; the library's own names its calls."""
    model = build_hybrid(kind)
    small = compress_with(model, tiny_tokenizer, TEXT, evictor="knorm", ratio=0.5, adapter=None)
    assert compose_documents([small]) is small
    with pytest.raises(UnlikeContextsError, match="one at a time, or upload the texts as one file"):
        compose_documents([small, small])


def test_answers_wait_for_a_compression_and_for_nothing_else(engine, monkeypatch):
    slept = []
    monkeypatch.setattr(embedded.time, "sleep", slept.append)
    assert engine.job is None
    for _ in range(10):
        engine._yield_to_compression(SLICE / SHARE)
    assert slept == []
    engine.job = CompressionJob("a hash", "a key", CacheState("prefill", 0.5))
    for _ in range(4):
        engine._yield_to_compression(SLICE / SHARE / 2)
    # Half a slice is saved up until it is a whole one.
    assert slept == [pytest.approx(SLICE)] * 2
