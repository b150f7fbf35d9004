"""The restore pass: gradients arrive, and LoRA leaves no trace outside of it. Adapters are loaded
as they were saved, or are refused.
"""

import contextlib
import copy
import json
import math
import os
import pickle
import shutil
import warnings
from dataclasses import replace
from functools import partial
from types import MethodType

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GemmaConfig, GemmaForCausalLM

from restorekv.cache.ragged import RaggedCache
from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.model import attention
from restorekv.model.identity import fingerprint_model
from restorekv.model.prefill import prefill
from restorekv.pipeline import compress
from restorekv.restore import adapter_file
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.use_warnings import warn_of_other_use
from restorekv.seal import seal_record
from tests.helpers import decoders
from tests.helpers.models import SHAPE, VOCABULARY, build_model

FILES = ("adapter_config.json", "adapter_model.safetensors", "restore_embeddings.safetensors")


def ids(count, seed=0):
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def trained(model, n=4, seed=0):
    """Return an adapter with random LoRA weights, so that its LoRA has an effect."""
    adapter = RestoreAdapter.create(model, n, rank=2, alpha=4, seed=seed)
    with torch.no_grad():
        for parameter in adapter.lora:
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    return adapter


def is_plain(model):
    return not any("lora" in name for name, _ in model.named_modules()) and not hasattr(
        model, "peft_config"
    )


def restored(model, adapter, context=30):
    full = prefill(model, ids(context))
    adapter.run_restore_pass(full)
    return full


def test_zero_lora_equals_a_plain_forward_of_the_embeddings(tiny_model):
    adapter = RestoreAdapter.create(tiny_model, 5)
    full = restored(tiny_model, adapter)
    whole = torch.cat([tiny_model.get_input_embeddings()(ids(30)), adapter.embeddings[None]], 1)
    expected = tiny_model.model(inputs_embeds=whole, use_cache=True).past_key_values
    assert full.get_seq_length() == 35
    for ours, theirs in zip(full.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("token", [-1, 10**9])
def test_a_fixed_token_that_the_model_lacks_is_refused(tiny_model, token):
    with pytest.raises(AdapterError, match=f"fixed token {token} is not one of the model's"):
        RestoreAdapter.create(tiny_model, 3, fixed=token)


def test_an_adapter_with_nothing_to_train_is_refused(tiny_model):
    with pytest.raises(AdapterError, match="leave nothing to train"):
        RestoreAdapter.create(tiny_model, 3, fixed=0, targets=())
    for wrong in ({"n": 0}, {"rank": 0}, {"n": 2.5}, {"rank": "8"}):
        with pytest.raises(AdapterError, match="at least one token and rank 1"):
            RestoreAdapter.create(tiny_model, **wrong)


@pytest.mark.parametrize("alpha", [-1.0, 1e7, math.inf, math.nan])
def test_an_alpha_that_no_file_may_have_is_refused(tiny_model, alpha):
    """An adapter with such an alpha could be trained, but not loaded again."""
    with pytest.raises(AdapterError, match=r"alpha must be from 0 to 1,000,000, not"):
        RestoreAdapter.create(tiny_model, 3, alpha=alpha)


def test_a_target_that_no_restore_pass_runs_is_refused(tiny_model):
    """The pass ends before the LM head, so a LoRA there would never get a gradient."""
    with pytest.raises(AdapterError, match="does not run 'lm_head'; name linear layers before"):
        RestoreAdapter.create(tiny_model, 3, targets=("q_proj", "lm_head"))


def test_targets_are_names_of_linear_layers(tiny_model):
    one = RestoreAdapter.create(tiny_model, 3, targets="q_proj")
    listed = RestoreAdapter.create(tiny_model, 3, targets=["q_proj"])
    assert one.lora_parameters.keys() == listed.lora_parameters.keys()
    with pytest.raises(AdapterError, match="has no linear layer 'embed_tokens' for LoRA"):
        RestoreAdapter.create(tiny_model, 3, targets=["embed_tokens", "q_proj"])


def test_numbers_of_tokens_and_dtypes_of_other_types_are_refused(tiny_model, tmp_path):
    adapter = RestoreAdapter.create(tiny_model, 3)
    with pytest.raises(AdapterError, match=r"from 1 to 3, .*, not 1\.5"):
        adapter.truncate(1.5)
    with pytest.raises(AdapterError, match="cannot be extended to '4'; pass 3 or more"):
        adapter.extend("4")
    for dtype in ("float16", torch.int8):  # the latter would make all weights 0
        with pytest.raises(AdapterError, match=r"LoRA weights cannot be saved as .*; pass torch"):
            adapter.save_pretrained(tmp_path / "adapter", dtype=dtype)


def test_new_restore_tokens_are_tokens_as_the_model_reads_them(tiny_model):
    torch.manual_seed(0)
    # Scales what it looks up.
    gemma = GemmaForCausalLM(GemmaConfig(**SHAPE, head_dim=16)).eval().requires_grad_(False)
    attention.install_attention(gemma)
    for model in (tiny_model, gemma):
        full = restored(model, RestoreAdapter.create(model, 3, fixed=7))
        expected = model(torch.cat([ids(30), torch.full((1, 3), 7)], 1)).past_key_values
        for ours, theirs in zip(full.layers, expected.layers, strict=True):
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-5)
    table, new = (
        tiny_model.get_input_embeddings().weight,
        RestoreAdapter.create(tiny_model, 4).embeddings,
    )
    assert new.requires_grad and new.is_leaf
    assert (new[:, None] == table).all(-1).any(-1).all(), "bit for bit where nothing is scaled"


