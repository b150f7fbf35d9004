"""The names of a server's caches: a cache that would be made differently now has a new name."""

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from restorekv import load_model, spec
from restorekv.model import names
from restorekv.restore.adapter import RestoreAdapter
from restorekv.serve import cache_origin
from restorekv.serve.cache_origin import CacheOrigin
from restorekv.serve.variants import Variant

SHA = "0" * 64
MODEL_IDS = ("tiny", "tiny:kvzip-0.1", "tiny:kvzip-0.1-base", "tiny:fast-0.1", "tiny:random-0.1")


def make_keys(model, tokenizer, adapter="auto", **settings):
    origin = CacheOrigin.describe(model, tokenizer, settings, adapter)
    return {name: origin.make_key(SHA, Variant.parse(name, "tiny")) for name in MODEL_IDS}


def list_changed(before, after):
    return [name for name in MODEL_IDS if before[name] != after[name]]


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A copy of the folder that ships for the tiny model; tests may change it."""
    folder = tmp_path / "distributions" / "restorekv-tiny"
    shutil.copytree(names.DISTRIBUTIONS / "restorekv-tiny", folder)
    monkeypatch.setattr(names, "DISTRIBUTIONS", folder.parent)
    return folder / "restorekv_tiny"


@pytest.fixture
def loaded(shipped):
    """The model and tokenizer of that copy."""
    return load_model("tiny")


def test_a_replaced_adapter_renames_what_it_restored(loaded, shipped):
    before = make_keys(*loaded)
    assert make_keys(*loaded) == before
    record = shipped / "adapters" / "kvzip" / "restorekv.json"
    record.write_text(record.read_text() + "\n")
    # Neither the full cache nor what the evictor alone keeps has read the adapter.
    assert list_changed(before, make_keys(*loaded)) == ["tiny:kvzip-0.1"]
    shutil.rmtree(record.parent)
    assert list_changed(before, make_keys(*loaded)) == ["tiny:kvzip-0.1"]


def test_a_named_adapter_renames_what_it_restores(loaded, shipped):
    before = make_keys(*loaded)
    restored = ["tiny:kvzip-0.1", "tiny:fast-0.1", "tiny:random-0.1"]
    adapter = RestoreAdapter.from_pretrained(loaded[0], shipped / "adapters" / "kvzip")
    named = make_keys(*loaded, adapter)
    assert list_changed(before, named) == restored
    with torch.no_grad():
        adapter.embeddings.mul_(2)
    assert list_changed(named, make_keys(*loaded, adapter)) == restored
    # No adapter ships for `random`, so nothing changes without one.
    assert list_changed(before, make_keys(*loaded, None)) == restored[:2]


def test_a_replaced_gate_renames_what_it_scored(shipped):
    # Loaded anew each time, as a server does at its start: a model keeps its gate.
    before = make_keys(*load_model("tiny"))
    gate = shipped / "gates" / "fastkvzip.safetensors"
    tensors = load_file(gate)
    name = min(tensors)
    tensors[name] = tensors[name] + 1
    with safe_open(gate, "pt") as file:
        save_file(tensors, gate, file.metadata())
    assert list_changed(before, make_keys(*load_model("tiny"))) == ["tiny:fast-0.1"]
    # Without a gate a question about such a document is refused; the server starts all the same.
    gate.unlink()
    assert list_changed(before, make_keys(*load_model("tiny"))) == ["tiny:fast-0.1"]


def test_changed_code_renames_caches(loaded, monkeypatch):
    before = make_keys(*loaded)
    digest = spec.digest_code
    # As if somebody had edited the evictor's file.
    monkeypatch.setattr(spec, "digest_code", lambda cls: digest(cls) + cls.__name__[:1])
    assert list_changed(before, make_keys(*loaded)) == list(MODEL_IDS[1:])
    monkeypatch.undo()
    monkeypatch.setattr(cache_origin, "__version__", "0.0.1")
    assert list_changed(before, make_keys(*loaded)) == list(MODEL_IDS)


def test_settings_and_document_are_part_of_the_name(loaded):
    before = make_keys(*loaded)
    assert list_changed(before, make_keys(*loaded, kv_dtype="int8")) == list(MODEL_IDS)
    origin = CacheOrigin.describe(*loaded, {})
    assert origin.make_key("1" * 64, Variant.parse("tiny", "tiny")) != before["tiny"]


def test_the_separator_is_part_of_the_name(loaded):
    model, tokenizer = loaded
    before = make_keys(model, tokenizer)
    tokenizer.init_kwargs["separator"] = "\n\nQ: "
    assert list_changed(before, make_keys(model, tokenizer)) == list(MODEL_IDS)


def test_models_without_shipped_files_have_names_too(model, tiny_tokenizer):
    """If transformers leaves a path as the model's name, no adapter is found for it."""
    model.config.name_or_path = "/tmp/some.folder/model"
    assert len(set(make_keys(model, tiny_tokenizer).values())) == len(MODEL_IDS)
