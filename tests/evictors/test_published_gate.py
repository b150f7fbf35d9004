"""Published gates in their true formats become ours; pickles with code in them are never run."""

import json
import os
import pickle
import re
import shutil

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from restorekv.errors import GateError
from restorekv.evictors import gate_file, published_gate
from restorekv.evictors.published_gate import FAST_KVZIP, convert_gate
from tests.helpers.cli_world import cli
from tests.helpers.gates import random_layers
from tests.helpers.models import build_model

MODEL = build_model("qwen3")
TEXT = "the code of the red house is seven; who lives in the blue house? " * 4


class Code:
    """Unpickling it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def as_pickle(path, layers, **beside):
    torch.save({"module": layers, **beside}, path)
    return path


def as_folder(folder, layers, **config):
    """As KVzapModel.save_pretrained writes it."""
    folder.mkdir(parents=True)
    width = layers[0]["0.bias"].shape[0] if "0.bias" in layers[0] else None
    written = {
        "model_type": "kvzap",
        "input_dim": 32,
        "output_dim": 2,
        "n_modules": 3,
        "hidden_dim": width,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(written))
    tensors = {
        f"layers.{index}.{name}": tensor
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_same(gate, layers):
    assert len(gate.layers) == len(layers)
    for mine, theirs in zip(gate.layers, layers, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype and mine[name].equal(theirs[name])


def in_published_dtypes(layers):
    """Projections and bias in the model's bfloat16, norms and sinks in float32."""
    half = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "b")
    return [
        {name: value.bfloat16() if name in half else value for name, value in layer.items()}
        for layer in layers
    ]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_of_fast_kvzip(tmp_path, zipped):
    layers = in_published_dtypes(random_layers("fastkvzip", MODEL))
    content = {"module": layers, "loss": np.arange(3.0), "args": {"lr": 0.2, "sink": 16}}
    torch.save(content, tmp_path / "q2.pt", _use_new_zipfile_serialization=zipped)
    gate = convert_gate(str(tmp_path / "q2.pt"), MODEL)
    assert_same(gate, layers)
    assert gate.card.kind == "fastkvzip" and gate.card.target == "kvzip"
    assert gate.card.settings == {"source": str(tmp_path / "q2.pt")}
    gate_file.write_gate(tmp_path / "gate", gate)
    assert_same(gate_file.load_gate(MODEL, str(tmp_path / "gate"), ("fastkvzip",)), layers)


def test_numpy_of_before_2_is_understood(tmp_path):
    path = tmp_path / "q2.pt"
    content = {"module": random_layers("fastkvzip", MODEL), "loss": np.arange(3.0)}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    for old, new in ((b"numpy._core.", b"numpy.core."), (b"numpy.core.", b"numpy._core.")):
        path.write_bytes(path.read_bytes().replace(old, new))
        assert_same(convert_gate(str(path), MODEL), content["module"])


@pytest.mark.parametrize("place", ["beside", "inside", "bare", "named"])
def test_code_in_a_pickle_is_not_run(tmp_path, place):
    layers, path, mark = random_layers("fastkvzip", MODEL), tmp_path / "q2.pt", tmp_path / "ran"
    if place == "beside":
        as_pickle(path, layers, args=Code(mark))
    elif place == "inside":
        as_pickle(path, [{**layers[0], "b": Code(mark)}, *layers[1:]])
    elif place == "bare":
        path.write_bytes(pickle.dumps({"module": Code(mark)}, protocol=2))
    else:  # a numpy array that holds objects
        as_pickle(path, layers, args=np.array([Code(mark)], dtype=object))
    with pytest.raises(GateError, match="without running code"):
        convert_gate(str(path), MODEL)
    assert not mark.exists()
    torch.load(path, weights_only=False) if place != "bare" else pickle.loads(path.read_bytes())
    assert mark.exists(), "the trap works"


@pytest.mark.parametrize("kind", ["kvzap-linear", "kvzap-mlp"])
def test_a_folder_of_kvzap(tmp_path, kind):
    layers = random_layers(kind, MODEL)
    gate = convert_gate(str(as_folder(tmp_path / "KVzap", layers)), MODEL)
    assert_same(gate, layers)
    assert gate.card.kind == kind and gate.card.target == "kvzip+"