def test_lora_changes_the_restore_cache_and_nothing_else(tiny_model):
    plain, changed = RestoreAdapter.create(tiny_model, 4), trained(tiny_model)
    first, second = restored(tiny_model, plain), restored(tiny_model, changed)
    for a, b in zip(first.layers, second.layers, strict=True):
        assert a.keys[:, :, :30].equal(b.keys[:, :, :30])
        assert not torch.allclose(a.keys[:, :, 30:], b.keys[:, :, 30:])


def test_gradients_arrive_after_lora_is_off(tiny_model):
    adapter = trained(tiny_model)
    full = restored(tiny_model, adapter)
    assert is_plain(tiny_model)
    keep = torch.zeros(3, 2, 30, dtype=torch.bool)
    keep[..., ::7] = True
    student = tiny_model(ids(6, 1), past_key_values=RaggedCache.from_kept_pairs(full, keep)).logits
    student.square().mean().backward()
    missing = {
        name
        for name, weight in adapter.lora_parameters.items()
        if weight.grad is None or not weight.grad.any()
    }
    last = f"model.layers.{tiny_model.config.num_hidden_layers - 1}"
    blocked = (
        "self_attn.q_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    assert missing == {
        f"{last}.{target}.{part}.weight" for target in blocked for part in ("lora_A", "lora_B")
    }
    assert adapter.embeddings.grad.any()
    assert all(parameter.grad is None for parameter in tiny_model.parameters())


def test_parameters_are_embeddings_and_lora_alone(tiny_model):
    adapter = RestoreAdapter.create(tiny_model, 4, rank=2)
    names = [name for name, _ in adapter.named_parameters()]
    assert len(names) == 1 + 2 * 7 * 3 and all(p.requires_grad for p in adapter.parameters())
    assert all(p.dtype == torch.float32 for p in adapter.parameters())
    assert not any(p.requires_grad for p in tiny_model.parameters())


def test_create_leaves_the_models_own_flags(tiny_model):
    tiny_model.requires_grad_(True)
    RestoreAdapter.create(tiny_model, 2)
    assert all(p.requires_grad for p in tiny_model.parameters())


