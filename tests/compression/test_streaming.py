"""Compression during the prefill: exact counts, a bound on what is held, and the same caches as
from a dense model with masks.
"""

import json
import warnings
from itertools import pairwise

import pytest
import torch
from transformers import AttentionInterface

from restorekv import evictors
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction
from restorekv.compression.streaming import Stream, StreamedContext, split_context
from restorekv.context import CompressedContext
from restorekv.errors import BudgetError, RestoreKVError, RestoreKVWarning
from restorekv.model import attention
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context, make_context
from restorekv.model.shape import CacheShape
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.cli_world import build_world, cli
from tests.helpers.gates import save_gate
from tests.helpers.models import build_model

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives there. "
    * 2
)
PREFIX, TOKENS = 3, 90
METHODS = [
    "kvzip:chunk=16",
    "kvzip+:chunk=16",
    "contrastkv:chunk=16",
    "snapkv:window=4",
    "h2o",
    "tova",
    "knorm",
    "keydiff",
    "expected-attention",
    "random",
]


def make_text(tokens=TOKENS, prefix=PREFIX):
    ids = torch.randint(3, 320, (1, prefix + tokens), generator=torch.Generator().manual_seed(1))
    return Context(ids, prefix, torch.zeros(1, 0, dtype=torch.long))


def make_adapter(model, tokens=4):
    adapter = RestoreAdapter.create(model, tokens, rank=2, alpha=4, seed=0)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return adapter


def stream(model, evictor, ratio, chunk, adapter=None, context=None, tokenizer=None, **conventions):
    context, shape = context or make_text(), CacheShape.from_model(model)
    rules = CompressionConfig(**conventions)
    budget = rules.make_budget(
        ratio, context, shape.layers, shape.heads, adapter.restore_tokens if adapter else 0
    )
    made = Stream(
        StreamedContext(
            model,
            context,
            tokenizer=tokenizer,
            evictor=evictors.make_evictor(evictor),
            config=rules,
            streaming_chunk=chunk,
            adapter=adapter,
        ),
        budget,
    )
    return made, made.run()


def marks(cache, columns):
    """Return which pairs a cache holds, (L, H, columns) bool."""
    kept = torch.zeros(len(cache.layers), cache.layers[0].heads, columns, dtype=torch.bool)
    for index, layer in enumerate(cache.layers):
        for head in range(layer.heads):
            kept[
                index, head, layer.positions[layer.bounds[head] : layer.bounds[head + 1]].long()
            ] = True
    return kept


@pytest.mark.parametrize("evictor", METHODS)
def test_one_part_is_the_ordinary_way(tiny_tokenizer, evictor):
    model = build_model("qwen3")
    plain = compress(model, tiny_tokenizer, TEXT, evictor=evictor, ratio=0.3)
    whole = compress(
        model,
        tiny_tokenizer,
        TEXT,
        evictor=evictor,
        ratio=0.3,
        config=CompressionConfig(streaming_chunk=plain.context.text_tokens),
    )
    assert {**vars(whole.manifest), "seconds": 0} == {**vars(plain.manifest), "seconds": 0}
    assert whole.manifest.streaming_chunk is None
    for ours, theirs in zip(whole.cache.layers, plain.cache.layers, strict=True):
        assert all(
            a.equal(b) for a, b in zip(ours.list_tensors(), theirs.list_tensors(), strict=True)
        )


@pytest.mark.parametrize("evictor", METHODS)
def test_the_stream_itself_with_one_part_keeps_the_same(tiny_tokenizer, evictor):
    model, context = build_model("qwen3"), make_context(tiny_tokenizer, TEXT)
    for policy in ("free", "counted"):
        plain = (
            Eviction.make(evictor, prefix_policy=policy)
            .prepare(model, tiny_tokenizer, context)
            .evict(0.3)
        )
        whole = stream(
            model,
            evictor,
            0.3,
            999,
            context=context,
            tokenizer=tiny_tokenizer,
            prefix_policy=policy,
        )[1]
        for ours, theirs in zip(whole.layers, plain.layers, strict=True):
            assert all(
                a.equal(b) for a, b in zip(ours.list_tensors(), theirs.list_tensors(), strict=True)
            )


