"""A model's identity: computed from the weights as they are now, with one transfer, and seldom."""

import copy
from unittest.mock import patch

import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    LoraConfig,
    OFTConfig,
    VeraConfig,
    get_peft_model,
    inject_adapter_in_model,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from restorekv import CompressedContext, compress
from restorekv.errors import AdapterError, CacheFileError, RestoreKVWarning
from restorekv.model import identity
from restorekv.model.identity import (
    describe_weights,
    fingerprint_model,
    identify_model,
    remember_identity,
)
from restorekv.model.load import load_model
from restorekv.model.names import get_model_name
from restorekv.model.prompt import hash_template
from restorekv.model.rope import get_rope_settings
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.lora import NAME
from tests.helpers import decoders
from tests.helpers.models import build_model

TEXT = "The house is red. " * 40


def add_in_place(model):
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)


def add_to_data(model):
    """As merging a LoRA adapter does; PyTorch counts no new version of the weight."""
    version = model.lm_head.weight._version
    model.lm_head.weight.data += 1.0
    assert model.lm_head.weight._version == version


def replace_weight(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1.0)


def load_state(model):
    model.load_state_dict({name: value + 1.0 for name, value in model.state_dict().items()})


def take_a_training_step(model):
    model.requires_grad_(True)
    model(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def merge_lora(model):
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(1.0)
    adapted.merge_adapter()


def add_active_lora(model, name="mine"):
    """An adapter of the user's own, which is not merged."""
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"]), model, name)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(1.0)


def add_active_lora_of_our_name(model):
    """PEFT runs it in every pass; a restore adapter's LoRA is in a twin of the model alone."""
    add_active_lora(model, NAME)


def change_rope(model):
    model.config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}


CHANGES = [
    add_in_place,
    add_to_data,
    replace_weight,
    load_state,
    take_a_training_step,
    merge_lora,
    add_active_lora,
    add_active_lora_of_our_name,
    change_rope,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_noticed_by_caches_and_adapters(change, tiny_tokenizer, tmp_path):
    model = build_model("qwen3")
    RestoreAdapter.create(model, 2).save_pretrained(tmp_path / "adapter")
    context = compress(model, tiny_tokenizer, TEXT, ratio=0.5, adapter=tmp_path / "adapter")
    context.save(tmp_path / "cache.rkv")
    before = identify_model(model), describe_weights(model)
    change(model)
    assert identify_model(model).fingerprint != before[0].fingerprint
    with pytest.raises(CacheFileError, match=r"a different model|RoPE"):
        CompressedContext.load(tmp_path / "cache.rkv", model, tiny_tokenizer)
    # An adapter is refused for other weights; close ones get a warning.
    with pytest.raises(
        (AdapterError, RestoreKVWarning), match=r"different model|other weights|RoPE|PEFT"
    ):
        compress(model, tiny_tokenizer, TEXT, ratio=0.5, adapter=tmp_path / "adapter")


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        ("granite", {"embedding_multiplier": 1.0}, {"embedding_multiplier": 12.0}),
        ("olmo", {"clip_qkv": 1.0}, {"clip_qkv": None}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}, {"no_rope_layers": [1, 0, 1, 0]}),
    ],
)
def test_settings_that_change_every_pass_are_noticed(kind, one, other):
    """The weights and their shapes are the same."""
    made = {fingerprint_model(decoders.build(kind, **settings)) for settings in (one, other)}
    assert len(made) == 2


@pytest.mark.skipif(not decoders.HAS_LAYER_CONFIGS, reason="the class is not known")
def test_scales_that_a_checkpoint_has_beside_its_weights_are_noticed():
    """Gemma 4's layers multiply their output by a number that is no parameter."""
    model = decoders.build("gemma4_text")
    before = fingerprint_model(model)
    model.model.layers[1].layer_scalar.fill_(2.0)
    assert fingerprint_model(model) != before


def test_a_rope_that_a_cast_rounded_is_noticed(tiny_tokenizer, tmp_path):
    """The weights are the same bits, and the keys of a text are rotated otherwise."""
    build_model("llama").save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    cast = AutoModelForCausalLM.from_pretrained(tmp_path / "model").to(torch.bfloat16)
    assert all(map(torch.equal, loaded.parameters(), cast.parameters()))
    ids = torch.arange(3, 300)[None]
    # Keys of the first layer, by transformers.
    of_loaded, of_cast = (
        model(ids).past_key_values.layers[0].keys.float() for model in (loaded, cast)
    )
    assert not torch.allclose(of_loaded, of_cast, atol=0.1)
    compress(loaded, tiny_tokenizer, TEXT, ratio=1).save(tmp_path / "doc.rkv")
    CompressedContext.load(tmp_path / "doc.rkv", loaded, tiny_tokenizer)
    with pytest.raises(CacheFileError, match=r"RoPE .*rounded_to.* rounds its RoPE"):
        CompressedContext.load(tmp_path / "doc.rkv", cast, tiny_tokenizer)
    compress(cast, tiny_tokenizer, TEXT, ratio=1).save(tmp_path / "doc.rkv")
    with pytest.raises(CacheFileError, match=r"RoPE .*rounded_to.* rounds its RoPE"):
        CompressedContext.load(tmp_path / "doc.rkv", loaded, tiny_tokenizer)


