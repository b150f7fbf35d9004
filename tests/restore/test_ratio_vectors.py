"""An adapter that knows the ratio: its restore pass is that of a plain adapter with embeddings
moved along the ratio vectors by ln(r / 0.1).
"""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file, save_file

from restorekv import CompressionConfig, compress
from restorekv.compression.eviction import Eviction
from restorekv.errors import AdapterError, BudgetError, RestoreKVWarning
from restorekv.restore import adapter_file
from restorekv.restore.adapter import RestoreAdapter
from restorekv.seal import seal_record
from restorekv.train import checkpoint
from restorekv.train.loop import make_initial_adapter, train_adapter
from tests.helpers.training import CONFIG, EXAMPLES, TEXT, losses

RATIOS = ("0.5", "0.2", "0.1", "0.05")
KNOWING = replace(CONFIG, knows_ratio=True)


def make_adapter(model, n=3, seed=0):
    """Return an adapter with random LoRA weights and ratio vectors, so that both have an effect."""
    adapter = RestoreAdapter.create(model, n, rank=2, alpha=4, seed=seed)
    adapter.add_ratio_vectors()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        adapter.ratio_vectors.normal_(std=0.5, generator=generator)
        for parameter in adapter.lora:
            parameter.normal_(std=0.3, generator=generator)
    return adapter


def make_moved_adapter(adapter, ratio):
    """Return what is expected: a plain adapter with the embeddings of one ratio."""
    embeddings = adapter.embeddings + math.log(float(Fraction(ratio)) / 0.1) * adapter.ratio_vectors
    moved = RestoreAdapter(adapter.model, adapter.lora_config, embeddings.detach(), adapter.card)
    lora = {name: value.detach() for name, value in adapter.lora_parameters.items()}
    moved.load_lora("the oracle", lora)
    return moved


def have_equal_pairs(cache, other):
    return all(
        ours.restore_keys.equal(theirs.restore_keys)
        and ours.restore_values.equal(theirs.restore_values)
        and ours.context_keys.equal(theirs.context_keys)
        for ours, theirs in zip(cache.layers, other.layers, strict=True)
    )


@pytest.mark.parametrize("restore_from", ("full", "evicted"))
def test_every_ratio_has_the_restore_pass_of_its_embeddings(
    tiny_model, tiny_tokenizer, restore_from
):
    adapter = make_adapter(tiny_model)
    eviction = Eviction.make("kvzip", restore_from=restore_from)
    prepared = eviction.prepare(tiny_model, tiny_tokenizer, TEXT * 3)
    restored = prepared.with_restore_cache(adapter)
    with torch.no_grad():
        caches = {ratio: restored.evict(ratio) for ratio in RATIOS}
        for ratio, cache in caches.items():
            oracle = prepared.with_restore_cache(make_moved_adapter(adapter, ratio))
            assert have_equal_pairs(cache, oracle.evict(ratio)), ratio
    assert not caches["0.5"].layers[0].restore_keys.equal(caches["0.05"].layers[0].restore_keys)
    assert restored.evict("0.5", 0).restore_length == 0


def test_the_time_of_the_restore_pass_is_its_own(tiny_model, tiny_tokenizer):
    prepared = Eviction.make("kvzip").prepare(tiny_model, tiny_tokenizer, TEXT * 3)
    restored = prepared.with_restore_cache(make_adapter(tiny_model))
    with torch.no_grad():
        assert restored.evict_timed("0.5")[1].keys() == {"restore", "evict"}
        assert restored.evict_timed("0.5", 0)[1].keys() == {"evict"}


@pytest.mark.parametrize(
    "restore_from, last", (("full", ["restore", "evict"]), ("evicted", ["evict", "restore"]))
)
def test_phases_are_named_when_they_run(tiny_model, tiny_tokenizer, restore_from, last):
    phases = []
    compress(
        tiny_model,
        tiny_tokenizer,
        TEXT * 3,
        ratio="0.5",
        adapter=make_adapter(tiny_model),
        config=CompressionConfig(restore_from=restore_from),
        progress=lambda phase, _: phases.append(phase),
    )
    named = list(dict.fromkeys(phases))
    assert named[:2] == ["prefill", "score"] and named[2:4] == last, named