@pytest.mark.parametrize("chunk", [7, 20, 45, 89])
@pytest.mark.parametrize("policy", ["free", "counted"])
@pytest.mark.parametrize("allocation", ["global", "per-layer", "per-head", "adakv"])
def test_counts_are_exact_and_what_is_held_is_bounded(monkeypatch, chunk, policy, allocation):
    held, read = [], Stream._read_part

    def reading(self, cache, part):
        full = read(self, cache, part)
        held.append(sum(x.bounds[-1] + x.heads * x.columns for x in full.layers))
        return full

    monkeypatch.setattr(Stream, "_read_part", reading)
    model, context = build_model("qwen3"), make_text()
    shape = CacheShape.from_model(model)
    each = shape.layers * shape.heads
    for ratio, evictor in (("0.1", "knorm"), ("0.37", "snapkv:window=4"), ("1", "knorm")):
        held.clear()
        made, cache = stream(
            model, evictor, ratio, chunk, prefix_policy=policy, allocation=allocation
        )
        outside = PREFIX * each if policy == "free" else 0
        assert cache.pairs_held - outside == made.budget.total
        assert cache.get_seq_length() == context.num_tokens and cache.restore_length == 0
        assert max(held) <= made.budget.retained + (PREFIX + chunk) * each
        # Every pair once, in the order of the columns.
        assert marks(cache, context.num_tokens).sum() == cache.pairs_held
        assert all(
            layer.positions[a:b].diff().gt(0).all()
            for layer in cache.layers
            for a, b in pairwise(layer.bounds)
        )


@pytest.mark.parametrize("evictor", METHODS)
@pytest.mark.parametrize("allocation", ["global", "per-head", "adakv"])
def test_what_stays_is_the_best_of_all_scores(tiny_tokenizer, monkeypatch, evictor, allocation):
    """Nothing that was dropped on the way could have stayed."""
    model, context = build_model("qwen3"), make_context(tiny_tokenizer, TEXT)
    scores, read = [], Stream._read_part

    def reading(self, cache, part):
        full = read(self, cache, part)
        scores.append(self.scores[..., part.start : part.scored_end].clone())
        return full

    monkeypatch.setattr(Stream, "_read_part", reading)
    made, cache = stream(
        model, evictor, 0.3, 24, context=context, tokenizer=tiny_tokenizer, allocation=allocation
    )
    assert len(scores) > 2
    expected = made.config.allocation(torch.cat(scores, -1), made.budget.retained)
    assert marks(cache, context.num_tokens)[..., context.prefix_length :].equal(expected)


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize(
    "evictor", ["expected-attention:", "snapkv:window=4,", "fastkvzip:gate={},"]
)
def test_first_columns_are_pinned_in_the_first_part_alone(tmp_path, monkeypatch, evictor, prefix):
    model, context = build_model("qwen3"), make_text(400, prefix)
    evictor = evictor.format(save_gate(tmp_path / "gate", "fastkvzip", model)) + "sinks=5"
    above, starts, read = [], [], Stream._read_part

    def reading(self, cache, part):
        full = read(self, cache, part)
        starts.append(part.start - prefix)
        found = self.scores[..., part.start : part.scored_end]
        above.append(
            (found[..., :pinned].amin((-2, -1)) > found[..., pinned:].amax((-2, -1))).all().item()
        )
        return full

    # SnapKV counts from the prefix, the others from 0.
    pinned = 5 if evictor.startswith("snapkv") else 5 - prefix
    monkeypatch.setattr(Stream, "_read_part", reading)
    cache = stream(model, evictor, 0.2, 40, context=context)[1]
    assert above == [True] + [False] * (len(above) - 1) and len(above) >= 10
    always = marks(cache, context.num_tokens)[..., prefix:].flatten(0, 1).all(0)
    assert always[:pinned].all() and not any(
        always[start : start + pinned].all() for start in starts[1:]
    )


def test_sinks_of_the_prefix_stay_out_of_every_part():
    evictor = evictors.make_evictor("expected-attention")
    for prefix in (0, 3, 4, 9):
        assert evictor.for_later_part(make_text(prefix=prefix)).sinks == min(prefix, 4)


