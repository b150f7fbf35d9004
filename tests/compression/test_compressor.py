"""Compression end to end on tiny models: exact budgets, one preparation for all ratios, the same
answers from a saved file.
"""

import copy
import json
import subprocess
import sys
import warnings
from fractions import Fraction

import pytest
import tokenizers
import torch

from restorekv import CompressionConfig
from restorekv.compression.budget import Budget
from restorekv.compression.eviction import Eviction, make_compressor
from restorekv.compression.presets import PRESETS, choose_evictor
from restorekv.context import CompressedContext, format_bytes
from restorekv.errors import (
    AdapterError,
    BudgetError,
    CacheFileError,
    RestoreKVError,
    RestoreKVWarning,
)
from restorekv.generation.answers import answer_greedily
from restorekv.model.prompt import DEFAULT_SEPARATOR, make_context
from restorekv.model.shape import CacheShape
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from restorekv.storage.cache_file import open_cache_file
from tests.helpers.compressing import QUESTIONS, TEXT, TOKENS, compress_with, make_adapter
from tests.helpers.models import ONE_FAMILY, build_model

# What a template writes before a conversation that has no system message.
DEFAULT_SYSTEM = (
    "{{% if messages[0]['role'] != 'system' %}}<|im_start|>system\n{}<|im_end|>\n{{% endif %}}"
)


@pytest.fixture
def case(tiny_model, tiny_tokenizer):
    return tiny_model, tiny_tokenizer, TEXT


@pytest.mark.parametrize("evictor", ["kvzip", "kvzip+"])
@pytest.mark.parametrize("policy", ["free", "counted"])
@pytest.mark.parametrize("restored", [False, True])
def test_pairs_are_the_budget(case, evictor, policy, restored):
    model, tokenizer, text = case
    adapter = make_adapter(model) if restored else None
    prepared = Eviction.make(evictor, adapter, prefix_policy=policy).prepare(model, tokenizer, text)
    context, shape = prepared.context, CacheShape.from_model(model)
    columns = context.text_tokens if policy == "free" else context.num_tokens
    for ratio in ["1", "0.5", "0.3", "0.1", "0.071"]:
        cache = prepared.evict(ratio)
        total = Fraction(ratio) * columns * shape.layers * shape.heads // 1
        outside = context.prefix_length * shape.layers * shape.heads if policy == "free" else 0
        assert cache.pairs_held == total + outside
        assert cache.restore_length == (TOKENS if restored else 0)
        assert cache.get_seq_length() == context.num_tokens + cache.restore_length
        base = prepared.evict(ratio, 0)
        assert (base.pairs_held, base.restore_length) == (cache.pairs_held, 0)


def test_evictors_keep_the_best_scores(case):
    model, tokenizer, text = case
    prepared = Eviction.make("kvzip", prefix_policy="counted").prepare(model, tokenizer, text)
    scores, prefix = prepared.competing_scores(), prepared.context.prefix_length
    assert scores.shape[-1] == prepared.context.num_tokens
    first = max(prefix, 4)
    assert scores[..., first:].equal(prepared.scores[..., first - prefix :])
    assert (
        scores[..., :4].isposinf().all() and scores[..., 4:prefix].lt(prepared.scores.min()).all()
    )
    cache = prepared.evict(0.2)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for index, layer in enumerate(cache.layers):
        for head in range(layer.heads):
            kept[
                index, head, layer.positions[layer.bounds[head] : layer.bounds[head + 1]].long()
            ] = True
    assert scores[kept].min() >= scores[~kept].max()


def test_one_preparation_serves_every_budget(case):
    model, tokenizer, text = case
    adapter = make_adapter(model)
    eviction = Eviction.make("kvzip")
    prepared = eviction.prepare(model, tokenizer, text)
    restored = prepared.with_restore_cache(adapter)
    assert prepared.full.get_seq_length() == prepared.context.num_tokens
    assert all(keys.shape[-2] == TOKENS for keys, _ in restored.restore_cache)
    for ratio in (0.4, 0.1):
        for adapter_used, cache in [
            (None, prepared.evict(ratio)),
            (adapter, restored.evict(ratio)),
        ]:
            made = compress(*case, ratio=ratio, adapter=adapter_used)
            for ours, theirs in zip(made.cache.layers, cache.layers, strict=True):
                assert all(
                    a.equal(b)
                    for a, b in zip(ours.list_tensors(), theirs.list_tensors(), strict=True)
                )
    with pytest.raises(RestoreKVError, match="already"):
        restored.with_restore_cache(adapter)