def test_backbone_is_bit_equal_throughout(tiny_model):
    before, state = (
        tiny_model(ids(20)).logits,
        {k: v.clone() for k, v in tiny_model.state_dict().items()},
    )
    adapter = trained(tiny_model)
    assert is_plain(tiny_model) and tiny_model(ids(20)).logits.equal(before)
    restored(tiny_model, adapter)
    assert is_plain(tiny_model) and tiny_model(ids(20)).logits.equal(before)
    assert not is_plain(adapter.adapted_model) and not torch.allclose(
        adapter.adapted_model(ids(20)).logits, before
    )
    assert tiny_model(ids(20)).logits.equal(before)
    after = tiny_model.state_dict()
    assert after.keys() == state.keys() and all(
        after[key].equal(value) for key, value in state.items()
    )


def test_lora_is_off_even_when_the_pass_raises(tiny_model):
    before, adapter = tiny_model(ids(20)).logits, trained(tiny_model)
    for error in (RuntimeError, KeyboardInterrupt):
        full = prefill(tiny_model, ids(30))

        def fail(*_, error=error):
            raise error

        hook = tiny_model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(error):
            adapter.run_restore_pass(full)
        hook.remove()
        assert is_plain(tiny_model) and tiny_model(ids(20)).logits.equal(before)


def test_adapters_of_one_model_do_not_disturb_each_other(tiny_model):
    alone = restored(tiny_model, trained(tiny_model))
    first, second = trained(tiny_model), trained(tiny_model, seed=1)
    between = restored(tiny_model, second)
    again = restored(tiny_model, first)
    for a, b, c in zip(alone.layers, again.layers, between.layers, strict=True):
        assert a.keys.equal(b.keys) and not a.keys.equal(c.keys)


def test_low_precision_backbone_keeps_float32_lora():
    model = build_model("qwen3").bfloat16()
    adapter = trained(model)
    assert all(p.dtype == torch.float32 for p in adapter.parameters())
    full = restored(model, adapter)
    assert full.layers[-1].keys.dtype == torch.bfloat16
    full.layers[-1].keys.float().sum().backward()
    assert adapter.embeddings.grad.dtype == torch.float32


def test_seed_decides_everything(tiny_model):
    state = torch.get_rng_state()
    one, same, other = (RestoreAdapter.create(tiny_model, 4, seed=seed) for seed in (0, 0, 1))
    assert torch.get_rng_state().equal(state)
    assert one.identity() == same.identity() != other.identity()


@pytest.mark.parametrize("act", ["create", "load", "truncate", "extend"])
def test_an_adapter_leaves_the_random_state_of_the_program(tmp_path, act):
    """PEFT draws new weights for every layer; the caller's next draw must not depend on that."""
    model = build_model("llama")
    adapter = RestoreAdapter.create(model, 4, rank=2)
    adapter.save_pretrained(tmp_path)
    acts = {
        "create": partial(RestoreAdapter.create, model, 4),
        "load": partial(RestoreAdapter.from_pretrained, model, tmp_path),
        "truncate": partial(adapter.truncate, 2),
        "extend": partial(adapter.extend, 6),
    }
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with warnings.catch_warnings(action="ignore", category=RestoreKVWarning):
        acts[act]()
    assert torch.equal(torch.get_rng_state(), before)


def test_trainable_state_round_trip(tiny_model):
    first, second = trained(tiny_model), trained(tiny_model, seed=1)
    second.load_trainable_state(first.trainable_state())
    assert second.identity() == first.identity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load(tiny_model, tmp_path, dtype):
    adapter = trained(tiny_model)
    adapter.record_training(evictor="kvzip", prefix_policy="free", ratio_range=(0.025, 0.25))
    adapter.save_pretrained(tmp_path / "deep" / "adapter", dtype=dtype)
    loaded = RestoreAdapter.from_pretrained(
        tiny_model, tmp_path / "deep" / "adapter", evictor="kvzip"
    )
    card = json.loads((tmp_path / "deep" / "adapter" / "restorekv.json").read_text())
    assert card["dtype"] == str(dtype).removeprefix("torch.") and card["ratio_range"] == [
        0.025,
        0.25,
    ]
    assert (loaded.card.evictor, loaded.card.ratio_range) == ("kvzip", (0.025, 0.25))
    assert (
        loaded.embeddings.equal(adapter.embeddings)
        and loaded.lora_parameters.keys() == adapter.lora_parameters.keys()
    )
    for name, weight in loaded.lora_parameters.items():
        assert weight.dtype == torch.float32 and weight.equal(
            adapter.lora_parameters[name].to(dtype).float()
        )
    written = {path.name for path in (tmp_path / "deep" / "adapter").iterdir()}
    assert written == {*FILES, "restorekv.json", "README.md"}


