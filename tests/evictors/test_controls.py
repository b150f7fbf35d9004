"""The paper's controls as configurations: offset only, restored from the evicted cache, fixed
embeddings, no LoRA.
"""

import warnings
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import sdpa_mask

from restorekv.compression.budget import Budget
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction, make_compressor
from restorekv.context import CompressedContext
from restorekv.errors import AdapterError, BudgetError, RestoreKVError, RestoreKVWarning
from restorekv.model.load import load_model
from restorekv.model.prefill import prefill
from restorekv.model.prompt import encode_question, encode_text
from restorekv.pipeline import compress
from restorekv.restore import adapter as restore_adapter
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.config import TrainConfig
from restorekv.train.examples import TrainingContext
from restorekv.train.loop import train_adapter
from tests.helpers.compressing import compress_with
from tests.helpers.models import build_model

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives there. "
    * 2
)
QUESTION = "Who lives in the blue house?"
TOKENS = 4
TINY = TrainConfig(
    restore_tokens=TOKENS, rank=2, lr=1e-2, warmup=0, steps=2, max_new_tokens=4, ratio_min=0.1
)
EXAMPLE = TrainingContext(TEXT, (QUESTION,), (None,))


def make_adapter(model, n=TOKENS):
    adapter = RestoreAdapter.create(model, n, rank=2, alpha=4)
    with torch.no_grad():
        for name, parameter in adapter.lora_parameters.items():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(0))
    return adapter


@torch.no_grad()
def logits(model, cache, asked):
    return model(asked, past_key_values=cache.fork()).logits


def test_an_offset_moves_the_question_and_nothing_else(tiny_model, tiny_tokenizer):
    prepared = Eviction.make("kvzip", offset=8).prepare(tiny_model, tiny_tokenizer, TEXT)
    asked = encode_question(tiny_tokenizer, prepared.context, QUESTION)
    cache, context = prepared.evict(1), prepared.context
    assert cache.restore_length == 0 and cache.get_seq_length() == context.num_tokens + 8
    full = prefill(tiny_model, context.ids)
    later = torch.arange(context.num_tokens + 8, context.num_tokens + 8 + asked.shape[1])[None]
    with torch.no_grad():
        exact = tiny_model(asked, past_key_values=full, position_ids=later).logits
    torch.testing.assert_close(logits(tiny_model, cache, asked), exact, rtol=1e-3, atol=1e-4)
    plain = Eviction.make("kvzip").prepare(tiny_model, tiny_tokenizer, TEXT).evict(1)
    assert not logits(tiny_model, plain, asked).allclose(exact, rtol=1e-3, atol=1e-3)
    assert cache.pairs_held == plain.pairs_held and cache.nbytes == plain.nbytes


def test_an_offset_survives_the_file_and_generate(tiny_model, tiny_tokenizer, tmp_path):
    made = compress(
        tiny_model,
        tiny_tokenizer,
        TEXT,
        ratio=0.25,
        adapter=None,
        config=CompressionConfig(offset=5),
    )
    made.save(tmp_path / "doc.rkv")
    again = CompressedContext.load(tmp_path / "doc.rkv", tiny_model, tiny_tokenizer)
    assert (
        again.manifest.offset == 5 and again.cache.get_seq_length() == made.cache.get_seq_length()
    )
    answers = {c.ask(QUESTION, 8) for c in (made, again)} | {
        c.generate(QUESTION, max_new_tokens=8) for c in (made, again)
    }
    assert len(answers) == 1
    with pytest.raises(RestoreKVError, match="offset"):
        compress(
            tiny_model,
            tiny_tokenizer,
            TEXT,
            ratio=0.25,
            adapter=make_adapter(tiny_model),
            config=CompressionConfig(offset=5),
        )