def test_everything_kept_answers_as_the_plain_model(case):
    model, tokenizer, text = case
    made = compress(model, tokenizer, text, ratio=1)
    for question in QUESTIONS:
        inputs = made.inputs(question)
        plain = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)
        words = tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert made.ask(question, 12) == made.generate(question, max_new_tokens=12) == words


@pytest.mark.parametrize("restored", [False, True])
def test_ask_generate_save_load(case, tmp_path, restored):
    model, tokenizer, text = case
    made = compress(
        model, tokenizer, text, ratio=0.2, adapter=make_adapter(model) if restored else None
    )
    answers = made.ask(QUESTIONS, 12)
    assert answers == [made.ask(question, 12) for question in QUESTIONS]
    assert answers == [made.generate(question, max_new_tokens=12) for question in QUESTIONS]
    made.save(tmp_path / "doc.rkv")
    loaded = CompressedContext.load(tmp_path / "doc.rkv", model, tokenizer)
    assert loaded.ask(QUESTIONS, 12) == answers and loaded.manifest == made.manifest
    assert repr(loaded) == repr(made)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, {"do_sample": True, "num_return_sequences": 2}]
)
def test_generate_cannot_spoil_a_cache_that_was_not_forked(case, options):
    model = case[0]
    small = compress(*case, evictor="snapkv", adapter=make_adapter(model), ratio=0.4)
    before = (
        small.ask(QUESTIONS, 8),
        small.inputs(QUESTIONS[0])["input_ids"].shape,
        small.cache.nbytes,
    )
    rows = max(options.get("num_beams", 1), options.get("num_return_sequences", 1))
    for grad in (False, True):
        with (
            pytest.raises(RestoreKVError, match=r"compressed\.cache\.fork\(\)"),
            torch.set_grad_enabled(grad),
        ):
            inputs = {name: x.expand(rows, -1) for name, x in small.inputs(QUESTIONS[1]).items()}
            model(**inputs, past_key_values=small.cache) if grad else model.generate(
                **small.inputs(QUESTIONS[1]),
                past_key_values=small.cache,
                max_new_tokens=3,
                **options,
            )
    assert (
        small.ask(QUESTIONS, 8),
        small.inputs(QUESTIONS[0])["input_ids"].shape,
        small.cache.nbytes,
    ) == before
    assert small.generate(QUESTIONS[0], max_new_tokens=3, num_beams=rows)


@pytest.mark.parametrize("tiny_model", ONE_FAMILY, indirect=True)
def test_a_new_process_gives_the_same_answers(case, tmp_path):
    model, tokenizer, text = case
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made = compress(model, tokenizer, text, ratio=0.2, adapter=make_adapter(model))
    made.save(tmp_path / "doc.rkv")
    script = (
        "import json, sys, torch; torch.set_num_threads(1)\n"
        "from restorekv.context import CompressedContext\n"
        "from restorekv.model.load import load_model\n"
        "made = CompressedContext.load(sys.argv[2], *load_model(sys.argv[1], dtype='float32'))\n"
        "print(json.dumps(made.ask(json.loads(sys.argv[3]), 12)))"
    )
    command = [
        sys.executable,
        "-c",
        script,
        tmp_path / "model",
        tmp_path / "doc.rkv",
        json.dumps(QUESTIONS),
    ]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed.splitlines()[-1]) == made.ask(QUESTIONS, 12)


def test_the_wrong_model_is_refused(case, tmp_path):
    model, tokenizer, text = case
    path = tmp_path / "doc.rkv"
    compress(model, tokenizer, text, ratio=0.2).save(path)
    family = model.config.model_type
    with pytest.raises(CacheFileError, match="a different model"):
        CompressedContext.load(path, build_model(family, seed=1), tokenizer)
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    with pytest.raises(CacheFileError, match="RoPE"):
        CompressedContext.load(path, build_model(family, rope_parameters=rope), tokenizer)
    with pytest.raises(CacheFileError, match="float32"):
        CompressedContext.load(path, build_model(family).bfloat16(), tokenizer)


