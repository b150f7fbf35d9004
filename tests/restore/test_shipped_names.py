"""Adapters that ship are named MODEL:NAME wherever an adapter is named."""

import pytest

from restorekv import load_model
from restorekv.errors import AdapterError
from restorekv.model.names import shipped_path
from restorekv.restore import shipped
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.hub import fetch_adapter
from restorekv.train.config import TrainConfig
from restorekv.train.loop import make_initial_adapter


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
