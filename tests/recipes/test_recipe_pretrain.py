"""The recipe of the tiny model: a training that is cut short continues where it ended."""

import json

import pytest
import torch

from recipes.smollm2 import texts
from recipes.tiny import build, pretrain
from restorekv.model.names import shipped_path


@pytest.fixture
def folder(tmp_path):
    """A folder with the tokenizer that ships, as the recipe's first script leaves it."""
    place = tmp_path / "model"
    place.mkdir()
    for path in shipped_path("tiny", "model").glob("*token*"):
        (place / path.name).write_bytes(path.read_bytes())
    for path in shipped_path("tiny", "model").glob("chat_template*"):
        (place / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_run_of_few_minutes_saves_before_it_returns(folder):
    recipe = pretrain.Recipe(hidden=24, layers=1, heads=2, kv_heads=1, ffn=24)
    pretrain.pretrain(folder, recipe, steps=3, minutes=0)
    assert torch.load(folder / "state.pt", weights_only=True)["step"] == 1
    pretrain.pretrain(folder, recipe, steps=3, minutes=0)
    assert torch.load(folder / "state.pt", weights_only=True)["step"] == 2
    pretrain.pretrain(folder, recipe, steps=3, minutes=9)
    assert torch.load(folder / "state.pt", weights_only=True)["step"] == 3
    assert json.loads((folder / "model" / "config.json").read_text())["hidden_size"] == 24


@pytest.mark.parametrize("script", [build, texts])
def test_a_script_without_its_folder_says_what_it_needs(script, capsys):
    with pytest.raises(SystemExit) as refusal:
        script.main([])
    assert refusal.value.code == 2
    assert "the following arguments are required" in capsys.readouterr().err


def test_a_folder_of_texts_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        texts.main([str(tmp_path / "nosuch")])
    assert "There is no folder" in capsys.readouterr().err
