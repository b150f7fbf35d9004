"""The memory of compression: the full cache and its ragged copy are never held at the same time."""

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig

from benchmarks.memory_on_paper import SCORES
from restorekv.compression import allocate
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.compression.streaming import Stream, StreamedContext
from restorekv.errors import RestoreKVError
from restorekv.model.prompt import Context
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.held import Held
from tests.helpers.models import build_model

PREFIX, TOKENS = 3, 600


def make_context(tokens=TOKENS, seed=1):
    ids = torch.randint(3, 320, (1, PREFIX + tokens), generator=torch.Generator().manual_seed(seed))
    return Context(ids, PREFIX, torch.zeros(1, 0, dtype=torch.long))


def tensors(full):
    return [x for layer in full.layers for x in (layer.keys, layer.values)]


def test_counting_what_is_held():
    held = Held(torch.ones(100))
    with held:
        one = torch.ones(1000)
        view = one[:10]
        del one
        two = torch.ones(2000)
        del view, two
        torch.ones(2500)
    assert held.most == 4 * 3000


@pytest.mark.parametrize("ratio", ["1", "0.5", "0.1"])
def test_the_last_cache_frees_the_full_one_layer_by_layer(ratio):
    """Full cache, scores, marks and a layer are held; without `consume`, also the ragged cache."""
    model = build_model("qwen3", num_hidden_layers=12)
    prepared = Eviction.make("knorm").prepare(model, None, make_context())
    kept = prepared.evict(ratio)
    full = tensors(prepared.full)
    whole, layer = sum(x.nbytes for x in full), full[0].nbytes + full[1].nbytes
    pairs = full[0][..., 0].numel() * 12
    selection = 64 * pairs // 12  # indices of one layer and the one before
    beside = Held(*full)
    with beside:
        prepared.evict(ratio)
    assert beside.most > whole + kept.nbytes - layer
    alone = Held(*full)
    del full
    with alone:
        cache = prepared.evict(ratio, consume=True)
    # Marks, and where each pair came from.
    assert alone.most <= whole + layer + 6 * pairs + selection
    for ours, theirs in zip(cache.layers, kept.layers, strict=True):
        assert all(
            a.equal(b) for a, b in zip(ours.list_tensors(), theirs.list_tensors(), strict=True)
        )
    with pytest.raises(RestoreKVError, match="used up"):
        prepared.evict(ratio)


def scored(policy):
    """Return a scored context of four million pairs of one number: (1, 2, C, 1) per layer."""
    context, full = (
        Context(torch.zeros(1, 500_003, dtype=torch.long), 3, torch.zeros(1, 0)),
        DynamicCache(),
    )
    for layer in range(4):
        full.update(torch.ones(1, 2, 500_003, 1), torch.ones(1, 2, 500_003, 1), layer)
    config = LlamaConfig(num_hidden_layers=4, num_attention_heads=2, hidden_size=2)
    return ScoredContext(
        SimpleNamespace(config=config),
        context,
        full,
        torch.rand(4, 2, 500_000),
        config=CompressionConfig(prefix_policy=policy),
    )


@pytest.mark.parametrize(("policy", "plain", "last"), [("free", 6, 10), ("counted", 10, 6)])
def test_bytes_of_a_score(monkeypatch, policy, plain, last):
    """They are as benchmarks/performance.md says: the number and its marks, and a copy if the
    prefix has to be added or left out.
    """
    # Scores are read in blocks so small that they count for nothing.
    monkeypatch.setattr(allocate, "SCORES_AT_ONCE", 1 << 16)
    prepared = scored(policy)
    pairs, full = prepared.scores.numel(), tensors(prepared.full)
    held = Held(prepared.scores, *full)
    with held:
        prepared.evict("0.05")
    assert (held.most - sum(x.nbytes for x in full)) / pairs == pytest.approx(plain, abs=0.1)
    if policy == "free":
        assert plain == SCORES["plain"] == SCORES["offload"]
    budget = prepared.config.make_budget("0.05", prepared.context, 4, 2)
    for ending, expected in ((False, SCORES["streaming"]), (True, last)):
        stream = Stream(
            StreamedContext(
                None,
                prepared.context,
                tokenizer=None,
                evictor=None,
                config=prepared.config,
                streaming_chunk=1,
            ),
            budget,
        )
        stream.scores = torch.rand(4, 2, 500_003)
        held = Held(stream.scores)
        with held:
            stream.choose_kept(ending)
        assert held.most / pairs == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("restore_from", ["full", "evicted"])
def test_compress_uses_its_preparation_up(tiny_tokenizer, restore_from, monkeypatch):
    model, seen = build_model("qwen3"), []
    prepare = Eviction.prepare
    monkeypatch.setattr(Eviction, "prepare", lambda *a: seen.append(prepare(*a)) or seen[-1])
    adapter = RestoreAdapter.create(model, 2, rank=2)
    text = "Nobody lives in the blue house. " * 4
    made = compress(
        model,
        tiny_tokenizer,
        text,
        ratio=0.3,
        adapter=adapter,
        config=CompressionConfig(restore_from=restore_from),
    )
    assert not any(layer.is_initialized for layer in seen[0].full.layers)
    with torch.no_grad():
        again = (
            Eviction.make("kvzip", adapter, restore_from=restore_from)
            .prepare(model, tiny_tokenizer, text)
            .evict(0.3)
        )
    for ours, theirs in zip(made.cache.layers, again.layers, strict=True):
        assert all(
            a.equal(b) for a, b in zip(ours.list_tensors(), theirs.list_tensors(), strict=True)
        )