def test_what_is_fetched_from_the_hub(tmp_path, monkeypatch):
    layers = random_layers("fastkvzip", MODEL)
    as_pickle(tmp_path / "q2.pt", layers)
    folder = as_folder(tmp_path / "KVzap", random_layers("kvzap-mlp", MODEL))
    asked = []

    def one_file(repo, file):
        asked.append((repo, file))
        return str(tmp_path / "q2.pt")

    def whole(repo, allow_patterns):
        asked.append((repo, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(published_gate, "hf_hub_download", one_file)
    monkeypatch.setattr(published_gate, "snapshot_download", whole)
    monkeypatch.setattr(MODEL.config, "_name_or_path", "Qwen/Qwen3-8B")
    assert_same(convert_gate(FAST_KVZIP, MODEL), layers)
    assert convert_gate("nvidia/KVzap-mlp-Qwen3-8B", MODEL).card.kind == "kvzap-mlp"
    assert asked == [
        (FAST_KVZIP, "qwen3-8b/q2_dim16_sink16.pt"),
        ("nvidia/KVzap-mlp-Qwen3-8B", ("config.json", "*.safetensors")),
    ]


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for source, words in (
        (FAST_KVZIP, ".*q2_dim16_sink16.pt of Jang"),
        ("nvidia/KVzap", "'nvidia/KVzap'"),
        ("?", ""),
    ):
        with pytest.raises(GateError, match=rf"gate {words}.*cannot be fetched"):
            convert_gate(source, MODEL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("published")
    MODEL.save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    as_pickle(folder / "q2.pt", random_layers("fastkvzip", MODEL))
    as_folder(folder / "KVzap", random_layers("kvzap-mlp", MODEL))
    (folder / "text").write_text(TEXT)
    return folder


@pytest.mark.parametrize(("source", "evictor"), [("q2.pt", "fastkvzip"), ("KVzap", "kvzap")])
def test_the_command_makes_a_gate_that_works(folder, tmp_path, source, evictor):
    out = tmp_path / "gate.safetensors"
    result = cli("convert-gate", folder / source, "-o", out, "--model", folder / "model")
    assert result.code == 0 and "predicts" in result.out, result
    spec = f"{evictor}:gate={out}"
    result = cli(
        "compress",
        folder / "text",
        "--model",
        folder / "model",
        "-o",
        tmp_path / "c",
        "--evictor",
        spec,
    )
    assert result.code == 0, result


def altered(change):
    """A copy of the KVzap folder in which something is wrong."""

    def make(folder, tmp):
        shutil.copytree(folder / "KVzap", tmp / "source")
        change(tmp / "source")

    return make


def missing_layer(folder, tmp):
    as_pickle(tmp / "source", random_layers("fastkvzip", MODEL)[:2])


def of_another_shape(folder, tmp):
    as_pickle(tmp / "source", random_layers("fastkvzip", build_model("qwen3", hidden_size=64)))


def of_no_sinks(folder, tmp):
    layers = random_layers("fastkvzip", MODEL)
    as_pickle(tmp / "source", [{**layer, "k_base": layer["k_base"][:, :, :0]} for layer in layers])


MISTAKES = {
    "nothing there": (lambda folder, tmp: None, "no gate file"),
    "an empty file": (lambda folder, tmp: (tmp / "source").touch(), "without running code"),
    "a text": (lambda folder, tmp: (tmp / "source").write_text(TEXT), "without running code"),
    "half a pickle": (
        lambda folder, tmp: (tmp / "source").write_bytes((folder / "q2.pt").read_bytes()[:9000]),
        "without running code",
    ),
    "a pickle of something else": (
        lambda folder, tmp: torch.save([1, 2], tmp / "source"),
        "without running code",
    ),
    "numbers for tensors": (
        lambda folder, tmp: as_pickle(tmp / "source", [{"b": 1.0}] * 3),
        "more than tensors",
    ),
    "a layer too few": (missing_layer, "2 layers, the model 3"),
    "another shape": (of_another_shape, "Layer 0 .* the shape of a fastkvzip gate"),
    "no sinks": (of_no_sinks, "Layer 0"),
    "no config": (altered(lambda source: (source / "config.json").unlink()), "not a KVzap gate"),
    "a config of something else": (
        altered(lambda source: (source / "config.json").write_text('{"model_type": "qwen3"}')),
        "not a KVzap gate",
    ),
    "a config that is a list": (
        altered(lambda source: (source / "config.json").write_text("[]")),
        "not a KVzap gate",
    ),
    "no weights": (altered(lambda source: (source / "model.safetensors").unlink()), "0 layers"),
    "damaged weights": (
        altered(lambda source: (source / "model.safetensors").write_bytes(b"x" * 99)),
        "damaged",
    ),
    "the other kind": (
        altered(lambda source: (source / "config.json").write_text('{"model_type": "kvzap"}')),
        "a kvzap-linear gate",
    ),
    "not a number": (
        lambda folder, tmp: as_pickle(
            tmp / "source",
            [
                {k: v * float("nan") for k, v in g.items()}
                for g in random_layers("fastkvzip", MODEL)
            ],
        ),
        "not finite",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(folder, tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    make, words = MISTAKES[name]
    make(folder, tmp_path)
    result = cli(
        "convert-gate", tmp_path / "source", "-o", tmp_path / "gate", "--model", folder / "model"
    )
    assert result.code == 1 and result.err.startswith("error: ") and result.err.count("\n") == 1, (
        result
    )
    assert re.search(words, result.err) and not re.search(r"[.!?] [A-Z]", result.err), result.err
    assert not (tmp_path / "gate").exists()
