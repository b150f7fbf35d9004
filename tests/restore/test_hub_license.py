"""What the license of an adapter allows, and the authors' adapters, which lead to warnings.

Loading does not read a license. Training, saving and publishing do.
"""

import shutil
import warnings
from dataclasses import replace

import pytest

from restorekv import CompressionConfig
from restorekv.compression.adapters import load_adapter
from restorekv.compression.eviction import make_compressor
from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.pipeline import compress
from restorekv.restore import hub, publish
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.adapter_file import read_adapter
from restorekv.restore.licenses import (
    HUB,
    KNOWN,
    PERMISSIVE,
    UNKNOWN,
    combine_licenses,
    find_base_license,
    forbids_commercial_use,
    inherit_license,
    list_licenses,
    normalize_license,
)
from restorekv.restore.model_card import parse_license
from tests.helpers.cards import adapter_of, card_of
from tests.helpers.hub_world import LICENSES, local_hub
from tests.helpers.models import build_model


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (["CC BY-NC 4.0", "Apache-2.0", "ODC-BY"], "cc-by-nc-4.0"),  # the paper's mixture
        (
            ["Apache-2.0", "ODC-BY", "CC BY 4.0", "cc0-1.0", "public domain", "MIT License"],
            "apache-2.0",
        ),
        (["mit"], "apache-2.0"),
        (["cc-by-sa-4.0", "mit"], "cc-by-sa-4.0"),
        (["mit", "gpl-3.0"], "gpl-3.0"),
        (["cc-by-nc-4.0", "my own"], "cc-by-nc-4.0"),
        (["cc-by-nc-4.0", None], "cc-by-nc-4.0"),
        (["cc-by-sa-4.0", "cc-by-nc-4.0"], "cc-by-nc-4.0"),
        (["cc-by-nc-2.0", "cc-by-nc-4.0", "cc-by-nc-sa-3.0"], "cc-by-nc-sa-3.0"),
        (["my own non-commercial license"], "my own non-commercial license"),
        (["cc-by-sa-3.0", "cc-by-sa-4.0"], UNKNOWN),
        (["cc-by-sa-3.0", None], UNKNOWN),
        (["mit", None], UNKNOWN),
        (["mit", ""], UNKNOWN),
        (["my own"], UNKNOWN),
        (["other"], UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_the_license_of_the_data_is_passed_on(of, expected):
    rows = [{"license": name} for name in of]
    assert (
        combine_licenses(list_licenses(rows))
        == combine_licenses(list_licenses(rows[::-1]))
        == expected
    )


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("cc-by-sa-4.0", "cc-by-sa-4.0"),
        ("gpl-3.0", "gpl-3.0"),
        ("llama3.1", "llama3.1"),
        ("cc-by-nd-4.0", "cc-by-nd-4.0"),
        ("cc-by-nc-4.0", "cc-by-nc-4.0"),
        ("my own", UNKNOWN),
        (UNKNOWN, UNKNOWN),
        ("MIT", "apache-2.0"),
        (None, "apache-2.0"),
    ],
)
def test_the_license_of_the_first_adapter_is_passed_on(before, expected):
    card = replace(adapter_of().card, license=before)
    assert inherit_license(card, [{"license": "cc0-1.0"}]) == expected
    assert inherit_license(card, [{"license": "cc-by-nc-2.0"}]).startswith("cc-by-nc")


def test_googles_terms_are_passed_on_to_adapters_of_gemma():
    card = adapter_of("gemma3-270m").card
    permissive = [{"license": "apache-2.0"}]
    assert find_base_license(card) == inherit_license(card, permissive) == "gemma"
    assert inherit_license(card, [{"license": "cc-by-nc-4.0"}]) == "cc-by-nc-4.0"
    assert publish.decide_license(card, None).license == "gemma"
    assert publish.decide_license(card, "Gemma").license == "gemma"
    with pytest.raises(AdapterError, match=r"licensed gemma, whose terms adapters inherit; mit"):
        publish.decide_license(card, "mit")
    with pytest.raises(AdapterError, match="publish it under gemma"):
        publish.decide_license(card, None, "---\nlicense: apache-2.0\n---\n")