def test_saving_over_an_older_adapter(tiny_model, tmp_path):
    trained(tiny_model).save_pretrained(tmp_path)
    newer = trained(tiny_model, seed=1)
    newer.save_pretrained(tmp_path)
    assert RestoreAdapter.from_pretrained(tiny_model, tmp_path).identity() == newer.identity()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such permissions")
def test_who_may_read_the_folder_may_read_the_weights(tiny_model, tmp_path):
    """A service of another user reads adapters; safetensors' own files are for their owner only."""
    trained(tiny_model).save_pretrained(tmp_path / "adapter")
    plain = tmp_path / "plain"
    plain.touch()
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}
    assert modes == dict.fromkeys(modes, plain.stat().st_mode)


def test_peft_reads_what_we_write(tmp_path):
    model = build_model("llama")
    adapter = trained(model)
    adapter.save_pretrained(tmp_path)
    expected = adapter.adapted_model(ids(12)).logits
    torch.testing.assert_close(
        PeftModel.from_pretrained(build_model("llama"), tmp_path)(ids(12)).logits, expected
    )


def test_we_read_what_peft_writes(tmp_path):
    wrapped = get_peft_model(
        build_model("qwen3"), LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_alpha=5)
    )
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    wrapped.save_pretrained(tmp_path)
    save_file(
        {"restore_embeddings": torch.randn(6, 32)}, tmp_path / "restore_embeddings.safetensors"
    )
    model = build_model("qwen3")
    adapter = RestoreAdapter.from_pretrained(model, tmp_path, evictor="kvzip")
    assert adapter.restore_tokens == 6
    torch.testing.assert_close(adapter.adapted_model(ids(12)).logits, wrapped(ids(12)).logits)


def test_another_evictor_warns(tiny_model, tmp_path):
    adapter = trained(tiny_model)
    adapter.record_training(evictor="kvzip")
    adapter.save_pretrained(tmp_path)
    with pytest.warns(RestoreKVWarning, match=r"trained with the evictor kvzip, not kvzip\+"):
        RestoreAdapter.from_pretrained(tiny_model, tmp_path, evictor="kvzip+")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RestoreAdapter.from_pretrained(tiny_model, tmp_path, evictor="kvzip")


def test_training_on_leaves_the_results_of_the_first_adapter_behind(tiny_model, tmp_path):
    adapter = trained(tiny_model)
    adapter.card = replace(adapter.card, source="someone/else")
    adapter.record_training(evictor="kvzip")
    adapter.record_results([{"benchmark": "ruler", "ratio": 0.1}], helps_up_to=0.3)
    with torch.no_grad():
        adapter.embeddings.add_(1.0)
    adapter.record_training(evictor="snapkv")
    adapter.save_pretrained(tmp_path)
    card = RestoreAdapter.from_pretrained(tiny_model, tmp_path).card
    assert (card.evictor, card.results, card.helps_up_to, card.source) == ("snapkv", *[None] * 3)


def test_another_text_between_document_and_question_warns(tiny_model, tmp_path):
    adapter = trained(tiny_model)
    for recorded, used, warned in (
        ("\n\n", "", True),
        ("", "\n", True),
        ("\n\n", "\n\n", False),
        (None, "\n", False),
    ):
        adapter.record_training(evictor="kvzip", separator=recorded)
        adapter.save_pretrained(tmp_path)
        loaded = RestoreAdapter.from_pretrained(tiny_model, tmp_path)
        assert loaded.card.separator == recorded
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn_of_other_use(loaded.card, "kvzip", separator=used)
            warn_of_other_use(loaded.card, "kvzip")
        messages = [str(each.message) for each in caught]
        assert len(messages) == warned and all(
            repr(recorded) in text and repr(used) in text for text in messages
        )