@pytest.fixture
def visible():
    """Register an attention function that hides, in every layer and head, the columns that
    `hidden[layer]` (H, Q, K) marks; return `hidden`, which tests fill.
    """
    hidden = {}

    def attend(module, query, key, value, mask, scaling, **_):
        groups = query.shape[1] // key.shape[1]
        logits = query @ key.repeat_interleave(groups, 1).mT * scaling
        later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        gone = later | hidden[module.layer_idx].repeat_interleave(groups, 0)
        weights = logits.masked_fill(gone, -torch.inf).softmax(-1)
        return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None

    AttentionInterface.register("visible", attend)
    return hidden


@pytest.mark.parametrize("evictor", ["keydiff", "snapkv:window=4", "h2o"])
@pytest.mark.parametrize("policy", ["free", "counted"])
def test_later_parts_read_what_is_kept_at_their_own_positions(
    tiny_model, monkeypatch, visible, evictor, policy
):
    """Keys and values are those of a single pass over the text in which each row sees only what was
    kept before its part.
    """
    model, context = tiny_model.double(), make_text()
    steps, settle = [], Stream._evict_part

    def settling(self, cache, part, restored, last):
        settle(self, cache, part, restored, last)
        steps.append((part, marks(cache, context.num_tokens)))

    monkeypatch.setattr(Stream, "_evict_part", settling)
    cache = stream(model, evictor, 0.4, 25, prefix_policy=policy)[1]
    assert len(steps) > 3
    shape, columns = CacheShape.from_model(model), context.num_tokens
    for layer in range(shape.layers):
        hidden = torch.zeros(shape.heads, columns, columns, dtype=torch.bool)
        for part, kept in steps[:-1]:
            hidden[:, part.scored_end :, PREFIX : part.scored_end] |= ~kept[
                layer, :, None, PREFIX : part.scored_end
            ]
        visible[layer] = hidden
    model.set_attn_implementation("visible")
    expected = prefill(model, context.ids)
    model.set_attn_implementation(attention.NAME)
    for layer, dense, kept in zip(
        cache.layers, expected.layers, marks(cache, columns), strict=True
    ):
        heads, places = kept.nonzero(as_tuple=True)
        torch.testing.assert_close(
            layer.context_keys, dense.keys[0, heads, places], rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(
            layer.context_values, dense.values[0, heads, places], rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("restore_from", ["full", "evicted"])
def test_all_kept_is_all_the_same(tiny_model, tiny_tokenizer, restore_from):
    """With everything kept nothing is approximated: pairs and restore cache are those of
    compressing at once.
    """
    model, context = tiny_model.double(), make_context(tiny_tokenizer, TEXT)
    adapter, rules = make_adapter(model), {"restore_from": restore_from, "prefix_policy": "counted"}
    with torch.no_grad():
        plain = (
            Eviction.make("keydiff", adapter, **rules)
            .prepare(model, tiny_tokenizer, context)
            .evict(1)
        )
    _, cache = stream(model, "keydiff", 1, 31, adapter, context, tiny_tokenizer, **rules)
    assert cache.get_seq_length() == plain.get_seq_length() == context.num_tokens + 4
    if restore_from == "full":
        for ours, theirs in zip(cache.layers, plain.layers, strict=True):
            torch.testing.assert_close(ours.restore_keys, theirs.restore_keys, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(
                ours.restore_values, theirs.restore_values, rtol=1e-6, atol=1e-6
            )
    assert cache.pairs_held == plain.pairs_held


def test_an_adapter_for_full_caches_is_warned_of_where_there_are_parts():
    model, context = build_model("qwen3"), make_text(40)
    with pytest.warns(RestoreKVWarning, match="learned to read full caches"):
        stream(model, "knorm", 0.5, 20, make_adapter(model), context)  # two parts
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stream(model, "knorm", 0.5, 40, make_adapter(model), context)
        stream(model, "knorm", 0.5, 20, make_adapter(model), context, restore_from="evicted")
        stream(model, "knorm", 0.5, 20, None, context)


def test_restore_tokens_without_an_adapter_are_refused():
    """ScoredContext refuses them, too; a stream once failed in the middle."""
    model = build_model("qwen3")
    context = make_text()
    prepared = StreamedContext(
        model,
        context,
        tokenizer=None,
        evictor=evictors.make_evictor("knorm"),
        config=CompressionConfig(),
        streaming_chunk=20,
    )
    with pytest.raises(BudgetError, match="reserves 2 restore tokens, and there are 0"):
        prepared.evict(0.5, restore_tokens=2)


def test_parts_are_alike_and_overlap_by_what_always_stays():
    context = make_text(1000)
    for spec, chunk, again in (
        ("knorm", 300, 0),
        ("snapkv", 300, 32),
        ("tova", 7, 1),
        ("kvzap:window=5", 256, 5),
    ):
        evictor = evictors.make_evictor(spec)
        pieces = split_context(evictor, context, chunk)
        assert (
            pieces[0].start == PREFIX
            and pieces[-1].scored_end == pieces[-1].end == context.num_tokens
        )
        for one, two in pairwise(pieces):
            assert one.scored_end == two.start == one.end - again
        sizes = [part.end - part.start for part in pieces]
        assert max(sizes) <= chunk and max(sizes) - min(sizes) <= 1
        assert len(pieces) == -(-(1000 - again) // (chunk - again))


def test_compress_records_it_and_answers(tiny_model, tiny_tokenizer, tmp_path):
    with pytest.warns(RestoreKVWarning, match="with streaming_chunk it reads what is held"):
        made = compress(
            tiny_model,
            tiny_tokenizer,
            TEXT,
            ratio=0.3,
            adapter=make_adapter(tiny_model),
            config=CompressionConfig(streaming_chunk=40, kv_dtype="int8"),
        )
    plain = compress(tiny_model, tiny_tokenizer, TEXT, ratio=0.3, adapter=make_adapter(tiny_model))
    assert made.manifest.streaming_chunk == 40 and made.manifest.pairs == plain.manifest.pairs
    assert made.manifest.restore_tokens == 4 and set(made.manifest.seconds) == set(
        plain.manifest.seconds
    )
    made.save(tmp_path / "doc.rkv")
    loaded = CompressedContext.load(tmp_path / "doc.rkv", tiny_model, tiny_tokenizer)
    assert loaded.manifest == made.manifest
    assert loaded.ask(["Which code?"], 6) == made.ask(["Which code?"], 6)


@pytest.mark.parametrize(
    ("evictor", "chunk", "reason"),
    [
        ("streaming", 20, "scores a context as a whole"),
        ("snapkv", 32, "always keeps the latest 32 tokens"),
        ("knorm", 0, "at least 1 token"),
        ("am-fast", 20, "leave out streaming_chunk"),
    ],
)
def test_what_cannot_stream_is_refused_at_once(tiny_tokenizer, monkeypatch, evictor, chunk, reason):
    model = build_model("qwen3")
    monkeypatch.setattr("restorekv.compression.full_cache.prefill", None)
    with pytest.raises(RestoreKVError, match=reason):
        compress(
            model,
            tiny_tokenizer,
            TEXT,
            evictor=evictor,
            config=CompressionConfig(streaming_chunk=chunk),
            adapter=None,
        )


def test_the_command_line_streams_and_stores(tiny_tokenizer, tmp_path):
    world = build_world(tmp_path, tiny_tokenizer)
    options = (
        "--model",
        world.model,
        "-o",
        world.doc,
        "--adapter",
        "none",
        "--streaming-chunk",
        64,
        "--kv-dtype",
        "fp8",
    )
    told = cli("compress", world.text, *options, "--json", world.figures)
    assert told.code == 0 and "streamed 64" in told.out and "fp8" in told.out  # lines may be broken
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["streaming_chunk"] == 64 and figures["kv_dtype"] == "fp8"
    assert cli("ask", world.doc, "who?", "--model", world.model, "--max-new-tokens", 3).code == 0
    assert "not 'int4'" in cli("compress", world.text, *options[:-1], "int4").err
