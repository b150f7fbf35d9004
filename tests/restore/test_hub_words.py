"""What a model card says about license, controls, settings, data and base model is true of its
adapter.
"""

import re
from dataclasses import fields

import pytest
import yaml

from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.model_card import is_on_hub
from restorekv.train.config import TrainConfig
from tests.helpers.cards import adapter_of, card_of, rows


def words(text):
    """Return a text in one line, without the breaks that a reader does not see."""
    return " ".join(text.split())


def licensed(*names, **record):
    """Return what a card says about the license of an adapter that has one source per name."""
    text = card_of(adapter_of(data=[{"source": "A", "license": name} for name in names], **record))
    return words(text.split("License of this adapter: ")[1].split("\n## ")[0])


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (["mit", "Apache-2.0", "CC BY 4.0"], "apache-2.0."),
        (["CC BY-SA 4.0", "mit"], "cc-by-sa-4.0."),
        (["mit", "CC BY-NC 4.0"], "cc-by-nc-4.0. Not for commercial use."),
        ([["mit", "CC BY-SA 4.0"], "CC BY-NC 4.0", None], "cc-by-nc-4.0. Not for commercial use."),
        (["mit", "my own"], "unknown; ask whoever trained it."),
    ],
)
def test_the_license_is_that_of_the_data(of, expected):
    assert licensed(*of) == expected


def test_a_chosen_license_is_the_one_on_the_card():
    assert licensed("CC BY-SA 4.0", license="MIT") == "mit."
    assert licensed("CC BY-NC 4.0", license="unknown: ask whoever trained it").endswith(
        "Not for commercial use."
    )
    assert "License of this adapter: mit.\n" in card_of(adapter_of(license="mit"))


def test_controls_are_described_as_they_are():
    usual = words(card_of(adapter_of(evictor="kvzip")))
    assert (
        "Before anything is dropped, 4 restore tokens read the full cache, in one pass through "
        "the model" in usual
    )
    evicted = words(card_of(adapter_of(restore_from="evicted")))
    assert (
        "Before anything is dropped" not in evicted
        and "read only what eviction has left, in one pass" in evicted
    )
    bare = card_of(adapter_of(targets=(), evictor="kvzip"))
    assert "through the model without a LoRA, and leave 4" in words(
        bare
    ) and "The LoRA is" not in words(bare)
    assert "lora" not in yaml.safe_load(bare.split("---\n")[1])["tags"]
    assert "lora" in yaml.safe_load(card_of(adapter_of()).split("---\n")[1])["tags"]


def test_nested_tokens_are_mentioned():
    assert "so the first k of the 4 work alone" in words(
        card_of(adapter_of(settings={"nested": True}))
    )
    for settings in ({"nested": False}, {"lr": 1.0}, None):
        assert "work alone" not in card_of(adapter_of(settings=settings))


def test_settings_are_shown_but_for_those_that_change_no_adapter():
    settings = {field.name: field.default for field in fields(TrainConfig)}
    shown = rows(card_of(adapter_of(settings=settings)), "Training")
    assert set(shown) == set(settings) - {"keep", "checkpoint_every"}
    assert shown["nested"] == ["no"] and shown["targets"][0].startswith("q_proj, k_proj, ")
    assert rows(card_of(adapter_of(settings={"targets": []})), "Training") == {"targets": ["none"]}


def test_the_length_of_answers_is_a_setting_only_where_answers_were_made():
    own = {"source": "A", "answers": "written by this model when the data was built"}
    for data, shown in (([own], False), ([own, {"source": "B"}], True), (None, True)):
        card = card_of(adapter_of(settings={"max_new_tokens": 512, "lr": 1.0}, data=data))
        assert ("max_new_tokens" in card) == shown


def test_rows_of_data_are_shown_whole():
    data = [
        {
            "source": "pg19",
            "title": "PG-19",
            "license": "Apache-2.0",
            "hub_id": "deepmind/pg19",
            "seed": 0,
        },
        {"source": "mine", "examples": 3, "contexts": 1, "license": ["CC BY 4.0", "CC0"]},
    ]
    text = card_of(adapter_of(data=data))
    assert "| source | examples | contexts | license | title | hub id | seed |" in text
    assert rows(text, "Data and license") == {
        "pg19": ["not recorded", "not recorded", "Apache-2.0", "PG-19", "deepmind/pg19", "0"],
        "mine": ["3", "1", "CC BY 4.0, CC0", "", "", ""],
    }


def test_a_folder_stays_a_folder_wherever_one_looks_from(tmp_path, monkeypatch):
    (tmp_path / "models" / "m1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    adapter = adapter_of("models/m1")
    adapter.save_pretrained("adapter")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = RestoreAdapter.from_pretrained(adapter.model, tmp_path / "adapter")
    assert again.card.local and not is_on_hub(again.card)
    text = card_of(again)
    assert "base_model" not in text.split("---\n")[1] and "| models/m1, a local folder |" in text
    assert "The base model was loaded from a local folder" in text
    hub, namesake = adapter_of(), tmp_path / "elsewhere" / "Qwen" / "Qwen3-tiny"
    namesake.mkdir(parents=True)
    assert hub.card.local is False and is_on_hub(hub.card)
    assert adapter_of().card.local  # transformers would take the folder too


@pytest.mark.parametrize(
    ("span", "here", "there"),
    [((0.2, 0.5), 0.2, 0.8), ((0.01, 0.05), 0.05, 0.95), (None, 0.1, 0.9)],
)
def test_both_examples_use_a_ratio_of_the_training(span, here, there):
    text = card_of(adapter_of(evictor="kvzip", ratio_range=span))
    assert float(re.search(r"\n    ratio=(.*),\n", text)[1]) == here
    assert float(re.search(r"compression_ratio=([\d.]+),", text)[1]) == there
