"""What may be done with an adapter, and the authors' adapters, whose licence and conventions are told."""

import shutil
import warnings

import pytest
from conftest import build_model
from hub_world import local_hub

from restorekv import hub, licences
from restorekv.compression import compress, load_adapter, method
from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.restore import RestoreAdapter

UNKNOWN = "unknown: ask whoever trained it"


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (["CC BY-NC 4.0", "Apache-2.0", "ODC-BY"], "cc-by-nc-4.0"),  # the paper's mixture
        (["Apache-2.0", "ODC-BY", "CC BY 4.0", "cc0-1.0", "public domain", "MIT License"], "apache-2.0"),
        (["mit"], "apache-2.0"),
        (["cc-by-sa-4.0", "mit"], "cc-by-sa-4.0"),
        (["cc-by-nc-sa-4.0", "cc-by-nc-4.0", "cc-by-sa-4.0"], "cc-by-nc-sa-4.0"),
        (["cc-by-nc-4.0", "my own"], UNKNOWN),
        (["mit", None], UNKNOWN),
        (["mit", ""], UNKNOWN),
        (["cc-by-nd-4.0"], UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_the_most_restrictive_licence_counts(of, expected):
    assert licences.of_data(of) == licences.of_data(reversed(of)) == expected


def test_names_of_licences():
    assert [licences.identifier(name) for name in ("CC_BY NC-4.0", "Apache License 2.0", "ODC-By 1.0", "Mine")] == [
        "cc-by-nc-4.0", "apache-2.0", "odc-by", "Mine",
    ]  # fmt: skip
    assert licences.title("cc-by-nc-sa-4.0") == "CC BY-NC-SA 4.0" and licences.title("mit") == "mit"
    for name in ("cc-by-nc-4.0", "CC BY-NC-ND 3.0", "Llama non-commercial", "some NC licence", "noncommercial"):
        assert licences.non_commercial(name)
    for name in ("cc-by-4.0", "ncsa", "isc", "apache-2.0", "unknown: ask whoever trained it", "", None):
        assert not licences.non_commercial(name)
    assert licences.of_rows([{"licence": ["MIT", "CC0"]}, {"source": "a"}, {"licence": 3}]) == [
        "mit",
        "cc0-1.0",
        None,
        None,
    ]
    assert licences.of_rows(None) == []


def test_names_of_the_published():
    assert hub.published_name("Qwen/Qwen3-8B", "kvzip") == "higokri/RestoreKV-Qwen3-8B"
    assert hub.published_name("/models/Llama-3.1-8B-Instruct/", "kvzip+:chunk=64") == (
        "higokri/RestoreKV-Llama-3.1-8B-Instruct_plus"
    )
    for model, evictor in (
        ("Qwen/Qwen3-4B", "kvzip"),
        ("Qwen/Qwen3-8B", "snapkv"),
        ("bundled", "kvzip"),
        ("", "kvzip"),
    ):
        with pytest.raises(AdapterError) as caught:
            hub.published_name(model, evictor)
        told = str(caught.value)
        assert "Llama-3.1-8B-Instruct and Qwen3-8B, each for kvzip and kvzip+" in told and ". " not in told


@pytest.fixture
def model():
    model = build_model("qwen3")
    model.config._name_or_path = "Qwen/Qwen3-8B"
    return model


def published(model, folder, readme=None):
    """The files that the authors publish: no restorekv.json."""
    RestoreAdapter.create(model, 4, rank=2).save_pretrained(folder)
    (folder / "restorekv.json").unlink()
    (folder / "README.md").unlink()
    if readme:
        (folder / "README.md").write_text(readme)
    return folder


def told(call):
    """The result, and our warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(each.message) for each in caught if issubclass(each.category, RestoreKVWarning)]


NC = "---\nlicense: cc-by-nc-4.0\nbase_model: Qwen/Qwen3-8B\n---\n# RestoreKV\n"


def test_published_by_name_through_the_hub(model, tiny_tokenizer, tmp_path, monkeypatch):
    name = "higokri/RestoreKV-Qwen3-8B_plus"
    folder = published(model, tmp_path / "files", NC)
    with local_hub(monkeypatch, tmp_path / "cache") as there:
        there.private[name], there.commits[name] = False, [{p.name: p.read_bytes() for p in folder.iterdir()}]
        plus = method("kvzip+")
        adapter, heard = told(lambda: load_adapter(model, "published", plus))
        assert adapter.card.source == name and adapter.card.evictor == "kvzip+"
        assert len(heard) == 2 and all(line.count("higokri/RestoreKV-Qwen3-8B_plus") == 1 for line in heard)
        assert "CC BY-NC 4.0: not for commercial use" in heard[0] and "YaRN" in heard[0]
        assert "prefix_policy='counted'" in heard[1]
        with pytest.raises(AdapterError, match="no published adapter for Qwen/Qwen3-8B and snapkv"):
            load_adapter(model, "published", method("snapkv"))
        with pytest.raises(AdapterError, match="nor can it be fetched"):
            load_adapter(model, "published", method("kvzip"))
        text = "the code of the red house is seven " * 20
        small, heard = told(
            lambda: compress(
                model, tiny_tokenizer, text, evictor="kvzip+", ratio=0.3, adapter="published", prefix_policy="counted"
            )
        )
        assert small.manifest.adapter["evictor"] == "kvzip+" and small.manifest.restore_tokens == 4
        assert len(heard) == 1 and "not for commercial use" in heard[0]


@pytest.mark.parametrize(
    ("place", "readme", "source", "licence"),
    [
        ("RestoreKV-Qwen3-8B", None, "higokri/RestoreKV-Qwen3-8B", "cc-by-nc-4.0"),
        (
            "RestoreKV-Llama-3.1-8B-Instruct_plus/v1",
            None,
            "higokri/RestoreKV-Llama-3.1-8B-Instruct_plus",
            "cc-by-nc-4.0",
        ),
        (
            "models--higokri--RestoreKV-Qwen3-8B_plus/snapshots/abc",
            NC,
            "higokri/RestoreKV-Qwen3-8B_plus",
            "cc-by-nc-4.0",
        ),
        ("copy", NC, None, "cc-by-nc-4.0"),
        ("copy", "---\nlicense: mit\n---\n", None, "mit"),
        ("copy", "---\nlicense: [a\n---\n", None, None),
        ("copy", "no front matter", None, None),
        ("models--else--RestoreKV-Qwen3-8B/snapshots/abc", None, None, None),
    ],
)
def test_copies_are_known(model, tmp_path, place, readme, source, licence):
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    adapter, heard = told(lambda: RestoreAdapter.from_pretrained(model, published(model, tmp_path / place, readme)))
    assert (adapter.card.source, adapter.card.licence) == (source, licence)
    assert len(heard) == (licence == "cc-by-nc-4.0") and all(
        "CC BY-NC 4.0: not for commercial" in line for line in heard
    )
    assert adapter.card.evictor == (source and ("kvzip+" if "_plus" in source else "kvzip"))


def test_a_copy_keeps_its_licence(model, tmp_path):
    """Saved, trained on, published: a non-commercial adapter does not become another one."""
    folder = published(model, tmp_path / "RestoreKV-Qwen3-8B", NC)
    adapter, _ = told(lambda: RestoreAdapter.from_pretrained(model, folder))
    adapter.save_pretrained(tmp_path / "renamed")
    again, heard = told(lambda: RestoreAdapter.from_pretrained(model, tmp_path / "renamed"))
    assert again.card == adapter.card and "not for commercial use" in heard[0]
    readme = (tmp_path / "renamed" / "README.md").read_text()
    assert "A copy of higokri/RestoreKV-Qwen3-8B" in readme and "license: cc-by-nc-4.0" in readme
    again.describe(evictor="kvzip", data=[{"source": "mine", "licence": "mit"}])
    assert again.card.licence == "cc-by-nc-4.0"
    again.describe(evictor="kvzip")
    assert again.card.licence == "cc-by-nc-4.0"
    with pytest.raises(AdapterError, match=r"recorded as, or trained on, CC BY-NC 4.0; mit would allow more"):
        again.push_to_hub("me/mine", licence="mit")


def test_licences_of_our_own_adapters(model, tmp_path):
    adapter = RestoreAdapter.create(model, 4, rank=2)

    def loaded(place, **record):
        adapter.describe(evictor="kvzip", prefix_policy="free", **record)
        adapter.save_pretrained(tmp_path / place)
        return told(lambda: RestoreAdapter.from_pretrained(model, tmp_path / place))

    for place, record in {"free": {"data": [{"licence": "mit"}]}, "none": {}}.items():
        again, heard = loaded(place, **record)
        assert not heard and again.card.licence == ("apache-2.0" if record else None)
    again, heard = loaded("strict", data=[{"licence": "CC BY-NC 4.0"}])
    assert heard == [f"The adapter {tmp_path / 'strict'} is licensed CC BY-NC 4.0: not for commercial use."]
    again, heard = loaded("mixed", data=[{"licence": "CC BY-NC 4.0"}, {"source": "mine"}])
    assert again.card.licence == UNKNOWN and "was trained on data licensed CC BY-NC 4.0" in heard[0]
    shutil.copytree(tmp_path / "free", tmp_path / "changed")
    (tmp_path / "changed" / "README.md").write_text(NC)
    again, heard = told(lambda: RestoreAdapter.from_pretrained(model, tmp_path / "changed"))
    assert again.card.licence == "cc-by-nc-4.0" and len(heard) == 1