def test_restored_from_the_evicted_cache(tiny_model, tiny_tokenizer):
    adapter = make_adapter(tiny_model)
    before = Eviction.make("kvzip", adapter).prepare(tiny_model, tiny_tokenizer, TEXT)
    after = Eviction.make("kvzip", adapter, restore_from="evicted").prepare(
        tiny_model, tiny_tokenizer, TEXT
    )
    context = before.context
    assert after.full.get_seq_length() == context.num_tokens
    for ratio in (1, 0.5, 0.2):
        one, other = before.evict(ratio), after.evict(ratio)
        assert (
            one.pairs_held == other.pairs_held
            and one.lengths.equal(other.lengths)
            and other.restore_length == TOKENS
        )
        assert one.get_seq_length() == other.get_seq_length()
    # The definition: the n tokens read what eviction left, as any question would.
    kept = after.evict(0.2)
    keep = after.config.allocation(after.competing_scores(), after.make_budget(0.2).retained)
    mask = torch.cat([keep.new_ones(*keep.shape[:2], context.prefix_length), keep], -1)
    states = masked_restore(tiny_model, adapter, prefill(tiny_model, context.ids), mask)
    for layer, (keys, values) in zip(kept.layers, states, strict=True):
        torch.testing.assert_close(layer.restore_keys, keys, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(layer.restore_values, values, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def masked_restore(model, adapter, full, keep):
    """Oracle: the same pass over the dense cache with dropped pairs masked out in SDPA."""

    def hidden(module, query, key, value, attention_mask, scaling=None, **_):
        groups, n = query.shape[1] // key.shape[1], query.shape[2]
        columns = keep.shape[-1]
        visible = torch.ones(key.shape[1], n, key.shape[2], dtype=torch.bool).tril(columns)
        visible[..., :columns] = keep[module.layer_idx][:, None]
        visible, key, value = (x.repeat_interleave(groups, -3) for x in (visible, key, value))
        found = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, visible, scale=scaling
        )
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register("hidden", hidden)
    AttentionMaskInterface.register("hidden", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("hidden")
    # The pass would set the model's own attention again.
    with patch.object(restore_adapter, "install_attention"):
        adapter.run_restore_pass(full)
    model.set_attn_implementation(before)
    columns = keep.shape[-1]
    return [(layer.keys[:, :, columns:], layer.values[:, :, columns:]) for layer in full.layers]


def test_fewer_restore_tokens_from_the_evicted_cache(tiny_model, tiny_tokenizer):
    eviction = Eviction.make(
        "kvzip", make_adapter(tiny_model, 16), restore_from="evicted", on_small_budget="fewer"
    )
    prepared = eviction.prepare(tiny_model, tiny_tokenizer, TEXT)
    cache = prepared.evict(5 / prepared.context.text_tokens)
    assert 0 < cache.restore_length <= 5 and cache.pairs_held > 0
    assert prepared.evict(0.05, 0).restore_length == 0


@pytest.mark.parametrize("restore_from", ["full", "evicted"])
def test_training_reaches_every_part(tiny_tokenizer, tmp_path, restore_from):
    model = build_model("qwen3")
    config = replace(TINY, restore_from=restore_from)
    fresh = RestoreAdapter.create(model, TOKENS, rank=2)
    adapter = train_adapter(model, tiny_tokenizer, [EXAMPLE], config, tmp_path)
    assert adapter.card.restore_from == restore_from
    assert not adapter.embeddings.equal(fresh.embeddings)
    assert any(
        value.abs().max() > 0 for name, value in adapter.lora_parameters.items() if "lora_B" in name
    )
    with pytest.warns(
        RestoreKVWarning, match=f"trained with the restore pass over the cache {restore_from}"
    ):
        other = {"full": "evicted", "evicted": "full"}[restore_from]
        compress(
            model,
            tiny_tokenizer,
            TEXT,
            ratio=0.25,
            adapter=tmp_path / "adapter",
            config=CompressionConfig(restore_from=other),
        )


def test_fixed_embeddings_are_line_breaks_and_stay(tiny_tokenizer, tmp_path):
    model = build_model("llama")
    adapter = train_adapter(
        model, tiny_tokenizer, [EXAMPLE], replace(TINY, embeddings="fixed"), tmp_path
    )
    newline = model.get_input_embeddings().weight[encode_text(tiny_tokenizer, "\n")[0, -1]]
    assert (
        adapter.embeddings.equal(newline.expand(TOKENS, -1))
        and not adapter.embeddings.requires_grad
    )
    assert any(
        value.abs().max() > 0 for name, value in adapter.lora_parameters.items() if "lora_B" in name
    )
    again = RestoreAdapter.from_pretrained(model, tmp_path / "adapter")
    assert not again.embeddings.requires_grad and again.identity() == adapter.identity()


def test_learned_embeddings_without_lora(tiny_tokenizer, tmp_path):
    model = build_model("qwen3")
    fresh = RestoreAdapter.create(model, TOKENS, targets=())
    adapter = train_adapter(model, tiny_tokenizer, [EXAMPLE], replace(TINY, targets=()), tmp_path)
    assert not adapter.lora_parameters and not adapter.embeddings.equal(fresh.embeddings)
    again = RestoreAdapter.from_pretrained(model, tmp_path / "adapter")
    assert again.identity() == adapter.identity() and not again.lora_parameters
    with pytest.raises(AdapterError, match="nothing to train"):
        RestoreAdapter.create(model, TOKENS, targets=(), fixed=1)


@pytest.mark.parametrize(
    "targets", [("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")]
)
def test_lora_only_where_it_is_wanted(targets):
    adapter = RestoreAdapter.create(build_model("qwen3"), TOKENS, targets=targets)
    assert {name.split(".")[-3] for name in adapter.lora_parameters} == set(targets)


@pytest.mark.parametrize("n", [1, 2, 16])
def test_any_number_of_restore_tokens(tiny_model, tiny_tokenizer, n):
    prepared = Eviction.make("kvzip", make_adapter(tiny_model, n)).prepare(
        tiny_model, tiny_tokenizer, TEXT
    )
    cache = prepared.evict(0.3)
    assert cache.restore_length == n and cache.pairs_held == prepared.evict(0.3, 0).pairs_held


@pytest.mark.parametrize(
    "bad",
    [{"restore_from": "half"}, {"offset": -1}, {"allocation": "best"}, {"on_small_budget": "x"}],
)
def test_unknown_conventions_are_refused(bad):
    with pytest.raises(RestoreKVError):
        Eviction.make("kvzip", **bad)


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("policy", ["free", "counted"])
def test_a_rectangular_cache_is_a_plain_one(tiny_model, tiny_tokenizer, restored, policy):
    adapter = make_adapter(tiny_model) if restored else None
    eviction = Eviction.make("snapkv", adapter, allocation="per-head", prefix_policy=policy)
    prepared = eviction.prepare(tiny_model, tiny_tokenizer, TEXT)
    cache = prepared.evict(0.31)
    plain = cache.to_dynamic_cache()
    assert isinstance(plain, DynamicCache) and not isinstance(plain, type(cache))
    assert (
        plain.get_seq_length() * plain.layers[0].keys.shape[1] * len(plain.layers)
        == cache.pairs_held
    )
    asked = encode_question(tiny_tokenizer, prepared.context, QUESTION)
    first = cache.get_seq_length()
    with torch.no_grad():
        found = tiny_model(
            asked,
            past_key_values=plain,
            position_ids=torch.arange(first, first + asked.shape[1])[None],
        ).logits
    torch.testing.assert_close(found, logits(tiny_model, cache, asked), rtol=1e-3, atol=1e-4)
    cache.layers[0].restore_keys.zero_()
    assert not restored or plain.layers[0].keys[:, :, -1].abs().min() > 0, "a copy"


@pytest.mark.parametrize("restored", [False, True])
def test_transformers_answers_from_a_plain_cache_as_we_do(tiny_model, tiny_tokenizer, restored):
    adapter = make_adapter(tiny_model) if restored else None
    options = {"evictor": "random", "ratio": 0.2, "adapter": adapter, "allocation": "per-head"}
    made = compress_with(tiny_model, tiny_tokenizer, TEXT, **options)
    plain, inputs = made.cache.to_dynamic_cache(), made.inputs(QUESTION, plain=True)
    held = plain.get_seq_length()
    told = tiny_model.generate(
        **inputs,
        past_key_values=plain,
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
    )
    asked = inputs["input_ids"].shape[1]
    assert plain.get_seq_length() == told.shape[1] - 1 and held < asked, (
        "the text was not read again"
    )
    assert tiny_tokenizer.decode(told[0, asked:], skip_special_tokens=True) == made.ask(QUESTION, 8)


def test_a_ragged_cache_is_not_a_plain_one(tiny_model, tiny_tokenizer):
    prepared = Eviction.make("kvzip").prepare(tiny_model, tiny_tokenizer, TEXT)
    with pytest.raises(RestoreKVError, match="per-head"):
        prepared.evict(0.3).to_dynamic_cache()


@pytest.mark.parametrize("allocation", ["global", "per-layer", "per-head", "adakv"])
@pytest.mark.parametrize("restored", [False, True])
def test_every_allocation_fills_the_budget(tiny_model, tiny_tokenizer, allocation, restored):
    adapter = make_adapter(tiny_model) if restored else None
    prepared = Eviction.make("kvzip", adapter, allocation=allocation).prepare(
        tiny_model, tiny_tokenizer, TEXT
    )
    shape, context = prepared.scores.shape, prepared.context
    for ratio in ("1", "0.333", "0.1"):
        budget, cache = prepared.make_budget(ratio), prepared.evict(ratio)
        assert cache.pairs_held - context.prefix_length * shape[0] * shape[1] == budget.total
        if allocation == "per-head":
            assert len(cache.lengths.unique()) == 1 and budget.whole_tokens
        if allocation != "global":
            assert len(cache.lengths.sum(-1).unique()) <= 2


def test_an_offset_leaves_the_shipped_adapter_out_and_says_so():
    model, tokenizer = load_model("tiny")
    with pytest.warns(RestoreKVWarning, match="no adapter is used"):
        made = compress(model, tokenizer, TEXT, ratio=0.5, config=CompressionConfig(offset=3))
    assert made.manifest.adapter is None


def test_a_failed_start_leaves_no_folder(tiny_tokenizer, tmp_path):
    with pytest.raises(AdapterError):
        train_adapter(
            build_model("qwen3"),
            tiny_tokenizer,
            [EXAMPLE],
            replace(TINY, targets=("x",)),
            tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(RestoreKVError, match="nothing to train"):
        replace(TINY, evictor="am-fast")


def test_controls_that_would_do_nothing_are_refused(tiny_model, tiny_tokenizer):
    adapter = make_adapter(tiny_model)
    with pytest.raises(RestoreKVError, match="needs an adapter"):
        compress(
            tiny_model,
            tiny_tokenizer,
            TEXT,
            ratio=0.25,
            adapter=None,
            config=CompressionConfig(restore_from="evicted"),
        )
    with pytest.raises(RestoreKVError, match="no restore pass"):
        make_compressor("am-fast", CompressionConfig(restore_from="evicted"))
    moved = Eviction.make("knorm", offset=5).prepare(tiny_model, tiny_tokenizer, TEXT)
    with pytest.raises(RestoreKVError, match="offset"):
        moved.with_restore_cache(adapter)


@pytest.mark.parametrize("targets", [("q_proj", "k_prj"), ("q_proj", " k_proj")])
def test_every_lora_target_must_exist(targets):
    with pytest.raises(AdapterError, match="k_pr"):
        RestoreAdapter.create(build_model("qwen3"), TOKENS, targets=targets)


def test_an_adapter_of_another_prefix_policy_is_warned_about(tiny_tokenizer, tmp_path):
    model = build_model("qwen3")
    adapter = train_adapter(
        model, tiny_tokenizer, [EXAMPLE], replace(TINY, prefix_policy="counted"), tmp_path
    )
    with pytest.warns(RestoreKVWarning, match="prefix policy counted, not free"):
        compress(model, tiny_tokenizer, TEXT, ratio=0.25, adapter=adapter)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress(
            model,
            tiny_tokenizer,
            TEXT,
            ratio=0.25,
            adapter=adapter,
            config=CompressionConfig(prefix_policy="counted"),
        )


def test_a_ready_budget_must_fit_the_allocation(tiny_model, tiny_tokenizer):
    prepared = Eviction.make("knorm", allocation="per-head").prepare(
        tiny_model, tiny_tokenizer, TEXT
    )
    layers, heads, tokens = prepared.scores.shape
    loose = next(
        made
        for count in range(1, 99)
        if (made := Budget.of_ratio(f"{count / 99:.4f}", tokens, layers, heads)).total
        % (layers * heads)
    )
    with pytest.raises(BudgetError, match="whole tokens"):
        prepared.evict(loose)
    whole = Budget.of_ratio(loose.ratio, tokens, layers, heads, whole_tokens=True)
    assert len(prepared.evict(whole).lengths.unique()) == 1