OTHERS = {
    "weights": {"seed": 1},
    "width": {"hidden_size": 48},
    "depth": {"num_hidden_layers": 2},
    "rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
}


@pytest.mark.parametrize("difference", sorted(OTHERS))
def test_another_model_is_refused(tmp_path, difference):
    trained(build_model("qwen3")).save_pretrained(tmp_path)
    other = build_model("qwen3", **OTHERS[difference])
    with pytest.raises(AdapterError):
        RestoreAdapter.from_pretrained(other, tmp_path)
    assert is_plain(other)


def test_published_adapters_are_checked_by_shape(tmp_path):
    trained(build_model("qwen3")).save_pretrained(tmp_path)
    (tmp_path / "restorekv.json").unlink()
    RestoreAdapter.from_pretrained(build_model("qwen3", seed=1), tmp_path)
    for other in (
        build_model("qwen3", num_hidden_layers=2),
        build_model("qwen3", intermediate_size=40),
    ):
        with pytest.raises(AdapterError, match=r"fit this model|for another model"):
            RestoreAdapter.from_pretrained(other, tmp_path)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-9])


def pickled(path):
    path.write_bytes(pickle.dumps({"restore_embeddings": [1.0]}))


def not_finite(path):
    save_file({name: tensor * float("nan") for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("card", [True, False])
@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("harm", [shutil.os.remove, cut, pickled])
def test_damaged_files_are_refused(tmp_path, file, harm, card):
    model = build_model("llama")
    trained(model).save_pretrained(tmp_path)
    if not card:
        (tmp_path / "restorekv.json").unlink()
    harm(tmp_path / file)
    with pytest.raises(AdapterError) as caught:
        RestoreAdapter.from_pretrained(model, tmp_path)
    assert file in str(caught.value) and "\n" not in str(caught.value)
    assert is_plain(model)


def test_a_flipped_bit_is_found(tiny_model, tmp_path):
    trained(tiny_model).save_pretrained(tmp_path)
    flip(tmp_path / FILES[1])
    with pytest.raises(AdapterError, match="not the file that was saved"):
        RestoreAdapter.from_pretrained(tiny_model, tmp_path)


def test_other_nonsense_is_refused(tiny_model, tmp_path):
    good = tmp_path / "good"
    trained(tiny_model).save_pretrained(good)
    (good / "restorekv.json").unlink()

    def refused(match, change):
        folder = shutil.copytree(good, tmp_path / "bad")
        change(folder)
        with pytest.raises(AdapterError, match=match):
            RestoreAdapter.from_pretrained(tiny_model, folder)
        shutil.rmtree(folder)

    embeddings = FILES[2]
    refused("not finite", lambda folder: not_finite(folder / embeddings))
    refused(
        "no tensor", lambda folder: save_file({"other": torch.ones(2, 32)}, folder / embeddings)
    )
    refused(
        "no tensor",
        lambda folder: save_file({"restore_embeddings": torch.ones(32)}, folder / embeddings),
    )
    refused(
        "width",
        lambda folder: save_file({"restore_embeddings": torch.ones(2, 31)}, folder / embeddings),
    )
    refused("not LoRA's", lambda folder: save_file({"strange": torch.ones(2)}, folder / FILES[1]))
    refused("damaged", lambda folder: (folder / "restorekv.json").write_text("{}"))
    refused("IA3", lambda folder: (folder / FILES[0]).write_text(json.dumps({"peft_type": "IA3"})))
    with pytest.raises(AdapterError, match="nor can it be fetched"):
        RestoreAdapter.from_pretrained(tiny_model, tmp_path / "nowhere")
    with pytest.raises(AdapterError):
        RestoreAdapter.create(tiny_model, 0)
    with pytest.raises(AdapterError):
        RestoreAdapter.create(tiny_model, 2, targets=("nothing_proj",))
    assert is_plain(tiny_model)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "megatron_config"),
        ({"rank_pattern": {"(a+)+$": 2}}, "not the name of a layer"),
        ({"r": 10**9}, "rank"),
        ({"r": True}, "wrong type"),
        ({"lora_alpha": 1e300}, "out of range"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"task_type": "OTHER"}, "damaged"),
        ({"bias": "all"}, "bias"),
    ],
)
def test_configs_of_strangers_are_refused(tmp_path, entry, words):
    model = build_model("llama")
    trained(model).save_pretrained(tmp_path)
    (tmp_path / "restorekv.json").unlink()
    config = json.loads((tmp_path / FILES[0]).read_text())
    (tmp_path / FILES[0]).write_text(json.dumps(config | entry))
    with pytest.raises(AdapterError, match=words):
        RestoreAdapter.from_pretrained(model, tmp_path)


