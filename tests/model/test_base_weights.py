"""Adapters and gates on other weights: silent on their own, a warning on copies of them, refused on
other models.
"""

import copy
import json
import warnings

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model

from restorekv.errors import AdapterError, GateError, RestoreKVWarning
from restorekv.evictors import gate_file
from restorekv.evictors.gate_file import Gate, GateCard
from restorekv.model import base_weights
from restorekv.model.base_weights import measure_similarity
from restorekv.model.identity import (
    SKETCH_VALUES,
    WEIGHT_SOURCES,
    describe_weights,
    fingerprint_model,
    identify_model,
)
from restorekv.model.names import SMOLLM2_ID
from restorekv.restore.adapter import RestoreAdapter
from restorekv.seal import seal_record
from tests.helpers.models import build_model


def changed(model, change):
    """A copy with every weight changed."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.copy_(change(weight))
    return other


def rounded(bits, block=16):
    """Each block of numbers to 2 ** bits even steps between its least and greatest, as llama.cpp's
    formats do.
    """

    def change(weight):
        blocks = weight.reshape(-1, block)
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
        step = (high - low).clamp_min(1e-9) / (2**bits - 1)
        return ((blocks - low) / step).round().mul(step).add(low).reshape(weight.shape)

    return change


@pytest.fixture
def model():
    return build_model("qwen3")


def test_similarity_of_copies_and_strangers(model):
    own = describe_weights(model)
    assert measure_similarity(own, own) == pytest.approx(1)
    for bits, least in ((8, 0.9999), (4, 0.99), (3, 0.97), (2, base_weights.LEAST_SIMILARITY)):
        near = measure_similarity(own, describe_weights(changed(model, rounded(bits))))
        assert least < near < 1, bits
    stranger = build_model("qwen3", seed=1)
    assert abs(measure_similarity(own, describe_weights(stranger))) < 0.2
    assert measure_similarity(own, describe_weights(changed(model, lambda weight: -weight))) < -0.99
    for other in (
        build_model("llama"),
        build_model("qwen3", intermediate_size=64),
        build_model("qwen3", vocab_size=321),
    ):
        assert measure_similarity(own, describe_weights(other)) == 0


def test_the_sketch_is_the_same_in_every_dtype_and_with_lora(model):
    own = describe_weights(model)
    assert (
        describe_weights(copy.deepcopy(model).to(torch.bfloat16))
        == own
        == json.loads(json.dumps(own))
    )
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "down_proj"]), model)
    assert describe_weights(model) == own
    assert 500 < len(base_weights.decode_sketch(own["sketch"])) <= SKETCH_VALUES


@pytest.mark.parametrize("sketch", [None, 7, "", "AAA", "not base64!", "AAAA"])
def test_a_damaged_sketch_is_like_nothing(model, sketch):
    own = describe_weights(model)
    assert measure_similarity({**own, "sketch": sketch}, own) == 0
    assert measure_similarity(None, own) == measure_similarity({}, own) == 0


def save_adapter(model, folder):
    adapter = RestoreAdapter.create(model, 4, rank=2)
    adapter.record_training(evictor="kvzip")
    adapter.save_pretrained(folder)
    return folder


def save_gate(model, folder):
    layers = [{"weight": torch.randn(2, 32), "bias": torch.randn(2)} for _ in range(3)]
    gate_file.write_gate(folder, Gate(layers, GateCard.for_model(model, "kvzap-linear", "kvzip+")))
    return folder


LOADERS = {
    "adapter": (save_adapter, RestoreAdapter.from_pretrained, AdapterError),
    "gate": (
        save_gate,
        lambda model, path: gate_file.load_gate(model, str(path), ("kvzap-linear",)),
        GateError,
    ),
}


@pytest.mark.parametrize("what", LOADERS)
def test_own_weights_copies_and_strangers(model, tmp_path, what):
    save, load, error = LOADERS[what]
    WEIGHT_SOURCES[model] = "GGUF Q4_1"
    path = save(model, tmp_path / what)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(model, path)
        load(copy.deepcopy(model).to(torch.bfloat16), path)
    near = changed(model, rounded(4))
    with pytest.warns(
        RestoreKVWarning,
        match=rf"The {what} .* was made for other weights of .*GGUF Q4_1.*slightly worse",
    ):
        load(near, path)
    twin = copy.deepcopy(near)  # because gates are read once per model
    WEIGHT_SOURCES[twin] = "the hub's"
    with pytest.warns(RestoreKVWarning, match="GGUF Q4_1, than these, the hub's; expect"):
        load(twin, path)
    with pytest.raises(error, match="a different model"):
        load(build_model("qwen3", seed=1), path)
    other_rope = {"rope_type": "default", "rope_theta": 500.0}
    with pytest.raises(error, match="RoPE"):
        load(build_model("qwen3", rope_parameters=other_rope), path)
    # With its own RoPE it would still be a different model.
    with pytest.raises(error, match="a different model"):
        load(build_model("qwen3", seed=1, rope_parameters=other_rope), path)


def test_an_adapter_that_is_trained_on_has_the_weights_it_is_on(model, tmp_path):
    near = changed(model, rounded(4))
    with pytest.warns(RestoreKVWarning, match="other weights"):
        adapter = RestoreAdapter.from_pretrained(near, save_adapter(model, tmp_path / "first"))
    assert adapter.card.fingerprint == fingerprint_model(model)
    adapter.record_training(evictor="kvzip")
    assert adapter.card.fingerprint == fingerprint_model(
        near
    ) and adapter.card.weights == describe_weights(near)


def test_an_adapter_without_a_sketch_needs_its_own_weights(model, tmp_path):
    path = save_adapter(model, tmp_path / "old")
    card = json.loads((path / "restorekv.json").read_text())
    assert card.pop("weights")["architecture"]["hidden"] == 32
    (path / "restorekv.json").write_text(json.dumps(seal_record(card)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert RestoreAdapter.from_pretrained(model, path).card.weights is None
    with pytest.raises(AdapterError, match="a different model"):
        RestoreAdapter.from_pretrained(changed(model, rounded(8)), path)
    # The fingerprint covers RoPE, so it differs here too, and "load that one" would be wrong.
    stretched = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 3.0}
    with pytest.raises(AdapterError, match=r"made with RoPE .*'yarn'.* the same RoPE config"):
        RestoreAdapter.from_pretrained(build_model("qwen3", rope_parameters=stretched), path)
    card["weights"] = "q4"
    (path / "restorekv.json").write_text(json.dumps(seal_record(card)))
    with pytest.raises(AdapterError, match="damaged"):
        RestoreAdapter.from_pretrained(model, path)


def test_the_model_card_says_which_weights(model, tmp_path):
    WEIGHT_SOURCES[model] = "GGUF Q4_1"
    model.config.name_or_path = "smollm2"
    path = save_adapter(model, tmp_path / "adapter")
    text = (path / "README.md").read_text()
    assert "GGUF Q4_1" in text and "base_model: HuggingFaceTB/SmolLM2-135M-Instruct" in text
    assert (
        json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"]
        == SMOLLM2_ID
    )
    assert json.loads((path / "restorekv.json").read_text())["model"] == "smollm2"


def test_a_shipped_gate_for_these_very_weights_goes_first(model, tmp_path, monkeypatch):
    monkeypatch.setattr(gate_file, "shipped_path", lambda model, *parts: tmp_path.joinpath(*parts))
    (tmp_path / "gates").mkdir()
    save_gate(changed(model, rounded(4)), tmp_path / "gates" / "first.safetensors")

    def find(wanted):
        kinds = ("first", "second")
        return gate_file.find_shipped_gate(kinds, identify_model(wanted)).stem

    assert find(model) == "first"
    save_gate(model, tmp_path / "gates" / "second.safetensors")
    assert find(model) == "second"
    with pytest.raises(GateError, match="No first gate ships"):
        find(build_model("qwen3", seed=1))