@pytest.mark.parametrize(
    ("model_type", "expected"), [("gemma3_text", "gemma"), ("gemma4_text", None), ("llama", None)]
)
def test_gemma_is_known_under_other_names(model_type, expected):
    card = adapter_of("someone/model").card
    weights = {**card.weights, "architecture": {"model_type": model_type}}
    assert find_base_license(replace(card, weights=weights)) == expected
    assert find_base_license(replace(card, weights=None)) is None


def test_the_model_card_repeats_googles_terms():
    text = card_of(adapter_of("gemma3-270m"))
    notice = (
        "Gemma is provided under and subject to the Gemma Terms of Use found at "
        "ai.google.dev/gemma/terms"
    )
    assert notice in text and "base_model: google/gemma-3-270m" in text
    assert "Gemma" not in card_of(adapter_of())


def test_licenses_are_known_by_the_hubs_names():
    assert HUB == LICENSES and HUB | {"public-domain", "curl"} == KNOWN
    assert all(normalize_license(name.upper()) == name for name in KNOWN)
    others = {
        "CC_BY NC-4.0": "cc-by-nc-4.0",
        "Apache License 2.0": "apache-2.0",
        "ODC-By 1.0": "odc-by",
        "CC0": "cc0-1.0",
        "unknown: ask whoever trained it": UNKNOWN,
        "Mine": "Mine",
        "not CC BY 4.0": "not CC BY 4.0",
    }
    assert {name: normalize_license(name) for name in others} == others
    rows = [{"license": ["MIT", "CC0"]}, {"source": "a"}, {"license": 3}]
    assert list_licenses(rows) == ["mit", "cc0-1.0", UNKNOWN, UNKNOWN] and list_licenses(None) == []


def test_non_commercial_licenses_are_recognized():
    for name in (
        "cc-by-nc-4.0",
        "CC BY-NC-ND 3.0",
        "(CC BY-NC)",
        "Llama non-commercial",
        "some NC license",
        "noncommercial",
        "fair-noncommercial-research-license",
        "not for commercial use",
        "https://creativecommons.org/licenses/by-nc/4.0/",
    ):
        assert forbids_commercial_use(name)
    assert {name for name in LICENSES if "nc" in name.split("-")} <= {
        name for name in LICENSES if forbids_commercial_use(name)
    }
    assert not any(
        forbids_commercial_use(name)
        for name in (*PERMISSIVE, "unknown: ask whoever trained it", "", None)
    )


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("license: MIT", "mit"),
        ("license: [mit, cc-by-nc-4.0]", "cc-by-nc-4.0"),
        ("license: [mit, cc-by-sa-4.0, apache-2.0]", "cc-by-sa-4.0"),
        ("license: [gpl-3.0, cc-by-nc-4.0]", "cc-by-nc-4.0"),
        ("license: unknown", None),
        ("license: other\nlicense_name: my-own", "my-own"),
        ("license: [a", None),
        ("- license", None),
        ("a: b", None),
    ],
)
def test_the_license_of_a_readme(front, expected):
    assert parse_license(f"---\n{front}\n---\n# Card\n") == expected
    assert parse_license(f"# Card\n{front}\n") is None


def test_names_of_the_published():
    assert hub.find_published_name("Qwen/Qwen3-8B", "kvzip") == "higokri/RestoreKV-Qwen3-8B"
    assert hub.find_published_name("/models/Llama-3.1-8B-Instruct/", "kvzip+:chunk=64") == (
        "higokri/RestoreKV-Llama-3.1-8B-Instruct_plus"
    )
    for model, evictor in (
        ("Qwen/Qwen3-4B", "kvzip"),
        ("Qwen/Qwen3-8B", "snapkv"),
        ("tiny", "kvzip"),
        ("", "kvzip"),
    ):
        with pytest.raises(AdapterError) as caught:
            hub.find_published_name(model, evictor)
        message = str(caught.value)
        assert (
            "Llama-3.1-8B-Instruct and Qwen3-8B, each for kvzip and kvzip+" in message
            and ". " not in message
        )