def test_layers_chosen_by_a_pattern_are_those_with_tensors(tmp_path):
    model = build_model("llama")
    adapter = trained(model)
    adapter.save_pretrained(tmp_path)
    (tmp_path / "restorekv.json").unlink()
    config = json.loads((tmp_path / FILES[0]).read_text())
    (tmp_path / FILES[0]).write_text(json.dumps(config | {"target_modules": "(a+)+$"}))
    again = RestoreAdapter.from_pretrained(model, tmp_path)
    assert again.to_stored().weights_hash() == adapter.to_stored().weights_hash()


def test_a_record_that_its_tensors_contradict_is_refused(tmp_path):
    model = build_model("llama")
    trained(model).save_pretrained(tmp_path)
    card = json.loads((tmp_path / "restorekv.json").read_text())
    for entry in (
        {"restore_tokens": 7},
        {"dtype": "float16"},
        {"ratio_range": [0.5, 0.1]},
        {"helps_up_to": 1.5},
        {"helps_up_to": "0.3"},
        {"rope": []},
        {"sha256": {}},
    ):
        (tmp_path / "restorekv.json").write_text(json.dumps(seal_record(card | entry)))
        with pytest.raises(AdapterError):
            RestoreAdapter.from_pretrained(model, tmp_path)


@pytest.mark.parametrize("moved", range(6))
def test_a_writer_that_was_killed_leaves_the_old_or_the_new_adapter(tmp_path, moved, monkeypatch):
    model = build_model("llama")
    old, new = trained(model, seed=1), trained(model, seed=2)
    old.save_pretrained(tmp_path)
    replace, calls = os.replace, []

    def dying(source, target):
        calls.append(source)
        if len(calls) > moved:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(adapter_file.os, "replace", dying)
    with contextlib.suppress(KeyboardInterrupt):
        new.save_pretrained(tmp_path)
    monkeypatch.undo()
    assert hash_of(RestoreAdapter.from_pretrained(model, tmp_path)) == hash_of(new)
    old.save_pretrained(tmp_path)
    assert hash_of(RestoreAdapter.from_pretrained(model, tmp_path)) == hash_of(old)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(adapter_file.FILES)


@pytest.mark.parametrize("file", adapter_file.FILES[:4])
@pytest.mark.parametrize("pending_before", [True, False])
def test_a_reader_gets_one_adapter_while_another_process_replaces_it(
    tmp_path, file, pending_before, monkeypatch
):
    """The files move to their places just before the reader opens one of them."""
    model = build_model("llama")
    folder = tmp_path / "adapter"
    old, new = trained(model, seed=1), trained(model, seed=2)
    old.save_pretrained(folder)
    new.save_pretrained(tmp_path / "fresh")
    if pending_before:
        (tmp_path / "fresh").rename(folder / adapter_file.PENDING)
    locate, waiting = adapter_file.locate_file, [True]

    def locate_and_wait(place, name):
        found = locate(place, name)
        if name == file and waiting:
            waiting.clear()
            if not pending_before:
                (tmp_path / "fresh").rename(folder / adapter_file.PENDING)
            adapter_file.move_into_place(folder)
        return found

    monkeypatch.setattr(adapter_file, "locate_file", locate_and_wait)
    read = RestoreAdapter.from_pretrained(model, folder)
    assert not waiting and hash_of(read) == hash_of(new)
    assert read.card.local  # told by the record alone


