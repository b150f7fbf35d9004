"""What ships for models is data in distributions of its own; the package itself is code."""

import sys
import tomllib
import zlib

import pytest

from restorekv.errors import GateError, ModelError, RestoreKVWarning
from restorekv.evictors import gate_file
from restorekv.model import names
from restorekv.model.identity import identify_model
from restorekv.model.load import load_model
from restorekv.model.names import SHIPPING, is_shipping_installed, shipped_path
from restorekv.restore import adapter_file, model_card
from restorekv.restore.shipped import find_shipped_adapter
from tests.helpers.source import PACKAGE, ROOT

WHEEL_BYTES = 2_000_000


@pytest.fixture
def nothing_installed(tmp_path, monkeypatch):
    """A machine with the code alone."""
    monkeypatch.setattr(names, "DISTRIBUTIONS", tmp_path / "distributions")
    monkeypatch.setattr(names, "find_spec", lambda name: None)


def test_the_package_is_code():
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert sum(len(zlib.compress(path.read_bytes())) for path in files) < WHEEL_BYTES
    assert not [path for path in files if path.suffix == ".safetensors"]


@pytest.mark.parametrize("name", SHIPPING)
def test_a_distribution_has_the_name_that_is_looked_for(name):
    folder = ROOT / "distributions" / f"restorekv-{name}"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == folder.name
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [
        f"restorekv_{name}"
    ]
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    # The checkout's own, whatever is installed.
    assert shipped_path(name) == folder / f"restorekv_{name}"
    assert (shipped_path(name, "adapters", "kvzip") / "restorekv.json").is_file()


def test_the_cards_that_ship_are_those_of_the_template():
    """They have the words of the template as it is now, and the facts of their records."""
    cards = sorted((ROOT / "distributions").glob("*/*/adapters/*/README.md"))
    assert cards
    for path in cards:
        stored = adapter_file.read_adapter(path.parent)
        assert stored.card is not None
        assert path.read_text("utf-8") == model_card.render_card(stored.card, stored.config), path


def test_an_installed_distribution_is_found_without_importing_it(tmp_path, monkeypatch):
    package = tmp_path / "restorekv_tiny"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('data was run')")
    monkeypatch.setattr(names, "DISTRIBUTIONS", tmp_path / "distributions")
    monkeypatch.syspath_prepend(tmp_path)
    assert shipped_path("tiny", "gates") == package / "gates" and is_shipping_installed("tiny")
    assert "restorekv_tiny" not in sys.modules


def test_without_its_distribution_auto_restores_nothing_and_says_so(nothing_installed):
    with pytest.warns(RestoreKVWarning, match="smollm2 are not installed, so nothing is restored"):
        assert find_shipped_adapter("smollm2", "kvzip") is None
    with pytest.raises(ModelError, match="pip install restorekv-tiny"):
        load_model("tiny")


def test_without_its_distribution_a_gate_is_named(nothing_installed, tiny_model):
    tiny_model.config.name_or_path, before = "tiny", tiny_model.config.name_or_path
    try:
        with pytest.raises(GateError, match="pip install restorekv-tiny"):
            gate_file.find_shipped_gate(("fastkvzip",), identify_model(tiny_model))
    finally:
        tiny_model.config.name_or_path = before