def test_another_chat_template_is_refused_where_it_writes_something_else(case, tmp_path):
    """A template's default system message does not matter to a text that has its own."""
    model, tokenizer, text = case
    own = copy.deepcopy(tokenizer)
    turn = tokenizer.chat_template
    own.chat_template = DEFAULT_SYSTEM.format("You are kind.") + turn
    others = {
        "before": "<|im_start|>" + own.chat_template,
        "after": own.chat_template.replace("assistant", "model"),
        "system message": DEFAULT_SYSTEM.format("You are brief.") + turn,
        "none": None,
    }
    small = compress(model, own, text, ratio=0.2)
    with_system = compress_with(model, own, text, ratio=0.2, system="You are odd.")
    small.save(tmp_path / "plain.rkv")
    with_system.save(tmp_path / "system.rkv")
    for name, template in others.items():
        other = copy.deepcopy(own)
        other.chat_template = template
        with pytest.raises(
            CacheFileError, match=r"plain\.rkv was made with a different chat template;"
        ):
            CompressedContext.load(tmp_path / "plain.rkv", model, other)
        if name == "system message":
            with pytest.warns(RestoreKVWarning, match="which writes the same around this text"):
                loaded = CompressedContext.load(tmp_path / "system.rkv", model, other)
            assert loaded.ask(QUESTIONS, 8) == with_system.ask(QUESTIONS, 8)
        else:
            with pytest.raises(CacheFileError, match="was made with a different chat template;"):
                CompressedContext.load(tmp_path / "system.rkv", model, other)