def hash_of(adapter):
    return adapter.to_stored().weights_hash()


def test_a_model_with_foreign_adapters_is_refused():
    model = build_model("llama")
    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(AdapterError, match="PEFT adapters already"):
        RestoreAdapter.create(model, 2)


def hook_all(model):
    """Add hooks to all modules, as accelerate does when it spreads a model over devices."""
    for name, module in model.named_modules():
        if name:
            add_hook_to_module(module, ModelHook())


def unhook_all(model):
    hook_all(model)
    remove_hook_from_submodules(model)


def patch_layers(model):
    """Replace methods of a model's instances, as Liger does."""
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(type(layer.mlp).forward, layer.mlp)


def compile_layers(model):
    for layer in model.model.layers:
        layer.compile(backend="eager")


def compile_forward(model):
    model.model.forward = torch.compile(model.model.forward, backend="eager")


def wrap_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")


@pytest.mark.parametrize(
    "change",
    [hook_all, unhook_all, patch_layers, compile_layers, compile_forward, wrap_layers],
    ids=lambda change: change.__name__,
)
def test_lora_runs_in_modules_whose_functions_were_replaced(change):
    """Such a function is bound to the model's own module, which has layers without LoRA."""
    plain, changed = build_model("llama"), build_model("llama")
    change(changed)
    expected, found = (restored(model, trained(model)) for model in (plain, changed))
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("compile_all", [False, True])
def test_an_adapter_fits_a_compiled_model_and_the_plain_one(tmp_path, compile_all):
    """torch.compile wraps modules, which adds a part to the names of everything inside."""
    plain, compiled = build_model("llama"), build_model("llama")
    if compile_all:
        compiled = torch.compile(compiled, backend="eager")
    else:
        wrap_layers(compiled)
    assert fingerprint_model(compiled) == fingerprint_model(plain)
    for place, (model, other) in enumerate([(plain, compiled), (compiled, plain)]):
        adapter = trained(model)
        adapter.save_pretrained(tmp_path / str(place))
        with warnings.catch_warnings():
            warnings.simplefilter("error", RestoreKVWarning)
            again = RestoreAdapter.from_pretrained(other, tmp_path / str(place))
        assert hash_of(again) == hash_of(adapter)


def test_a_function_that_knows_only_the_model_s_own_module_is_refused():
    model = build_model("llama")
    layer = model.model.layers[1]
    own = layer.forward
    layer.forward = partial(lambda *args, **options: own(*args, **options))
    with pytest.raises(AdapterError, match=r"the forward pass of model\.layers\.1 by a function"):
        RestoreAdapter.create(model, 2)
    # Nothing of the restore pass is below these.
    del layer.forward
    for module in (model, layer.input_layernorm, layer.mlp.up_proj):
        module.forward = partial(module.forward)
    RestoreAdapter.create(model, 2)