def test_a_budget_says_how_many_restore_tokens_it_reserves(tiny_model, tiny_tokenizer):
    prepared = Eviction.make("kvzip").prepare(tiny_model, tiny_tokenizer, TEXT * 3)
    restored = prepared.with_restore_cache(make_adapter(tiny_model))
    budget = restored.make_budget("0.5", 2)
    with torch.no_grad():
        assert restored.evict(budget).restore_length == 2
        assert restored.evict(budget, 2).restore_length == 2
        with pytest.raises(BudgetError, match="reserves 2 restore tokens, not 1; pass a ratio"):
            restored.evict(budget, 1)


@pytest.mark.parametrize("config", (CompressionConfig(), CompressionConfig(streaming_chunk=60)))
def test_compress_and_append_run_the_pass_of_their_ratio(tiny_model, tiny_tokenizer, config):
    adapter = make_adapter(tiny_model)
    text = TEXT * 3
    for ratio in ("0.5", "0.3"):
        small = compress(
            tiny_model, tiny_tokenizer, text, ratio=ratio, adapter=adapter, config=config
        )
        moved = make_moved_adapter(adapter, ratio)
        oracle = compress(
            tiny_model, tiny_tokenizer, text, ratio=ratio, adapter=moved, config=config
        )
        assert have_equal_pairs(small.cache, oracle.cache)
        assert "restore" in small.manifest.seconds
        grown = small.append(TEXT, adapter=adapter)
        assert have_equal_pairs(grown.cache, oracle.append(TEXT, adapter=moved).cache)


def test_a_budget_in_tokens_has_its_ratio_too(tiny_model, tiny_tokenizer):
    adapter = make_adapter(tiny_model)
    small = compress(tiny_model, tiny_tokenizer, TEXT, tokens_per_head=20, adapter=adapter)
    moved = make_moved_adapter(adapter, small.manifest.ratio)
    oracle = compress(tiny_model, tiny_tokenizer, TEXT, tokens_per_head=20, adapter=moved)
    assert have_equal_pairs(small.cache, oracle.cache)


def test_without_a_ratio_the_pass_is_refused(tiny_model):
    with pytest.raises(AdapterError, match="depends on the ratio"):
        make_adapter(tiny_model).make_inputs()


def test_the_vectors_survive_the_disk_and_count_as_weights(tiny_model, tmp_path):
    adapter = make_adapter(tiny_model)
    adapter.save_pretrained(tmp_path)
    loaded = RestoreAdapter.from_pretrained(tiny_model, tmp_path)
    assert loaded.knows_ratio and loaded.ratio_vectors.equal(adapter.ratio_vectors)
    assert loaded.identity()["hash"] == adapter.identity()["hash"]
    assert adapter.identity()["hash"] != make_moved_adapter(adapter, 0.1).identity()["hash"]
    assert "ln(r / 0.1)" in (tmp_path / "README.md").read_text("utf-8")
    loaded.card = replace(loaded.card, results=[{"benchmark": "mine"}], helps_up_to=0.3)
    short = loaded.truncate(2)
    # Nobody has measured the shorter one; above .3 it helps no more than the whole one.
    assert (short.card.results, short.card.helps_up_to) == (None, 0.3)
    assert short.ratio_vectors.equal(adapter.ratio_vectors[:2])


