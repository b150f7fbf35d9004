"""Loading, shapes and fingerprints."""

import shutil

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

from restorekv.errors import ModelError
from restorekv.model import attention, load
from restorekv.model.identity import fingerprint_model
from restorekv.model.load import load_model, load_tokenizer
from restorekv.model.names import tiny_path
from restorekv.model.rope import get_rope_settings
from restorekv.model.shape import CacheShape, get_backbone
from restorekv.model.support import get_support
from tests.helpers.models import build_model


def test_shape(tiny_model):
    shape = CacheShape.from_model(tiny_model)
    assert (shape.layers, shape.heads, shape.groups, shape.hidden) == (3, 2, 2, 32)
    assert shape.head_dim == (16 if tiny_model.config.model_type == "qwen3" else 8)


def test_layers_without_keys_and_values_are_refused():
    model = build_model("qwen3")
    model.config.layer_types = ["full_attention", "indexed_attention", "full_attention"]
    with pytest.raises(ModelError, match="indexed_attention"):
        CacheShape.from_model(model)


def test_layers_that_attend_although_the_config_says_otherwise_are_refused():
    model = build_model("qwen3")
    kinds = ["full_attention"] * (model.config.num_hidden_layers - 1)
    model.config.layer_types = ["linear_attention", *kinds]
    with pytest.raises(ModelError, match=r"linear_attention|calls its attention|compressed cache"):
        get_support(model)


def test_save_and_load_locally(tiny_model, tiny_tokenizer, tmp_path):
    tiny_model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_model(str(tmp_path))
    assert model.config._attn_implementation == attention.NAME
    assert fingerprint_model(model) == fingerprint_model(tiny_model)
    assert tokenizer.chat_template == tiny_tokenizer.chat_template
    assert not any(parameter.requires_grad for parameter in model.parameters())
    half, _ = load_model(str(tmp_path), dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and fingerprint_model(half) == fingerprint_model(model)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_without_all_of_its_weights_is_refused(tied, tiny_tokenizer, tmp_path):
    """transformers would draw the others at random, and only log it."""
    whole = tmp_path / "whole"
    model = build_model("qwen3", tie_word_embeddings=tied)
    model.save_pretrained(whole)
    tiny_tokenizer.save_pretrained(whole)
    loaded, _ = load_model(str(whole))
    assert fingerprint_model(loaded) == fingerprint_model(model)
    shutil.copytree(whole, tmp_path / "part")
    file = tmp_path / "part" / "model.safetensors"
    weights = load_file(file)
    lost = "model.layers.1.mlp.down_proj.weight"
    del weights[lost]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"its files lack 1 of its weights, such as {lost};"):
        load_model(str(tmp_path / "part"))


def test_a_folder_that_is_no_models_says_what_it_lacks(tmp_path):
    (tmp_path / "report.txt").write_text("A text.")
    with pytest.raises(ModelError, match=r"the folder has no config\.json, so it is not a model's"):
        load_model(tmp_path)


@pytest.mark.parametrize("template", ["with its template", "without its template"])
def test_a_model_saved_without_its_tokenizer_says_so(tmp_path, template):
    shutil.copytree(tiny_path("model"), tmp_path / "part")
    lost = ["tokenizer.json", "tokenizer_config.json"]
    # With the template alone, transformers makes a tokenizer without words.
    if template == "without its template":
        lost.append("chat_template.jinja")
    for file in lost:
        (tmp_path / "part" / file).unlink()
    for call in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match=r"has no tokenizer\.json, nor another .* save the"):
            call(tmp_path / "part")


def test_unknown_models_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in [str(tmp_path), str(tmp_path / "nowhere"), "no-such-owner/no-such-model-at-all"]:
        with pytest.raises(ModelError, match="Cannot load the model") as caught:
            load_model(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
)
def test_a_model_without_memory_is_not_called_missing(tmp_path, monkeypatch, error):
    """The advice was to name a folder or hub id, with the cause in parentheses."""

    def fail(*_: object, **__: object) -> None:
        raise error

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(
        ModelError, match=r"^There is not enough memory to load the model '.*smaller"
    ):
        load_model(str(tmp_path))


def test_fingerprint_sees_weights_and_adapters_that_are_active(tiny_model):
    """Restore adapters are in twins of a model; what is in the model itself changes its pairs."""
    before = fingerprint_model(tiny_model)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    inject_adapter_in_model(config, tiny_model, "first")
    inject_adapter_in_model(config, tiny_model, "second")
    layers = [each for each in tiny_model.modules() if isinstance(each, BaseTunerLayer)]
    fingerprints = {before}
    for name in ("first", "second"):
        for layer in layers:
            layer.set_adapter([name])
        fingerprints.add(fingerprint_model(tiny_model))
    assert len(fingerprints) == 3
    for layer in layers:
        layer.enable_adapters(False)
    assert fingerprint_model(tiny_model) == before
    with torch.no_grad():
        tiny_model.lm_head.weight.mul_(1.5)
    assert fingerprint_model(tiny_model) != before
    assert fingerprint_model(build_model("qwen3", seed=1)) != fingerprint_model(
        build_model("qwen3")
    )


def test_rope_fingerprint_shows_yarn():
    plain = build_model("qwen3")
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 10000.0,
    }
    stretched = build_model("qwen3", rope_parameters=yarn)
    assert get_rope_settings(plain.config) == {"rope_theta": 10000.0, "rope_type": "default"}
    assert get_rope_settings(stretched.config)["rope_type"] == "yarn"


def test_dense_attention_is_sdpa(tiny_model):
    """Bit-equal logits with and without restorekv's attention, and the observer sees every
    layer.
    """
    ids = torch.randint(3, 300, (1, 20))
    seen = []
    with (
        torch.no_grad(),
        attention.observe_attention(
            lambda module, *rest: seen.append((module.layer_idx, rest[0].shape))
        ),
    ):
        ours = tiny_model(ids).logits
        get_backbone(tiny_model)(ids)
    tiny_model.set_attn_implementation("sdpa")
    with torch.no_grad():
        assert ours.equal(tiny_model(ids).logits)
    attention.install_attention(tiny_model)
    assert [layer for layer, _ in seen] == [0, 1, 2] * 2 and seen[0][1][:3] == (1, 4, 20)
