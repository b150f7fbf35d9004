"""Shipped adapters can be named MODEL:NAME wherever an adapter is named."""

import pytest

from restorekv import compress, load_model
from restorekv.errors import AdapterError
from restorekv.model.names import shipped_path
from restorekv.restore import shipped
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.hub import fetch_adapter
from restorekv.train.config import TrainConfig
from restorekv.train.loop import make_initial_adapter
from tests.helpers.models import build_model


@pytest.fixture(scope="module")
def tiny():
    return load_model("tiny")


def test_adapters_that_ship_have_names(tiny):
    assert fetch_adapter("tiny:snapkv") == shipped_path("tiny", "adapters", "snapkv")
    assert RestoreAdapter.from_pretrained(tiny[0], "tiny:snapkv").card.evictor == "snapkv"


@pytest.mark.parametrize("name", ["nothing", "", "../gates", "../adapters/h2o", "x" * 300])
def test_no_other_name_finds_an_adapter(name):
    with pytest.raises(AdapterError, match=r"No adapter .* ships for tiny; use one of .*snapkv"):
        fetch_adapter(f"tiny:{name}")


def test_a_name_with_a_slip_gets_a_hint():
    with pytest.raises(
        AdapterError, match=r"ships for tiny \(did you mean tiny:kvzip\?\); use one"
    ):
        fetch_adapter("tiny:kvzpi")


@pytest.mark.parametrize(
    "name, hint",
    [
        ("foo", ""),
        ("kvzpi", " (did you mean tiny:kvzip?)"),
        ("KVzip", " (did you mean tiny:kvzip?)"),
        ("tini:snapkv", " (did you mean tiny:snapkv?)"),
    ],
)
def test_an_unknown_name_shows_those_that_ship_for_the_model(tiny, name, hint):
    with pytest.raises(AdapterError) as refused:
        compress(*tiny, "The code of the red house is seven. " * 9, ratio=0.3, adapter=name)
    ours = ", ".join(f"tiny:{each}" for each in shipped.list_names("tiny"))
    assert str(refused.value) == (
        f"There is no adapter folder {name!r}, nor can it be fetched from the hub{hint}; use "
        f"{ours}, a folder or a hub id."
    )


def test_a_copy_of_a_model_shows_those_of_the_model(tiny, tmp_path):
    model, tokenizer = tiny
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=r"\(did you mean tiny:kvzip\?\); use tiny"):
        RestoreAdapter.from_pretrained(load_model(tmp_path)[0], "kvzip")


def test_of_a_model_without_adapters_no_names_are_shown():
    with pytest.raises(AdapterError, match=r"from the hub; use a folder or a hub id\."):
        RestoreAdapter.from_pretrained(build_model("qwen3"), "foo")


def test_what_ships_has_no_revision():
    with pytest.raises(AdapterError, match=r"tiny:kvzip ships .* no revision 'v1'; leave it out"):
        fetch_adapter("tiny:kvzip", revision="v1")


def test_a_missing_folder_is_no_name(tiny, tmp_path):
    with pytest.raises(AdapterError, match=r"from the hub; use a folder or a hub id that is there"):
        RestoreAdapter.from_pretrained(tiny[0], tmp_path / "kvzip")


def test_a_name_too_long_for_a_path_gets_a_sentence():
    with pytest.raises(AdapterError, match="There is no adapter folder"):
        fetch_adapter("x" * 5000)


def test_training_starts_from_an_adapter_that_ships(tiny):
    adapter = RestoreAdapter.from_pretrained(tiny[0], "tiny:snapkv")
    config = TrainConfig(
        init="tiny:snapkv",
        restore_tokens=adapter.restore_tokens,
        rank=adapter.lora_config.r,
        alpha=adapter.lora_config.lora_alpha,
        targets=tuple(adapter.lora_config.target_modules),
    )
    begun = make_initial_adapter(*tiny, config)
    assert begun.to_stored().weights_hash() == adapter.to_stored().weights_hash()


def test_adapters_that_are_not_installed_are_named(monkeypatch):
    monkeypatch.setattr(shipped, "is_shipping_installed", lambda name: False)
    with pytest.raises(AdapterError, match=r"not installed; pip install restorekv-smollm2"):
        fetch_adapter("smollm2:kvzip")