def test_a_rope_that_was_rounded_and_cast_back_is_noticed(tiny_tokenizer, tmp_path):
    """Nothing is of 16 bits any more, and the frequencies still are what 16 bits left of them."""
    # Weights that 16 bits hold, so that they survive the way there and back.
    build_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    plain, back = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
        for _ in range(2)
    )
    back = back.to(torch.bfloat16).float()
    assert all(map(torch.equal, plain.parameters(), back.parameters()))
    compress(plain, tiny_tokenizer, TEXT, ratio=1).save(tmp_path / "doc.rkv")
    CompressedContext.load(tmp_path / "doc.rkv", plain, tiny_tokenizer)
    with pytest.raises(CacheFileError, match=r"RoPE .*rounded_to.* rounds its RoPE"):
        CompressedContext.load(tmp_path / "doc.rkv", back, tiny_tokenizer)


@pytest.mark.skipif("kolibri1" not in CONFIG_MAPPING, reason="transformers 5.2 has no Kolibri")
def test_a_config_without_a_size_of_its_feed_forward_layers_has_an_identity():
    """A model of experts alone may name theirs instead."""
    model = decoders.build("kolibri1")
    assert not hasattr(model.config, "intermediate_size")
    found = identify_model(model)
    assert found.fingerprint == fingerprint_model(copy.deepcopy(model))
    assert found.weights["architecture"]["intermediate_size"] is None


def test_the_scaling_of_an_active_lora_is_noticed():
    model = build_model("qwen3")
    add_active_lora(model)
    before = fingerprint_model(model)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.scale_layer(0.1)
    assert layers and fingerprint_model(model) != before


@pytest.mark.parametrize(
    "config",
    [
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
        LoHaConfig(r=2, target_modules=["k_proj"]),
        VeraConfig(r=2, target_modules=["k_proj"]),
        OFTConfig(oft_block_size=4, target_modules=["k_proj"]),
        LoraConfig(r=2, target_modules=["k_proj"]),
    ],
    ids=lambda config: type(config).__name__,
)
def test_the_active_adapter_of_every_kind_is_noticed(config):
    """A cache of one of them is wrong for the others: each changes every key."""
    model = build_model("qwen3")
    adapted = get_peft_model(model, config)
    adapted.add_adapter("other", config)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    first = fingerprint_model(model)
    assert fingerprint_model(adapted) == first  # PEFT's own model computes the same
    with adapted.disable_adapter():
        off = fingerprint_model(model)
        assert fingerprint_model(adapted) == off
    assert fingerprint_model(model) == first
    adapted.set_adapter("other")
    assert len({first, off, fingerprint_model(model)}) == 3
    # As of the model without adapters.
    with adapted.disable_adapter():
        assert fingerprint_model(model) == off == fingerprint_model(adapted.unload())


def test_a_changed_template_is_noticed(tiny_tokenizer):
    model = build_model("qwen3")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    before = identify_model(model, tokenizer)
    tokenizer.chat_template = "Attention! " + tokenizer.chat_template
    after = identify_model(model, tokenizer)
    assert before.fingerprint == after.fingerprint and before.template != after.template
    assert identify_model(model).template is None


def test_a_base_is_the_same_as_a_whole_number_and_as_a_float():
    fingerprints = set()
    for base in (500, 500.0):
        rope = {"rope_type": "default", "rope_theta": base}
        model = build_model("qwen3", rope_parameters=rope)
        # A config may hold what its file says.
        model.config.rope_parameters = rope
        fingerprints.add(fingerprint_model(model))
    assert len(fingerprints) == 1


def test_the_identity_says_what_its_parts_say(tiny_tokenizer):
    model = build_model("qwen3")
    found = identify_model(model, tiny_tokenizer)
    assert found.name == get_model_name(model)
    assert found.fingerprint == fingerprint_model(model)
    assert found.rope == get_rope_settings(model.config)
    assert found.template == hash_template(tiny_tokenizer)


def test_these_bits_are_in_files_made_before():
    """A fingerprint and a sketch of weights that any computer makes."""
    model = build_model("qwen3")
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(torch.arange(weight.numel()).view(weight.shape) % (number + 7) / 8)
    assert fingerprint_model(model) == "9df011b8ea43b8db"
    assert describe_weights(model)["sketch"][:32] == "AABgQOA/AABgQOA/AABgQOA/AD5oQPA/"


def test_sharded_weights_keep_the_identity_that_was_remembered():
    model = build_model("qwen3")
    known = fingerprint_model(model), describe_weights(model)
    remember_identity(model)
    add_in_place(model)
    assert (fingerprint_model(model), describe_weights(model)) == known


def test_the_road_from_a_text_to_an_answer_computes_it_twice(tmp_path):
    """Once for `compress`, also the first time, which loads an adapter, and once for `load`."""
    model, tokenizer = load_model("tiny")
    computed, transfers = [], []
    real, cpu = identity._sample_weights, Tensor.cpu

    def count(wanted):
        computed.append(len(wanted))
        with patch.object(Tensor, "cpu", lambda self: transfers.append(1) or cpu(self)):
            return real(wanted)

    with patch.object(identity, "_sample_weights", count):
        for _ in range(2):
            context = compress(model, tokenizer, TEXT, ratio=0.2)
            assert context.manifest.adapter is not None and len(computed) == 1
            context.save(tmp_path / "cache.rkv")
            assert len(computed) == 1
            context = CompressedContext.load(tmp_path / "cache.rkv", model, tokenizer)
            context.ask("Who?")
            assert len(computed) == len(transfers) == 2
            computed.clear()
            transfers.clear()
