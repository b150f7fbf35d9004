"""What may be done with an adapter, and the authors' adapters, whose licence and conventions are told."""

import shutil
import warnings

import pytest

from restorekv.compression.compressor import compress, load_adapter, make_compressor
from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.restore import hub, license
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.hub_world import LICENCES, local_hub
from tests.helpers.models import build_model

UNKNOWN = "unknown: ask whoever trained it"


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (["CC BY-NC 4.0", "Apache-2.0", "ODC-BY"], "cc-by-nc-4.0"),  # the paper's mixture
        (["Apache-2.0", "ODC-BY", "CC BY 4.0", "cc0-1.0", "public domain", "MIT License"], "apache-2.0"),
        (["mit"], "apache-2.0"),
        (["cc-by-sa-4.0", "mit"], "cc-by-sa-4.0"),
        (["cc-by-nc-sa-4.0", "cc-by-nc-4.0", "cc-by-sa-4.0"], "cc-by-nc-sa-4.0"),
        (["cc-by-nc-4.0", "my own"], "cc-by-nc-4.0"),
        (["cc-by-nc-4.0", None], "cc-by-nc-4.0"),
        (["cc-by-nc-sa-3.0", "gpl-3.0"], "cc-by-nc-sa-3.0"),
        (["cc-by-sa-3.0", None], UNKNOWN),
        (["cc-by-sa-4.0", "cc-by-nc-4.0"], "cc-by-nc-sa-4.0"),
        (["cc-by-sa-3.0", "cc-by-nc-2.0", None], "cc-by-nc-sa-4.0"),
        (["odbl", "cc-by-nc-4.0"], "cc-by-nc-sa-4.0"),
        (["cc-by-nc-2.0", "cc-by-nc-4.0", "cc-by-nc-3.0"], "cc-by-nc-4.0"),
        (["cc-by-sa-3.0", "https://creativecommons.org/licenses/by-sa/4.0/", "odbl"], "cc-by-sa-4.0"),
        (["mit", "gpl-3.0"], UNKNOWN),
        (["llama3.1"], UNKNOWN),
        (["cc-by-nc-nd-4.0"], UNKNOWN),
        (["mit", None], UNKNOWN),
        (["mit", ""], UNKNOWN),
        (["cc-by-nd-4.0"], UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_the_most_restrictive_licence_counts(of, expected):
    assert license.of_data(of) == license.of_data(reversed(of)) == expected


NAMES = {
    "apache-2.0": ["Apache License, Version 2.0", "Apache 2", "http://www.apache.org/licenses/LICENSE-2.0.txt",
                   "https://opensource.org/license/apache-2-0", "Apache-2.0 (Apache License 2.0)"],
    "mit": ["The MIT License", "The MIT License (MIT)", "MIT Licence", "https://opensource.org/licenses/MIT"],
    "bsd-3-clause": ['BSD 3-Clause "New" or "Revised" License', "The 3-Clause BSD License",
                     "https://spdx.org/licenses/BSD-3-Clause.html"],
    "gpl-3.0": ["GPL-3.0-only", "GPL-3.0-or-later", "GPLv3", "GNU General Public License v3.0",
                "https://www.gnu.org/licenses/gpl-3.0.en.html"],
    "agpl-3.0": ["GNU Affero General Public License, Version 3"],
    "lgpl-2.1": ["GNU Lesser General Public License v2.1"],
    "gfdl": ["GFDL-1.3-or-later", "GNU Free Documentation License"],
    "mpl-2.0": ["Mozilla Public License 2.0"],
    "llama3.1": ["Llama 3.1 Community License Agreement"],
    "gemma": ["Gemma Terms of Use"],
    "odc-by": ["ODC-By 1.0", "Open Data Commons Attribution License", "https://opendatacommons.org/licenses/by/1-0/"],
    "odbl": ["ODbL-1.0", "Open Data Commons Open Database License (ODbL)", "opendatacommons.org/licenses/odbl/"],
    "pddl": ["PDDL-1.0", "Open Data Commons Public Domain Dedication and License"],
    "cc0-1.0": ["CC0", "CC0 1.0 Universal", "Creative Commons Zero v1.0 Universal",
                "https://creativecommons.org/publicdomain/zero/1.0/"],
    "public-domain": ["Public Domain", "https://creativecommons.org/publicdomain/mark/1.0/"],
    "cc-by-4.0": ["Creative Commons Attribution 4.0 International (CC BY 4.0)", "CC_BY 4",
                  "https://creativecommons.org/licenses/by/4.0/legalcode.txt"],
    "cc-by-sa-2.5": ["CC BY-SA 2.5"],
    "cc-by-sa-4.0": ["https://creativecommons.org/licenses/by-sa/4.0/", "cc-by-sa-4.0",
                     "Creative Commons Attribution-ShareAlike 4.0 International"],
    "cc-by-nc-3.0": ["CC-BY-NC-3.0-IGO", "http://creativecommons.org/licenses/by-nc/3.0/us/deed.en"],
    "cc-by-nc-sa-4.0": ["CC BY-SA-NC 4.0", "Creative Commons Attribution-NonCommercial-ShareAlike 4.0"],
    "cc-by-nc-nd-4.0": ["Creative Commons Attribution Non Commercial No Derivatives 4.0"],
}  # fmt: skip
STRANGE = ("Mine", "", "not CC BY 4.0", "CC BY", "CC BY 9.0", "MIT or GPL-3.0", "Apache-2.0 WITH LLVM-exception",
           "https://example.org/mit")  # fmt: skip


def test_licences_are_known_by_every_name():
    for name, others in NAMES.items():
        assert {other: license.identifier(other) for other in others} == dict.fromkeys(others, name)
        assert all(license.known(other) for other in others)
    for name in STRANGE:
        assert license.identifier(name) == name and not license.known(name)


def test_all_of_the_hubs_names_are_known():
    assert license.HUB == LICENCES
    assert all(license.identifier(name.upper()) == name and license.known(name) for name in LICENCES)


def test_names_of_licences():
    assert [license.identifier(name) for name in ("CC_BY NC-4.0", "Apache License 2.0", "ODC-By 1.0", "Mine")] == [
        "cc-by-nc-4.0", "apache-2.0", "odc-by", "Mine",
    ]  # fmt: skip
    assert license.title("cc-by-nc-sa-4.0") == "CC BY-NC-SA 4.0" and license.title("mit") == "mit"
    for name in (
        "cc-by-nc-4.0",
        "CC BY-NC-ND 3.0",
        "Llama non-commercial",
        "CC BY-NC",
        "some NC licence",
        "noncommercial",
    ):
        assert license.non_commercial(name)
    for name in ("cc-by-4.0", "ncsa", "isc", "apache-2.0", "unknown: ask whoever trained it", "", None):
        assert not license.non_commercial(name)
    assert license.of_rows([{"licence": ["MIT", "CC0"]}, {"source": "a"}, {"licence": 3}]) == [
        "mit",
        "cc0-1.0",
        None,
        None,
    ]
    assert license.of_rows(None) == []


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
        plus = make_compressor("kvzip+")
        adapter, heard = told(lambda: load_adapter(model, "published", plus))
        assert adapter.card.source == name and adapter.card.evictor == "kvzip+"
        assert len(heard) == 2 and all(line.count("higokri/RestoreKV-Qwen3-8B_plus") == 1 for line in heard)
        assert "CC BY-NC 4.0: not for commercial use" in heard[0] and "YaRN" in heard[0]
        assert "prefix_policy='counted'" in heard[1]
        with pytest.raises(AdapterError, match="no published adapter for Qwen/Qwen3-8B and snapkv"):
            load_adapter(model, "published", make_compressor("snapkv"))
        with pytest.raises(AdapterError, match="nor can it be fetched"):
            load_adapter(model, "published", make_compressor("kvzip"))
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
    with pytest.raises(AdapterError, match=r"recorded as, or trained on, CC BY-NC 4.0; mit allows more"):
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
    assert again.card.licence == "cc-by-nc-4.0" and "is licensed CC BY-NC 4.0" in heard[0]
    again, heard = loaded("nd", data=[{"licence": "CC BY-NC-ND 4.0"}])
    assert again.card.licence == UNKNOWN and "was trained on data licensed CC BY-NC-ND 4.0" in heard[0]
    shutil.copytree(tmp_path / "free", tmp_path / "changed")
    (tmp_path / "changed" / "README.md").write_text(NC)
    again, heard = told(lambda: RestoreAdapter.from_pretrained(model, tmp_path / "changed"))
    assert again.card.licence == "cc-by-nc-4.0" and len(heard) == 1