def rename_tokens(tokenizer):
    """Return a tokenizer of the same size in which other tokens have the ids."""
    record = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = record["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    plain = [name for name in names if not name.startswith("<")]
    for name, other in zip(plain, plain[1:] + plain[:1], strict=True):
        record["model"]["vocab"][name] = names.index(other)
    record["model"]["merges"] = []
    backend = tokenizers.Tokenizer.from_str(json.dumps(record))
    return type(tokenizer)(tokenizer_object=backend, chat_template=tokenizer.chat_template)


def test_the_wrong_tokenizer_is_refused(case, tmp_path):
    """Even with the same template, the ids of another tokenizer mean other texts."""
    model, tokenizer, text = case
    path = tmp_path / "doc.rkv"
    compress(model, tokenizer, text, ratio=0.5).save(path)
    with pytest.raises(CacheFileError, match="a different tokenizer"):
        CompressedContext.load(path, model, rename_tokens(tokenizer))
    # What the text does not have may be added.
    more = copy.deepcopy(tokenizer)
    more.add_special_tokens({"additional_special_tokens": ["<added>"]})
    again = CompressedContext.load(path, model, more)
    assert again.append(" Zebras QUIZ 9!").manifest.tokens_hash != again.manifest.tokens_hash


def test_a_token_that_was_added_to_the_tokenizer_alone_is_refused(case):
    """Texts without such a token can be read."""
    model, tokenizer, text = case
    more = copy.deepcopy(tokenizer)
    more.add_tokens([f"<added-{number}>" for number in range(model.config.vocab_size)])
    ids = [*tokenizer.encode(text), len(more) - 1]
    with pytest.raises(RestoreKVError, match=rf"writes token {len(more) - 1:,}, and the model has"):
        compress(model, more, ids, ratio=0.5, adapter=None)
    assert compress(model, more, ids[:-1], ratio=0.5, adapter=None).manifest.tokens


def test_ids_beyond_the_models_are_refused(case):
    model, tokenizer, text = case
    small = build_model(model.config.model_type, vocab_size=64)
    with pytest.raises(RestoreKVError, match="tokens and the model 64; pass the tokenizer"):
        compress(small, tokenizer, text, ratio=0.5)


def test_a_tokenizer_with_far_fewer_tokens_is_told_and_padding_is_not(case, recwarn):
    model, tokenizer, text = case
    tokens = len(tokenizer)
    padded = build_model(model.config.model_type, vocab_size=tokens + 128)
    compress(padded, tokenizer, text, ratio=0.5, adapter=None)
    assert not [each for each in recwarn if issubclass(each.category, RestoreKVWarning)]
    wide = build_model(model.config.model_type, vocab_size=2 * tokens + 1)
    sentence = f"The tokenizer has {tokens} tokens and the model {2 * tokens + 1}; answers make no"
    with pytest.warns(RestoreKVWarning, match=sentence):
        compress(wide, tokenizer, text, ratio=0.5, adapter=None)


def test_repr_and_manifest_tell_what_is_held(case, tmp_path):
    model, tokenizer, text = case
    made = compress(model, tokenizer, text, ratio=0.2, adapter=make_adapter(model))
    m, shown = made.manifest, repr(made)
    assert m.bytes_held == made.cache.nbytes and m.pairs_held == made.cache.pairs_held
    assert m.pairs + m.pairs_of_prefix == m.pairs_held
    for part in [
        f"T = {m.tokens}",
        f"{m.pairs:,}",
        format_bytes(m.bytes_full),
        format_bytes(m.bytes_held),
        "prefill",
        "score",
    ]:
        assert part in shown
    assert set(m.seconds) == {"prefill", "score", "restore", "evict"}
    made.save(tmp_path / "doc.rkv")
    assert open_cache_file(tmp_path / "doc.rkv").manifest == m


def test_streaming(case):
    made = compress(*case, ratio=0.5)
    pieces = list(made.ask(QUESTIONS[0], 12, stream=True))
    assert "".join(pieces) == made.ask(QUESTIONS[0], 12) and len(pieces) > 1
    for wrong in (
        {"question": QUESTIONS},
        {"question": "?", "details": True},
        {"question": "?", "samples": 2},
    ):
        with pytest.raises(RestoreKVError, match="Only"):
            made.ask(stream=True, **wrong)


def test_tokens_per_head(case):
    model, tokenizer, text = case
    shape = CacheShape.from_model(model)
    made = compress(model, tokenizer, text, tokens_per_head=9, adapter=make_adapter(model))
    assert made.manifest.pairs == 9 * shape.layers * shape.heads


def test_tight_policies(case):
    model, tokenizer, text = case
    shape, adapter = CacheShape.from_model(model), make_adapter(model)
    per_layer = shape.layers * shape.heads
    with pytest.raises(BudgetError, match="smallest workable ratio"):
        compress(
            model,
            tokenizer,
            text,
            tokens_per_head=2,
            adapter=adapter,
            config=CompressionConfig(on_small_budget="error"),
        )
    fewer = compress(
        model,
        tokenizer,
        text,
        tokens_per_head=2,
        adapter=adapter,
        config=CompressionConfig(on_small_budget="fewer"),
    )
    assert (fewer.cache.restore_length, fewer.manifest.pairs, fewer.manifest.restore_tokens) == (
        2,
        2 * per_layer,
        2,
    )
    clip = compress(
        model,
        tokenizer,
        text,
        tokens_per_head=2,
        adapter=adapter,
        config=CompressionConfig(on_small_budget="clip"),
    )
    assert (clip.cache.restore_length, clip.manifest.pairs) == (TOKENS, TOKENS * per_layer)
    # The first tokens of a causal restore pass do not depend on the later ones.
    assert fewer.cache.layers[-1].restore_keys.equal(clip.cache.layers[-1].restore_keys[:, :, :2])


def test_a_text_too_short_for_its_ratio_is_kept_whole_with_a_warning(case):
    model, tokenizer, text = case
    tokens = make_context(tokenizer, text).text_tokens
    sentence = (
        f"^A text of {tokens} tokens is too short for ratio 0.01, which has no room for {TOKENS} "
        "restore tokens: everything is kept, at ratio 1, and nothing is restored. What is appended "
        "later is kept whole, too.$"
    )
    with pytest.warns(RestoreKVWarning, match=sentence) as caught:
        made = compress(model, tokenizer, text, ratio=0.01, adapter=make_adapter(model))
    assert len(caught) == 1
    whole = compress(model, tokenizer, text, ratio=1)
    assert made.digest == whole.digest and bool(made.kept.all())
    recorded = made.manifest
    assert (recorded.ratio, recorded.restore_tokens, recorded.adapter) == ("1", 0, None)
    assert recorded.pairs == whole.manifest.pairs
    assert made.ask(QUESTIONS[0], 8) == whole.ask(QUESTIONS[0], 8)

    with pytest.warns(RestoreKVWarning, match=r"ratio 0.001, which has no room for one token"):
        made = compress(model, tokenizer, text, ratio=0.001, adapter=None)
    assert made.digest == whole.digest


BAD = [
    ({"context": ""}, "context is empty"),
    ({"context": None}, "context must be text"),
    ({"ratio": 0}, "above 0"),
    ({"ratio": 1.5}, "above 0"),
    ({"ratio": float("nan")}, "above 0"),
    ({"ratio": "much"}, "above 0"),
    ({"tokens_per_head": 0}, "whole number"),
    ({"tokens_per_head": 10**6}, "more than the"),
    ({"ratio": 0.1, "tokens_per_head": 5}, "not both"),
    ({"evictor": "magic"}, "magic"),
    ({"prefix_policy": "maybe"}, "prefix_policy"),
    ({"on_small_budget": "maybe"}, "on_small_budget"),
    ({"adapter": "/no/such/adapter"}, "adapter"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[str(change) for change, _ in BAD])
def test_bad_input_is_refused_in_one_sentence(case, change, message):
    model, tokenizer, text = case
    options = {"context": text, **change}
    with pytest.raises(RestoreKVError, match=message) as caught:
        compress_with(model, tokenizer, options.pop("context"), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", [list, torch.tensor])
def test_token_ids_are_a_context_too(case, form):
    model, tokenizer, text = case
    plain = compress(model, tokenizer, text, ratio=0.3)
    made = compress(
        model,
        tokenizer,
        form(plain.context.ids[0, plain.context.prefix_length :].tolist()),
        ratio=0.3,
    )
    assert (
        made.context.ids.equal(plain.context.ids)
        and made.context.prefix_length == plain.context.prefix_length
    )
    assert made.ask(QUESTIONS, 8) == plain.ask(QUESTIONS, 8)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no tokens"),
        ([1, -1], "run from 0"),
        ([10**6], "run from 0"),
        ([1.5], "not a list"),
        ([True], "not a list"),
        (torch.ones(1, 3).long(), "1-D"),
        (torch.ones(3), "1-D"),
    ],
)
def test_other_token_ids_are_refused(case, ids, message):
    with pytest.raises(RestoreKVError, match=message):
        compress(*case[:2], ids)


def test_python_refuses_an_unknown_argument(case):
    with pytest.raises(TypeError, match="allocate"):
        compress(*case, allocate="per-head")


def test_a_warning_points_at_the_call(case):
    model, tokenizer, text = case
    adapter = make_adapter(model)
    with pytest.warns(RestoreKVWarning, match="with streaming_chunk it reads") as caught:
        compress(
            model,
            tokenizer,
            text,
            adapter=adapter,
            ratio=0.3,
            config=CompressionConfig(streaming_chunk=40),
        )
    assert caught[0].filename == __file__


def test_methods_tell_what_they_can():
    evicting, matching = make_compressor("snapkv"), make_compressor("am-fast:steps=3")
    assert (evicting.restores, evicting.any_config, evicting.spec) == (True, True, "snapkv")
    assert (matching.restores, matching.any_config, matching.spec) == (
        False,
        False,
        "am-fast:steps=3",
    )
    assert (
        evicting.as_published(5) == evicting
        and make_compressor("kvzip").as_published(5).evictor.sinks == 5
    )


def test_every_preparation_evicts_alike(case):
    """The same call evicts from all, prepared at once, in parts or by Attention Matching."""
    model, tokenizer, text = case
    for spec, chunk in (("knorm", None), ("knorm", 50), ("am-fast", None)):
        prepared = make_compressor(spec, CompressionConfig(streaming_chunk=chunk)).prepare(
            model, tokenizer, text
        )
        assert (
            (prepared.full is None) == (prepared.streaming_chunk is not None) == (chunk is not None)
        )
        cache, seconds = prepared.evict_timed(0.3)
        assert prepared.evict(0.3, 0).pairs_held == cache.pairs_held and "evict" in seconds
        shape, context = CacheShape.from_model(model), prepared.context
        total = int(Fraction("0.3") * context.text_tokens * shape.layers * shape.heads)
        assert prepared.config.count_pairs(cache, context) == total


def test_contexts_shorter_than_the_restore_cache(case):
    model, tokenizer, _ = case
    adapter = make_adapter(model)
    refusing = CompressionConfig(on_small_budget="error")
    with pytest.raises(BudgetError, match="restore tokens"):
        compress(model, tokenizer, "a", ratio=1, adapter=adapter, config=refusing)
    with pytest.warns(RestoreKVWarning, match="everything is kept"):
        made = compress(model, tokenizer, "a", ratio=1, adapter=adapter)
    assert made.manifest.restore_tokens == 0 and bool(made.kept.all())


def test_adapters_for_another_model_are_refused_and_leave_nothing(case, tmp_path):
    model, tokenizer, text = case
    family = model.config.model_type
    other = build_model(family, seed=1)
    make_adapter(other).save_pretrained(tmp_path / "adapter")
    with pytest.raises(AdapterError):
        compress(model, tokenizer, text, adapter=tmp_path / "adapter", ratio=0.2)
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_an_adapter_from_disk_is_as_the_one_in_memory(case, tmp_path):
    model, tokenizer, text = case
    adapter = make_adapter(model)
    made = compress(model, tokenizer, text, adapter=adapter, ratio=0.2)
    adapter.save_pretrained(tmp_path / "adapter")
    again = compress(model, tokenizer, text, adapter=tmp_path / "adapter", ratio=0.2)
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert again.manifest.adapter == made.manifest.adapter
    for ours, theirs in zip(made.cache.layers, again.cache.layers, strict=True):
        torch.testing.assert_close(ours.restore_keys, theirs.restore_keys, rtol=1e-5, atol=1e-6)
        assert ours.context_keys.equal(theirs.context_keys)


def test_adapters_of_another_model_object_or_evictor(case):
    model, tokenizer, text = case
    with pytest.raises(AdapterError, match="a different model object"):
        compress(
            model,
            tokenizer,
            text,
            adapter=make_adapter(build_model(model.config.model_type)),
            ratio=0.2,
        )
    adapter = make_adapter(model)
    adapter.record_training(evictor="kvzip+")
    with pytest.warns(RestoreKVWarning, match="kvzip\\+, not kvzip"):
        compress(model, tokenizer, text, adapter=adapter, ratio=0.2)
    adapter.record_training(evictor="kvzip", separator="\n\n")
    with pytest.warns(RestoreKVWarning, match="text between document and question"):
        compress(
            model,
            tokenizer,
            text,
            adapter=adapter,
            ratio=0.2,
            config=CompressionConfig(separator="\n"),
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress(
            model,
            tokenizer,
            text,
            adapter=adapter,
            ratio=0.2,
            config=CompressionConfig(separator="\n\n"),
        )


def test_automatic_adapters_are_for_the_tiny_model_alone(case):
    assert compress(*case, adapter="auto", ratio=0.2).manifest.adapter is None


def test_budgets_of_another_context_are_refused(case):
    model, tokenizer, text = case
    prepared = Eviction.make("kvzip").prepare(model, tokenizer, text)
    with pytest.raises(BudgetError, match="make a new one"):
        prepared.evict(Budget.of_ratio(0.1, 7, 3, 2))
    shape = CacheShape.from_model(model)
    with pytest.raises(BudgetError, match="prepare the context with an adapter"):
        prepared.evict(
            Budget.of_ratio(0.5, prepared.context.text_tokens, shape.layers, shape.heads, 2)
        )


def test_contexts_may_come_ready_made(case):
    model, tokenizer, text = case
    context = make_context(tokenizer, text, DEFAULT_SEPARATOR)
    prepared = Eviction.make("kvzip").prepare(model, tokenizer, context)
    answers = answer_greedily(model, tokenizer, context, prepared.evict(0.2), QUESTIONS, 8)
    assert answers == compress(*case, ratio=0.2).ask(QUESTIONS, 8)


def test_the_first_tokens_of_a_nested_adapter_work_alone(tiny_model, tiny_tokenizer):
    whole = RestoreAdapter.create(tiny_model, 4, rank=2)
    with torch.no_grad():
        for value in whole.lora_parameters.values():
            value.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    whole.record_training(evictor="kvzip", settings={"nested": True})
    made = compress(
        tiny_model,
        tiny_tokenizer,
        TEXT,
        ratio=0.5,
        adapter=whole,
        config=CompressionConfig(restore_tokens=2),
    )
    assert made.manifest.restore_tokens == 2 and made.manifest.adapter["restore_tokens"] == 2
    prepared = (
        Eviction.make("kvzip").prepare(tiny_model, tiny_tokenizer, TEXT).with_restore_cache(whole)
    )
    expected = prepared.evict(0.5, 2)
    for one, other in zip(made.cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(one.restore_keys, other.restore_keys)
        assert torch.equal(one.context_keys, other.context_keys)
    whole.record_training(evictor="kvzip", settings={"nested": False})
    with pytest.warns(RestoreKVWarning, match="not trained to work with 2 of its 4"):
        compress(
            tiny_model,
            tiny_tokenizer,
            TEXT,
            ratio=0.5,
            adapter=whole,
            config=CompressionConfig(restore_tokens=2),
        )
    with pytest.raises(
        AdapterError, match="from 1 to 4, the adapter's number of restore tokens, not 5"
    ):
        compress(
            tiny_model,
            tiny_tokenizer,
            TEXT,
            ratio=0.5,
            adapter=whole,
            config=CompressionConfig(restore_tokens=5),
        )


def test_a_preset_stands_for_an_evictor():
    assert (choose_evictor(None, None), choose_evictor("h2o", None)) == ("kvzip", "h2o")
    assert {name: choose_evictor(None, name) for name in PRESETS} == {
        "fast": "fastkvzip",
        "best": "kvzip",
    }
    for evictor, preset in (("h2o", "fast"), (None, "slow")):
        with pytest.raises(RestoreKVError, match="preset"):
            choose_evictor(evictor, preset)


def test_a_context_comes_in_many_forms(case, tmp_path):
    model, tokenizer, text = case
    path = tmp_path / "text.txt"
    path.write_text(text)
    plain = compress(model, tokenizer, text, ratio=0.4, adapter=None)
    ids = plain.context.ids[0, plain.context.prefix_length :]
    told = [{"role": "user", "content": text}]
    for same in (path, ids, ids.tolist(), told):
        assert compress(model, tokenizer, same, ratio=0.4, adapter=None).context.ids.equal(
            plain.context.ids
        )
    briefed = compress(
        model,
        tokenizer,
        text,
        ratio=0.4,
        adapter=None,
        config=CompressionConfig(system="Be brief."),
    )
    messages = [{"role": "system", "content": "Be brief."}, *told]
    assert compress(model, tokenizer, messages, ratio=0.4, adapter=None).context.ids.equal(
        briefed.context.ids
    )
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert (
        rendered.startswith(tokenizer.decode(briefed.context.ids[0]))
        and briefed.manifest.system == "Be brief."
    )
    path.write_bytes(b"\xff\x00")
    for wrong, match in (
        (path, "is binary"),
        (messages * 2, "must be one user message"),
        ([{"role": "user"}], "Message 1 has no text"),
        (tmp_path / "none", "none"),
    ):
        with pytest.raises(RestoreKVError, match=match):
            compress(model, tokenizer, wrong, ratio=0.4, adapter=None)


def test_kvpress_users_may_say_compression_ratio(case):
    for ratio in ("0.1", "0.3"):
        theirs = compress(
            *case, compression_ratio=1 - float(ratio) if ratio == "0.3" else "0.9", adapter=None
        )
        assert theirs.manifest.ratio == str(Fraction(ratio))
    assert compress(*case, compression_ratio=0, adapter=None).manifest.ratio == "1"
    for wrong in (1, -0.1, "x"):
        with pytest.raises(BudgetError, match="the share of the pairs to drop"):
            compress(*case, compression_ratio=wrong)
    with pytest.raises(BudgetError, match="pass only one of them"):
        compress(*case, compression_ratio=0.5, ratio=0.5)
    with pytest.raises(BudgetError, match="ratio or tokens_per_head, not both"):
        compress(*case, compression_ratio=0.5, tokens_per_head=9)


def test_nothing_is_scored_where_all_stays(case):
    made = compress(*case, ratio=1, adapter=None)
    assert "score" not in made.manifest.seconds and made.kept.all()
    assert "score" in compress(*case, ratio=1, adapter=make_adapter(case[0])).manifest.seconds


def test_kept_marks_the_pairs_that_are_held(case):
    made = compress(*case, ratio=0.3, adapter=make_adapter(case[0]))
    assert made.kept.sum(-1).equal(made.cache.lengths)
    assert made.kept[..., : made.context.prefix_length].all()


@pytest.mark.parametrize(
    "wrong", ({"ratio": 5}, {"ratio": 0.5, "tokens_per_head": 9}, {"compression_ratio": 1})
)
def test_a_wrong_size_is_refused_before_a_file_is_read(case, tmp_path, wrong):
    with pytest.raises(BudgetError):
        compress(*case[:2], tmp_path / "nowhere.pdf", **wrong)