def test_a_model_that_got_foreign_adapters_later_is_refused():
    """The restore pass would run without them."""
    model = build_model("llama")
    adapter = trained(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(AdapterError, match="PEFT adapters already"):
        restored(model, adapter)
    adapted.unload()
    restored(model, adapter)


def replace_linear(model):
    """Put a new module in the place of one, as libraries that quantize a loaded model do."""
    own = model.model.layers[1].self_attn.v_proj
    other = torch.nn.Linear(own.in_features, own.out_features, bias=False)
    other.weight = own.weight
    model.model.layers[1].self_attn.v_proj = torch.nn.Sequential(
        other, torch.nn.Hardtanh(-0.1, 0.1)
    )


def drop_layer(model):
    del model.model.layers[1]


@pytest.mark.parametrize("change", [replace_linear, drop_layer])
def test_a_model_with_modules_replaced_later_is_refused(change):
    """The restore pass would run the old ones."""
    model = build_model("llama")
    adapter = trained(model)
    change(model)
    with pytest.raises(AdapterError, match=r"Modules of the model were replaced .*; load the"):
        restored(model, adapter)


def test_modules_that_torch_compile_wraps_later_are_no_others():
    model = build_model("llama")
    adapter = trained(model)
    expected = restored(model, adapter)
    wrap_layers(model)
    model.resize_token_embeddings(VOCABULARY + 8)
    found = restored(model, adapter)
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-4, atol=1e-5)


def test_a_folder_is_loaded_again_for_other_modules_with_the_same_weights(tmp_path, tiny_tokenizer):
    model = build_model("llama")
    trained(model).save_pretrained(tmp_path)
    make = partial(compress, tokenizer=tiny_tokenizer, context="the red house " * 20, ratio=0.5)
    make = partial(make, evictor="knorm", adapter=tmp_path)
    before = make(model)
    model.model.layers[1].mlp = copy.copy(model.model.layers[1].mlp)
    assert make(model).digest == before.digest


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_another_attention_set_since_changes_no_restore_pass(implementation):
    """The pass uses our attention in any case, because no other can read an evicted cache."""
    model = build_model("llama")
    adapter = trained(model)
    caches = []
    for _ in range(2):
        cache = RaggedCache.from_full_cache(prefill(model, ids(30)))
        model.set_attn_implementation(implementation if caches else attention.NAME)
        adapter.run_restore_pass(cache)
        caches.append(cache)
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert one.keys.equal(other.keys) and one.values.equal(other.values)


def test_targets_are_the_linear_layers_of_these_names_and_no_experts(tmp_path):
    """PEFT would put LoRA on the experts instead, which no file of an adapter holds."""
    model = decoders.build("glm4_moe")
    kind = model.config.model_type
    adapter = RestoreAdapter.create(model, 2, rank=3, targets=("q_proj", "gate_proj", "up_proj"))
    linear = {
        path
        for path, module in model.named_modules()
        if path.endswith((".q_proj", ".gate_proj", ".up_proj"))
        and isinstance(module, torch.nn.Linear)
    }
    found = {name.rsplit(".", 2)[0] for name in adapter.lora_parameters}
    assert found == linear
    assert any(".shared_experts." in path for path in found)
    # One rank everywhere, and the model's own config as it was.
    ranks = {value.shape[0] for name, value in adapter.lora_parameters.items() if "lora_A" in name}
    assert ranks == {3}
    assert model.config.model_type == adapter.adapted_model.config.model_type == kind
    adapter.save_pretrained(tmp_path)
    again = RestoreAdapter.from_pretrained(model, tmp_path)
    assert hash_of(again) == hash_of(adapter)
    # Of this model's experts, no layer has the name.
    model = decoders.build("qwen3_moe")
    with pytest.raises(AdapterError, match=r"'gate_proj' for LoRA; .* \(--targets in the shell\)"):
        RestoreAdapter.create(model, 2, targets=("q_proj", "gate_proj", "up_proj"))


def test_saving_into_a_file_is_refused(tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AdapterError, match="Cannot write"):
        trained(tiny_model).save_pretrained(tmp_path / "file")


def test_the_folder_of_a_run_leads_to_its_adapter(tmp_path):
    model = build_model("llama")
    RestoreAdapter.create(model, 2, rank=1).save_pretrained(tmp_path / "run" / "adapter")
    with pytest.raises(AdapterError, match=r"folder of a training run; pass .*run/adapter\."):
        RestoreAdapter.from_pretrained(model, tmp_path / "run")
    RestoreAdapter.from_pretrained(model, tmp_path / "run" / "adapter")
