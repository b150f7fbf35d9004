"""What a model card says of licences, controls, settings, data and the base model is true of this very adapter."""

import re
from dataclasses import fields

import pytest
import yaml

from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.model_card import is_hub_id
from restorekv.train.config import TrainConfig
from tests.restore.test_hub_card import adapter_of, card_of, rows

NC, SA = "CC BY-NC 4.0", "CC BY-SA 4.0"


def words(text):
    """One line, as a reader sees it."""
    return " ".join(text.split())


def told_of(*names, **record):
    """The sentences on the licence of an adapter with one source, A, B and so on, under each of the licences."""
    data = [{"source": source, "licence": name} for source, name in zip("ABCD", names, strict=False)]
    text = card_of(adapter_of(data=data, **record))
    return words(text.split("Licence of this adapter: ")[1].split("\n## ")[0])


UNCLEAR = "Data of unknown licence, or of one from which none follows for an adapter: "
NAMED = "Name the authors of the data that asks for it: "


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (["mit", "Apache-2.0"], "apache-2.0. All of the data has permissive licences."),
        (["mit", "CC BY 4.0", "ODC-By 1.0"],
         f"apache-2.0. All of the data has permissive licences. {NAMED}B (CC BY 4.0), C (odc-by)."),
        ([SA], f"{SA}. It is that of the data. {NAMED}A ({SA})."),
        (["mit", NC], f"{NC}. It is the strictest one of the data. {NAMED}B ({NC}). Not for commercial use."),
        ([SA, NC], "CC BY-NC-SA 4.0. A part of the data asks for the same licence and a part forbids commercial use; "
         f"this one does both. {NAMED}A ({SA}), B ({NC}). Not for commercial use."),
        ([NC, None], f"{NC}. It is the strictest one of the data. {UNCLEAR}B (not recorded). {NAMED}A ({NC}). "
         "Not for commercial use."),
        (["mit", "gpl-3.0", "my own"], "unknown: ask whoever trained it. "
         f"{UNCLEAR}B (gpl-3.0), C (my own)."),
        (["CC BY-NC-ND 4.0"], f"unknown: ask whoever trained it. {UNCLEAR}A (cc-by-nc-nd-4.0). "
         f"{NAMED}A (CC BY-NC-ND 4.0). Not for commercial use."),
        ([["mit", SA], NC, None], "CC BY-NC-SA 4.0. A part of the data asks for the same licence and a part forbids "
         f"commercial use; this one does both. {UNCLEAR}C (not recorded). {NAMED}A ({SA}), B ({NC}). "
         "Not for commercial use."),
    ],
)  # fmt: skip
def test_the_licence_is_explained_by_its_data(of, told):
    assert told_of(*of) == told


def test_a_chosen_licence_is_told_as_one():
    chosen = "It was chosen by whoever published the adapter; from the data follows apache-2.0."
    assert told_of("mit", licence="MIT") == f"mit. {chosen}"
    old = told_of(NC, None, licence="unknown: ask whoever trained it")  # as recorded before
    assert old.startswith("unknown") and old.endswith("Not for commercial use.")
    adapter = adapter_of(licence="mit")
    assert "Licence of this adapter: mit.\n" in card_of(adapter)


def test_controls_are_described_as_they_are():
    usual = words(card_of(adapter_of(evictor="kvzip")))
    assert (
        "Before anything is dropped, 4 restore tokens read the full cache, in one pass through the model with this"
        in (usual)
    )
    evicted = words(card_of(adapter_of(restore_from="evicted")))
    assert "Before anything is dropped" not in evicted and "read only what eviction has left, in one pass" in evicted
    bare = card_of(adapter_of(targets=(), evictor="kvzip"))
    assert "through the model without a LoRA, and leave 4" in words(bare) and "The LoRA is" not in words(bare)
    assert "lora" not in yaml.safe_load(bare.split("---\n")[1])["tags"]
    assert "lora" in yaml.safe_load(card_of(adapter_of()).split("---\n")[1])["tags"]


def test_nested_tokens_are_told():
    nested = (
        "In training the first k of the 4 restore tokens were used, k drawn anew each time, so the first k work alone"
    )
    assert nested in words(card_of(adapter_of(settings={"nested": True})))
    for settings in ({"nested": False}, {"lr": 1.0}, None):
        assert "work alone" not in card_of(adapter_of(settings=settings))


def test_settings_are_told_in_words():
    settings = {field.name: field.default for field in fields(TrainConfig)}
    told = rows(card_of(adapter_of(settings=settings)), "Training")
    assert len(told) == len(settings) - 2 and not {"keep", "checkpoint every"} & set(told)
    plain = ("evictor", "allocation", "restore from", "lr", "kl", "max new tokens", "warmup", "clip", "nested")
    assert set(told) & set(plain) == {"evictor"}
    assert told["number of restore tokens in use drawn from 1 to n"] == ["no"]
    assert told["layers with a LoRA"][0].startswith("q_proj, k_proj, ")
    assert rows(card_of(adapter_of(settings={"targets": []})), "Training") == {"layers with a LoRA": ["none"]}


def test_the_length_of_answers_is_a_setting_only_where_answers_were_made():
    own = {"source": "A", "answers": "written by this model when the data was built"}
    for data, shown in (([own], False), ([own, {"source": "B"}], True), (None, True)):
        card = card_of(adapter_of(settings={"max_new_tokens": 512, "lr": 1.0}, data=data))
        assert ("longest answer" in card) == shown


def test_rows_of_data_are_told_whole():
    data = [
        {"source": "pg19", "title": "PG-19", "licence": "Apache-2.0", "hub_id": "deepmind/pg19", "seed": 0},
        {"source": "mine", "examples": 3, "contexts": 1, "licence": ["CC BY 4.0", "CC0"]},
    ]
    text = card_of(adapter_of(data=data))
    assert "| source | examples | contexts | licence | title | hub id | seed |" in text
    assert rows(text, "Data and licence") == {
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
    assert again.card.local and not is_hub_id(again.card)
    text = card_of(again)
    assert "base_model" not in text.split("---\n")[1] and "| models/m1, a folder of whoever trained it |" in text
    assert "The base model was loaded from a folder; give the place where you have it." in text
    hub, namesake = adapter_of(), tmp_path / "elsewhere" / "Qwen" / "Qwen3-tiny"
    namesake.mkdir(parents=True)
    assert hub.card.local is False and is_hub_id(hub.card)
    assert adapter_of().card.local  # transformers would take the folder too


@pytest.mark.parametrize(
    ("span", "here", "there"), [((0.2, 0.5), 0.2, 0.8), ((0.01, 0.05), 0.05, 0.95), (None, 0.1, 0.9)]
)
def test_both_examples_use_a_ratio_of_the_training(span, here, there):
    text = card_of(adapter_of(evictor="kvzip", ratio_range=span))
    assert float(re.search(r"\n    ratio=(.*),\n", text)[1]) == here
    assert float(re.search(r"compression_ratio=([\d.]+),", text)[1]) == there