@pytest.fixture
def model():
    model = build_model("qwen3")
    model.config._name_or_path = "Qwen/Qwen3-8B"
    return model


def published(model, folder, readme=None):
    """Write an adapter's files as the authors publish them, without restorekv.json; return the
    folder.
    """
    RestoreAdapter.create(model, 4, rank=2).save_pretrained(folder)
    (folder / "restorekv.json").unlink()
    (folder / "README.md").unlink()
    if readme:
        (folder / "README.md").write_text(readme)
    return folder


def with_warnings(call):
    """Return the result of a call, and our warnings during it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [
        str(each.message) for each in caught if issubclass(each.category, RestoreKVWarning)
    ]


NC = "---\nlicense: cc-by-nc-4.0\nbase_model: Qwen/Qwen3-8B\n---\n# RestoreKV\n"


def test_published_by_name_through_the_hub(model, tiny_tokenizer, tmp_path, monkeypatch):
    name = "higokri/RestoreKV-Qwen3-8B_plus"
    folder = published(model, tmp_path / "files", NC)
    with local_hub(monkeypatch, tmp_path / "cache") as there:
        there.private[name], there.commits[name] = (
            False,
            [{p.name: p.read_bytes() for p in folder.iterdir()}],
        )
        plus = make_compressor("kvzip+")
        adapter, heard = with_warnings(lambda: load_adapter(model, "published", plus))
        assert adapter.card.source == name and adapter.card.evictor == "kvzip+"
        assert len(heard) == 2 and all(
            line.count("higokri/RestoreKV-Qwen3-8B_plus") == 1 for line in heard
        )
        assert "YaRN" in heard[0] and "prefix_policy='counted'" in heard[1]
        with pytest.raises(AdapterError, match="no published adapter for Qwen/Qwen3-8B and snapkv"):
            load_adapter(model, "published", make_compressor("snapkv"))
        with pytest.raises(AdapterError, match="nor can it be fetched"):
            load_adapter(model, "published", make_compressor("kvzip"))
        text = "the code of the red house is seven " * 20
        small, heard = with_warnings(
            lambda: compress(
                model,
                tiny_tokenizer,
                text,
                evictor="kvzip+",
                ratio=0.3,
                adapter="published",
                config=CompressionConfig(prefix_policy="counted"),
            )
        )
        assert small.manifest.adapter["evictor"] == "kvzip+" and small.manifest.restore_tokens == 4
        assert len(heard) == 1 and "YaRN" in heard[0]


@pytest.mark.parametrize(
    ("place", "readme", "source", "license"),
    [
        ("RestoreKV-Qwen3-8B", None, "Qwen3-8B", "cc-by-nc-4.0"),
        (
            "RestoreKV-Llama-3.1-8B-Instruct_plus/v1",
            None,
            "Llama-3.1-8B-Instruct_plus",
            "cc-by-nc-4.0",
        ),
        (
            "models--higokri--RestoreKV-Qwen3-8B_plus/snapshots/abc",
            NC,
            "Qwen3-8B_plus",
            "cc-by-nc-4.0",
        ),
        ("copy", NC, None, "cc-by-nc-4.0"),
        ("copy", "---\nlicense: mit\n---\n", None, "mit"),
        ("copy", "---\nlicense: [a\n---\n", None, None),
        ("copy", "no front matter", None, None),
        ("models--else--RestoreKV-Qwen3-8B/snapshots/abc", None, None, None),
    ],
)
def test_copies_are_known(model, tmp_path, place, readme, source, license):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    folder = published(model, tmp_path / place, readme)
    adapter, heard = with_warnings(lambda: RestoreAdapter.from_pretrained(model, folder))
    assert adapter.card.source == (source and f"higokri/RestoreKV-{source}") and not heard
    assert adapter.card.evictor == (source and ("kvzip+" if "_plus" in source else "kvzip"))
    assert adapter.card.license is None  # nothing asks for it yet
    adapter.save_pretrained(tmp_path / "saved")
    assert adapter.card.license == read_adapter(tmp_path / "saved").card.license == license
    _, heard = with_warnings(
        lambda: adapter.record_training(evictor="kvzip", data=[{"license": "mit"}])
    )
    expected = ["The adapter is licensed cc-by-nc-4.0: not for commercial use."]
    assert heard == (expected if license == "cc-by-nc-4.0" else [])


def test_loading_reads_weights_and_one_record(model, tmp_path, monkeypatch):
    RestoreAdapter.create(model, 4, rank=2).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").write_text(NC)
    monkeypatch.setattr(
        publish, "read_bytes", lambda path, *_: pytest.fail(f"{path} was read to load an adapter")
    )
    adapter, heard = with_warnings(
        lambda: RestoreAdapter.from_pretrained(model, tmp_path / "adapter", evictor="kvzip")
    )
    assert adapter.card.license is None and not heard


def test_a_copy_keeps_its_license(model, tmp_path):
    """A non-commercial adapter stays so when it is saved, trained further and published."""
    folder = published(model, tmp_path / "RestoreKV-Qwen3-8B", NC)
    adapter = RestoreAdapter.from_pretrained(model, folder)
    adapter.save_pretrained(tmp_path / "renamed")
    again = RestoreAdapter.from_pretrained(model, tmp_path / "renamed")
    assert again.card == adapter.card and again.card.license == "cc-by-nc-4.0"
    readme = (tmp_path / "renamed" / "README.md").read_text()
    assert "A copy of higokri/RestoreKV-Qwen3-8B" in readme and "license: cc-by-nc-4.0" in readme
    again.record_training(evictor="kvzip", data=[{"source": "mine", "license": "mit"}])
    assert again.card.license == "cc-by-nc-4.0"
    again.record_training(evictor="kvzip")
    assert again.card.license == "cc-by-nc-4.0"
    with pytest.raises(
        AdapterError, match=r"recorded as, or trained on, cc-by-nc-4.0; mit allows more"
    ):
        again.push_to_hub("me/mine", license="mit")


def test_licenses_of_our_own_adapters(model, tmp_path):
    adapter = RestoreAdapter.create(model, 4, rank=2)

    def train(place, **record):
        """Return an adapter that was trained, saved and loaded, and the warnings of training."""
        _, heard = with_warnings(
            lambda: adapter.record_training(evictor="kvzip", prefix_policy="free", **record)
        )
        adapter.save_pretrained(tmp_path / place)
        again, loading = with_warnings(
            lambda: RestoreAdapter.from_pretrained(model, tmp_path / place)
        )
        assert not loading
        return again, heard

    for place, record in {"free": {"data": [{"license": "mit"}]}, "none": {}}.items():
        again, heard = train(place, **record)
        assert not heard and again.card.license == ("apache-2.0" if record else None)
    is_licensed = "The adapter is licensed cc-by-nc-4.0: not for commercial use."
    again, heard = train("strict", data=[{"license": "CC BY-NC 4.0"}])
    assert heard == [is_licensed]
    again, heard = train("mixed", data=[{"license": "CC BY-NC 4.0"}, {"source": "mine"}])
    assert again.card.license == "cc-by-nc-4.0" and heard == [is_licensed]
    again, heard = train("later", data=[{"license": "mit"}])
    assert again.card.license == "cc-by-nc-4.0" and heard == [is_licensed]
    again, heard = train("chosen", data=[{"license": "CC BY-NC-ND 4.0"}], license="mit")
    assert "was trained on data licensed cc-by-nc-nd-4.0" in heard[0]
    with pytest.raises(AdapterError, match=r"cc-by-nc-nd-4\.0; mit allows more"):
        again.push_to_hub("me/mine")
    shutil.copytree(tmp_path / "free", tmp_path / "changed")
    (tmp_path / "changed" / "README.md").write_text(NC)
    again = RestoreAdapter.from_pretrained(model, tmp_path / "changed")
    with pytest.raises(AdapterError, match=r"recorded as, or trained on, cc-by-nc-4\.0; mit"):
        again.push_to_hub("me/mine", license="mit")
    assert again.card.license == "cc-by-nc-4.0"