def test_an_extended_adapter_begins_as_it_was(tiny_model, tiny_tokenizer):
    adapter = make_adapter(tiny_model)
    n = adapter.restore_tokens
    longer = adapter.extend(2 * n + 1)
    assert longer.restore_tokens == longer.card.restore_tokens == 2 * n + 1
    rows = [*range(n), *range(n), 0]
    assert longer.embeddings.equal(adapter.embeddings[rows])
    assert longer.ratio_vectors.equal(adapter.ratio_vectors[rows])
    # The pass is causal: the first n tokens leave the pairs that they left before.
    prepared = Eviction.make("kvzip").prepare(tiny_model, tiny_tokenizer, TEXT * 3)
    with torch.no_grad():
        shorter_cache = prepared.with_restore_cache(adapter).evict("0.3")
        longer_cache = prepared.with_restore_cache(longer).evict("0.3", n)
        full_length = prepared.with_restore_cache(longer).evict("0.3")
    for shorter, same in zip(shorter_cache.layers, longer_cache.layers, strict=True):
        assert torch.allclose(shorter.restore_keys, same.restore_keys, atol=1e-5)
        assert torch.allclose(shorter.restore_values, same.restore_values, atol=1e-5)
        assert shorter.context_keys.equal(same.context_keys)
    keys = full_length.layers[0].restore_keys
    assert not keys[:, :n].equal(keys[:, n : 2 * n]), "the same input, at later positions"
    assert adapter.extend(n) is adapter
    with pytest.raises(AdapterError, match=f"of {n} restore tokens cannot be extended to {n - 1}"):
        adapter.extend(n - 1)


@pytest.mark.parametrize("use_rslora", [False, True])
def test_a_higher_rank_changes_no_restored_pair(tiny_model, tiny_tokenizer, use_rslora):
    plain = make_adapter(tiny_model)
    config = replace(plain.lora_config, use_rslora=use_rslora)
    adapter = RestoreAdapter(
        tiny_model, config, plain.embeddings.detach(), plain.card, plain.ratio_vectors.detach()
    )
    adapter.load_lora("the test's", {k: v.detach() for k, v in plain.lora_parameters.items()})
    wider = adapter.extend(adapter.restore_tokens, 2 * adapter.lora_config.r + 1)
    scales = set()
    for each in (adapter, wider):
        config = each.lora_config
        scale = config.lora_alpha / (config.r**0.5 if use_rslora else config.r)
        scales.add(round(scale, 6))
        for name, a in each.lora_parameters.items():
            if name.endswith("lora_A.weight"):
                b = each.lora_parameters[name.replace("lora_A", "lora_B")]
                assert a.shape[0] == b.shape[1] == config.r
    assert len(scales) == 1
    prepared = Eviction.make("kvzip").prepare(tiny_model, tiny_tokenizer, TEXT * 3)
    with torch.no_grad():
        before = prepared.with_restore_cache(adapter).evict("0.3")
        after = prepared.with_restore_cache(wider).evict("0.3")
    for old, new in zip(before.layers, after.layers, strict=True):
        assert torch.allclose(old.restore_keys, new.restore_keys, atol=1e-5)
        assert torch.allclose(old.restore_values, new.restore_values, atol=1e-5)
    with pytest.raises(AdapterError, match="cannot be extended to 1; pass"):
        adapter.extend(adapter.restore_tokens, 1)
    adapter.lora_config.rank_pattern = {"q_proj": 3}
    with pytest.raises(AdapterError, match="ranks or scales of their own"):
        adapter.extend(adapter.restore_tokens, 99)


def test_an_extended_adapter_has_no_record_of_what_was_measured_without_it(tiny_model, tmp_path):
    adapter = make_adapter(tiny_model)
    data = [{"source": "mine", "license": "cc-by-sa-4.0", "contexts": 1, "examples": 1}]
    adapter.record_training(
        evictor="kvzip", ratio_range=(0.1, 0.2), settings={"nested": True}, data=data
    )
    adapter.record_results([{"benchmark": "mine"}], 0.3, ["snapkv"], {"snapkv": 0.1})
    adapter.save_pretrained(tmp_path)
    longer = RestoreAdapter.from_pretrained(tiny_model, tmp_path).extend(9)
    longer.save_pretrained(tmp_path / "longer")
    card = RestoreAdapter.from_pretrained(tiny_model, tmp_path / "longer").card
    assert (card.helps_up_to, card.also_for, card.helps_from, card.results) == (None,) * 4
    # What it began with decides for what it is, and how it is licensed.
    assert (card.evictor, card.ratio_range, card.data) == ("kvzip", (0.1, 0.2), data)
    assert card.license == "cc-by-sa-4.0"
    with pytest.warns(RestoreKVWarning, match="not trained to work with 6 of its 9"):
        longer.truncate(6)
    # A copy of a published adapter, without a word on its license, has its authors'.
    (tmp_path / "README.md").unlink()
    copy = RestoreAdapter.from_pretrained(tiny_model, tmp_path)
    copy.card = replace(copy.card, source="higokri/RestoreKV-Qwen3-8B", license=None)
    extended = copy.extend(9).card
    assert (extended.source, extended.license) == (None, "cc-by-nc-4.0")


