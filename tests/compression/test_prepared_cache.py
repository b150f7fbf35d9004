"""A prepared context that is kept gives the same caches as one that is prepared again, and is read
only once.
"""

import copy

import pytest
import torch

from restorekv import CompressionConfig, compress
from restorekv.compression.eviction import Eviction
from restorekv.compression.prepared_cache import PreparedContextCache
from tests.helpers.compressing import TEXT, compress_with, make_adapter
from tests.helpers.hybrids import LATENT, build_hybrid
from tests.helpers.models import build_model

PLENTY = 1 << 30


@pytest.fixture
def preparations(monkeypatch):
    """The list of the preparations made during a test."""
    made = []
    prepare = Eviction.prepare

    def note(*arguments):
        made.append(arguments[0])
        return prepare(*arguments)

    monkeypatch.setattr(Eviction, "prepare", note)
    return made


def list_bits(compressed):
    return [tensor for layer in compressed.cache.layers for tensor in layer.list_tensors()]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("evictor", ["kvzip", "snapkv"])
def test_kept_and_anew_are_equal(family, evictor, tiny_tokenizer, preparations):
    model = build_model(family)
    adapter = make_adapter(model)
    prepared_cache = PreparedContextCache(PLENTY)
    ways = (
        {"ratio": 0.4, "adapter": adapter},
        {"ratio": 0.4, "adapter": None},
        {"ratio": 1, "adapter": None},
        {"ratio": 0.2, "adapter": None, "allocation": "per-head"},
        {"ratio": 0.6, "adapter": adapter, "restore_from": "evicted"},
    )
    for way in ways:
        options = {"evictor": evictor, **way}
        kept = compress_with(model, tiny_tokenizer, TEXT, prepared_cache=prepared_cache, **options)
        assert len(preparations) == 1
        anew = compress_with(model, tiny_tokenizer, TEXT, **options)
        assert preparations.pop() is not None
        assert len(preparations) == 1
        assert all(a.equal(b) for a, b in zip(list_bits(kept), list_bits(anew), strict=True))
        assert kept.manifest.ratio == anew.manifest.ratio
        assert kept.manifest.pairs_held == anew.manifest.pairs_held
        if way is not ways[0]:
            assert "prefill" not in kept.manifest.seconds


def test_another_text_or_evictor_is_read(tiny_tokenizer, preparations):
    model = build_model("qwen3")
    prepared_cache = PreparedContextCache(PLENTY)
    cases = ((TEXT, "kvzip"), (TEXT, "snapkv"), (TEXT + "More.", "snapkv"))
    for number, (text, evictor) in enumerate(cases, 1):
        compress(model, tiny_tokenizer, text, ratio=0.4, evictor=evictor, adapter=None)
        preparations.clear()
        made = compress(
            model,
            tiny_tokenizer,
            text,
            ratio=0.4,
            evictor=evictor,
            adapter=None,
            prepared_cache=prepared_cache,
        )
        assert len(preparations) == 1, number
        assert made.manifest.evictor == evictor
    other = build_model("qwen3")
    compress(other, tiny_tokenizer, text, ratio=0.4, evictor=evictor, prepared_cache=prepared_cache)
    assert len(preparations) == 2


def test_a_template_that_ends_otherwise_is_read(tiny_tokenizer, preparations):
    """KVzip reads what the template writes after a question, so its scores depend on that."""
    model = build_model("qwen3")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    prepared_cache = PreparedContextCache(PLENTY)
    options = {"ratio": 0.4, "evictor": "kvzip", "adapter": None}
    compress(model, tokenizer, TEXT, prepared_cache=prepared_cache, **options)
    tokenizer.chat_template += "{% if add_generation_prompt %} The code is 12. {% endif %}"
    preparations.clear()
    kept = compress(model, tokenizer, TEXT, prepared_cache=prepared_cache, **options)
    assert len(preparations) == 1
    anew = compress(model, tokenizer, TEXT, **options)
    assert all(a.equal(b) for a, b in zip(list_bits(kept), list_bits(anew), strict=True))


@pytest.mark.parametrize("kind", ["qwen3", *LATENT[:-1]])
def test_what_does_not_fit_is_not_kept(kind, tiny_tokenizer):
    """Latents are held once and counted once. Of the last kind states are not counted."""
    model = build_hybrid(kind) if kind in LATENT else build_model(kind)
    options = {"ratio": 0.4, "evictor": "kvzip", "adapter": None}
    whole = compress(model, tiny_tokenizer, TEXT, **options).manifest.bytes_full
    for limit, held in ((whole - 1, 0), (whole, whole)):
        prepared_cache = PreparedContextCache(limit)
        compress(model, tiny_tokenizer, TEXT, prepared_cache=prepared_cache, **options)
        assert prepared_cache.bytes_held == held
    prepared_cache.clear()
    assert prepared_cache.bytes_held == 0


@pytest.mark.parametrize("config", [{"streaming_chunk": 16}, {"offload": True}])
def test_what_is_never_whole_in_memory_is_not_kept(config, tiny_tokenizer):
    prepared_cache = PreparedContextCache(PLENTY)
    compress(
        build_model("qwen3"),
        tiny_tokenizer,
        TEXT,
        ratio=0.4,
        evictor="kvzip",
        adapter=None,
        config=CompressionConfig(**config),
        prepared_cache=prepared_cache,
    )
    assert prepared_cache.kept is None


def test_changed_weights_are_another_model(tiny_tokenizer):
    """`model.half()`, merging an adapter and training change a model in place."""
    model = build_model("llama")
    prepared = PreparedContextCache(1 << 30)
    options = {"evictor": "snapkv", "ratio": 0.5, "adapter": None}
    text = "the code of the red house is seven; who lives in the blue house? " * 10
    compress(model, tiny_tokenizer, text, prepared_cache=prepared, **options)
    for weight in model.parameters():
        weight.data.mul_(1.1)
    again = compress(model, tiny_tokenizer, text, prepared_cache=prepared, **options)
    anew = compress(model, tiny_tokenizer, text, **options)
    assert again.digest == anew.digest
    model.to(torch.bfloat16)
    small = compress(model, tiny_tokenizer, text, prepared_cache=prepared, **options)
    assert small.manifest.dtype == "bfloat16"
    assert small.digest == compress(model, tiny_tokenizer, text, **options).digest