@pytest.mark.parametrize("shape, dtype", (((2, 8), torch.float32), (None, torch.float64)))
def test_vectors_that_do_not_fit_are_refused(tiny_model, tmp_path, shape, dtype):
    adapter = make_adapter(tiny_model)
    adapter.save_pretrained(tmp_path)
    path = tmp_path / adapter_file.EMBEDDINGS
    tensors = load_file(path)
    wrong = torch.zeros(shape or adapter.embeddings.shape, dtype=dtype)
    save_file(tensors | {"ratio_vectors": wrong}, path)
    card_path = tmp_path / adapter_file.CARD
    card = adapter_file.files.read_record(card_path, "the card")
    card.pop("seal", None)
    card["sha256"][adapter_file.EMBEDDINGS] = adapter_file._digest(path.read_bytes())
    card_path.write_text(adapter_file.json.dumps(seal_record(card)))
    with pytest.raises(AdapterError, match="ratio_vectors"):
        RestoreAdapter.from_pretrained(tiny_model, tmp_path)


def test_training_begins_at_the_plain_adapter_and_learns_the_ratio(
    tiny_model, tiny_tokenizer, tmp_path
):
    begun = make_initial_adapter(tiny_model, tiny_tokenizer, KNOWING)
    assert begun.knows_ratio and not begun.ratio_vectors.any()
    plain = train_adapter(tiny_model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "plain")
    assert not plain.knows_ratio
    knowing = train_adapter(tiny_model, tiny_tokenizer, EXAMPLES, KNOWING, tmp_path / "knowing")
    assert knowing.ratio_vectors.any()
    first = [losses(tmp_path / name)[0] for name in ("plain", "knowing")]
    assert first[0] == first[1], "vectors of zero change nothing"


def test_a_killed_run_goes_on_with_its_vectors(tiny_model, tiny_tokenizer, tmp_path):
    whole = train_adapter(tiny_model, tiny_tokenizer, EXAMPLES, KNOWING, tmp_path / "whole")

    def stop(step, steps, loss):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_adapter(
            tiny_model, tiny_tokenizer, EXAMPLES, KNOWING, tmp_path / "cut", progress=stop
        )
    assert (tmp_path / "cut" / checkpoint.CHECKPOINT_FILE).exists() and KNOWING.steps > 2
    resumed = train_adapter(
        tiny_model, tiny_tokenizer, EXAMPLES, KNOWING, tmp_path / "cut", resume=True
    )
    assert resumed.ratio_vectors.equal(whole.ratio_vectors)


def test_training_on_keeps_what_is_known_or_is_refused(tiny_model, tiny_tokenizer, tmp_path):
    adapter = train_adapter(tiny_model, tiny_tokenizer, EXAMPLES, KNOWING, tmp_path / "run")
    init = str(tmp_path / "run" / "adapter")
    again = make_initial_adapter(tiny_model, tiny_tokenizer, replace(KNOWING, init=init))
    assert again.ratio_vectors.equal(adapter.ratio_vectors)
    with pytest.raises(AdapterError, match="--knows-ratio"):
        make_initial_adapter(tiny_model, tiny_tokenizer, replace(CONFIG, init=init))
