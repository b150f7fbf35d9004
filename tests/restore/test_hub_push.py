"""`restorekv push`: a dry run does all but the upload, a person's README.md stays, and results of
an evaluation are published.
"""

import json
import shutil
import warnings
from dataclasses import replace

import pytest
import torch

from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.model.load import load_model
from restorekv.restore import adapter_file, publish
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.adapter_file import read_adapter
from tests.helpers.cards import adapter_of, rows
from tests.helpers.cli_world import World, build_world, cli
from tests.helpers.documents import DOCUMENTS
from tests.helpers.hub_world import local_hub

REPO = "me/mine"
NC_DATA = [{"source": "A", "license": "CC BY-NC 4.0"}]


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with local_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def folder_of(place, readme=None, **record):
    adapter_of(**record).save_pretrained(place)
    if readme is not None:
        (place / "README.md").write_text(readme)
    return place


def both(folder, repo, *more):
    """Return the results of a dry run and of a push with the same arguments."""
    return cli("push", folder, repo, "--dry-run", *more), cli("push", folder, repo, *more)


@pytest.mark.parametrize("repo", ["bad name!!", "a/b/c", "mine", "me/bad--name", ""])
def test_a_dry_run_refuses_the_names_that_push_refuses(world, hub, repo):
    for result in both(world.adapter, repo):
        assert result.code == 1 and result.out == ""
        assert (
            result.err
            == f"error: {repo!r} is not a name for a repository on the hub; pass OWNER/NAME.\n"
        )
    assert not hub.commits


def test_a_dry_run_warns_as_push_does(world, hub):
    dry, done = both(world.adapter, REPO)
    assert (
        dry.code == done.code == 0
        and dry.err == done.err
        and "others cannot load from the hub" in dry.err
    )
    assert hub.files(REPO)["README.md"].decode() == dry.out


def test_no_folder_of_this_machine_goes_up(tmp_path, hub):
    """Records of earlier versions hold the paths of a gate and of the adapter trained further."""
    secret = tmp_path / "customer"
    settings = {
        "init": f"{secret}/runs/first",
        "evictor": f"kvzip,fastkvzip:gate={secret}/gate.safetensors",
        "steps": 5,
    }
    adapter = adapter_of(name=str(secret / "model"), settings=settings)
    benchmark = f"lines:count=2,path={secret}/mine.jsonl,seed=1"
    adapter.record_results([{"benchmark": benchmark, "ratio": 0.1, "base": 1, "restored": 2}])
    adapter.card = replace(adapter.card, local=True)
    adapter.save_pretrained(tmp_path / "adapter")
    dry, done = both(tmp_path / "adapter", REPO)
    assert done.code == 0, done.err
    for content in (dry.out.encode(), *hub.files(REPO).values()):
        assert b"customer" not in content
    record = json.loads(hub.files(REPO)["restorekv.json"])
    assert (record["model"], record["settings"]["init"]) == ("model", "first")
    assert record["settings"]["evictor"] == "kvzip,fastkvzip:gate=gate.safetensors"
    assert record["results"][0]["benchmark"] == "lines:count=2,path=mine.jsonl,seed=1"
    assert str(secret) in (tmp_path / "adapter" / "restorekv.json").read_text()
    # What the hub knows keeps its name.
    adapter = adapter_of(settings={"init": "me/first", "evictor": "kvzip"})
    adapter.record_results([{"benchmark": "ruler:source=me/texts", "ratio": 0.1}])
    adapter.push_to_hub("me/other")
    record = json.loads(hub.files("me/other")["restorekv.json"])
    assert (record["model"], record["settings"]["init"]) == ("Qwen/Qwen3-tiny", "me/first")
    assert record["results"][0]["benchmark"] == "ruler:source=me/texts"


def test_no_folder_of_this_machine_goes_up_in_a_record_made_from_python(tmp_path, hub):
    gate = tmp_path / "customer" / "gate.safetensors"
    measured = f"fastkvzip:gate={gate}"
    adapter = adapter_of(evictor=f"kvzip,kvzap:gate={gate},window=8")
    row = {"benchmark": "suite", "ratio": 0.1, "evictor": measured}
    adapter.record_results([row], also_for=[measured], helps_from={measured: 0.1})
    adapter.push_to_hub(REPO)
    assert not any(b"customer" in content for content in hub.files(REPO).values())
    record = json.loads(hub.files(REPO)["restorekv.json"])
    assert record["evictor"] == "kvzip,kvzap:gate=gate.safetensors,window=8"
    assert record["also_for"] == [record["results"][0]["evictor"]] == list(record["helps_from"])
    assert record["also_for"] == ["fastkvzip:gate=gate.safetensors"]


def test_the_config_names_the_model_of_the_last_training(tmp_path, hub):
    """An adapter of a local copy is trained further on the hub's model."""
    first = adapter_of(name=str(tmp_path / "customer" / "model"), evictor="kvzip")
    first.save_pretrained(tmp_path / "first")
    model = adapter_of().model
    adapter = RestoreAdapter.from_pretrained(model, tmp_path / "first")
    adapter.record_training(evictor="kvzip")
    adapter.push_to_hub(REPO)
    config = json.loads(hub.files(REPO)["adapter_config.json"])
    assert config["base_model_name_or_path"] == "Qwen/Qwen3-tiny"


OWN = "---\nlicense: {}\n---\n# My adapter\n"


@pytest.mark.parametrize("license", ["mit", "MIT License"])
def test_the_folders_own_card_goes_up_and_its_license_is_recorded(tmp_path, hub, license):
    own = OWN.format("mit")
    folder = folder_of(tmp_path / "adapter", own, evictor="kvzip")
    dry, done = both(folder, REPO, *(["--license", license] if license != "mit" else []))
    assert dry.out == own and done.code == 0
    assert hub.files(REPO)["README.md"].decode() == own
    assert json.loads(hub.files(REPO)["restorekv.json"])["license"] == "mit"


@pytest.mark.parametrize(
    ("readme", "flags", "record", "words"),
    [
        (
            OWN.format("mit"),
            (),
            {"data": NC_DATA},
            "cc-by-nc-4.0; mit allows more, so fix the license there",
        ),
        (
            "# Mine\n",
            (),
            {"data": NC_DATA},
            "names no license, not cc-by-nc-4.0; write `license: cc-by-nc-4.0` there",
        ),
        (
            OWN.format("mit"),
            ("--license", "apache-2.0"),
            {},
            "names mit, not apache-2.0; write `license: apache-2.0`",
        ),
        ("# Mine\n", ("--license", "mit"), {}, "names no license, not mit"),
        ("---\nlicense: [a\n---\n", ("--license", "mit"), {}, "names no license, not mit"),
    ],
)
def test_an_own_card_that_contradicts_is_refused(tmp_path, hub, readme, flags, record, words):
    folder = folder_of(tmp_path / "adapter", readme, evictor="kvzip", **record)
    for result in both(folder, REPO, *flags):
        assert (
            result.code == 1
            and words in result.err
            and result.err.count("\n") == 1
            and not result.out
        )
    assert not hub.commits


@pytest.mark.parametrize(
    "license",
    [
        "cc-by-nc-4.0",
        "[mit, cc-by-nc-4.0]",
        "other\nlicense_name: mine-non-commercial",
        "cc-by-nc-sa-4.0",
    ],
)
def test_an_own_card_as_strict_as_the_data_goes_up(tmp_path, hub, license):
    folder = folder_of(tmp_path / "adapter", OWN.format(license), evictor="kvzip", data=NC_DATA)
    assert cli("push", folder, REPO, "--dry-run").code == 0


def test_a_card_on_the_hub_that_allows_more_is_refused(tmp_path, hub):
    hub.private[REPO], hub.commits[REPO] = False, [{"README.md": OWN.format("mit").encode()}]
    folder = folder_of(tmp_path / "adapter", evictor="kvzip", data=NC_DATA)
    result = cli("push", folder, REPO)
    assert result.code == 1 and "mit allows more" in result.err and len(hub.commits[REPO]) == 1


@pytest.mark.parametrize("license", ["gpl-3.0", "cc-by-nc-4.0"])
def test_the_license_of_a_card_on_the_hub_is_recorded(tmp_path, hub, license):
    own = OWN.format(license)
    hub.private[REPO], hub.commits[REPO] = False, [{"README.md": own.encode()}]
    data = [{"source": "A", "license": "mit"}]
    folder = folder_of(tmp_path / "adapter", evictor="kvzip", data=data)
    refused = cli("push", folder, REPO, "--license", "mit")
    assert refused.code == 1 and f"names {license}, not mit" in refused.err
    assert len(hub.commits[REPO]) == 1
    assert cli("push", folder, REPO).code == 0
    assert hub.files(REPO)["README.md"].decode() == own
    assert json.loads(hub.files(REPO)["restorekv.json"])["license"] == license


def test_a_second_push_does_not_change_the_license_without_being_told(tmp_path, hub):
    data = [{"source": "A", "license": "mit"}]
    folder = folder_of(tmp_path / "adapter", evictor="kvzip", data=data)
    assert cli("push", folder, REPO, "--license", "cc-by-nc-4.0").code == 0
    refused = cli("push", folder, REPO)
    assert refused.code == 1
    assert "published as cc-by-nc-4.0" in refused.err
    assert "give the license under which" in refused.err
    for license in ("cc-by-nc-4.0", "mit"):
        assert cli("push", folder, REPO, "--license", license).code == 0
        assert json.loads(hub.files(REPO)["restorekv.json"])["license"] == license


def test_without_a_record_nothing_goes_up(tmp_path):
    folder = folder_of(tmp_path / "adapter")
    (folder / "restorekv.json").unlink()
    bare = cli("push", folder, REPO)
    assert bare.code == 1 and "has no restorekv.json" in bare.err


@pytest.fixture(scope="module")
def measured(world, tmp_path_factory):
    """A folder with an adapter, and with what `eval` wrote about it and about another one."""
    root = tmp_path_factory.mktemp("measured")
    adapter = RestoreAdapter.create(load_model(world.model)[0], 4, rank=2)
    with torch.no_grad():
        for parameter in adapter.lora:
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    adapter.record_training(evictor="kvzip", prefix_policy="free", ratio_range=(0.1, 0.4))
    adapter.save_pretrained(root / "adapter")
    asked = ("--evictor", f"kvzip@{root / 'adapter'}", "--evictor", f"knorm@{world.adapter}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("restorekv.tiny.suite.draw_documents", lambda *_: DOCUMENTS)
        written = ("--out", root / "run", "--json", root / "eval.json", "--prefix-policy", "free")
        done = cli(
            "eval",
            "--model",
            world.model,
            "--benchmark",
            "tiny",
            *asked,
            "--ratio",
            0.5,
            "--ratio",
            0.25,
            *written,
        )
    assert done.code == 0, done.err
    return root


@pytest.fixture
def own(measured, tmp_path):
    return shutil.copytree(measured / "adapter", tmp_path / "adapter")


def test_results_get_into_the_folder_and_its_card(measured, own, hub):
    eval_json, before = (
        measured / "eval.json",
        {path.name: path.read_bytes() for path in own.iterdir()},
    )
    dry = cli("push", own, REPO, "--results", eval_json, "--dry-run")
    assert dry.code == 0 and {path.name: path.read_bytes() for path in own.iterdir()} == before
    assert cli("push", own, REPO, "--results", eval_json).code == 0
    cells = {
        (row["evictor"], row["restored"], row["ratio"]): row
        for row in json.loads(eval_json.read_text())["rows"]
    }
    results = read_adapter(own).card.results
    assert [row["ratio"] for row in results] == [0.5, 0.25]
    for row in results:
        cell = cells["kvzip", True, row["ratio"]]
        assert row["restored"] == round(cell["score"], 1) and row["base"] == round(
            cells["kvzip", False, row["ratio"]]["score"], 1
        )
        assert row["full"] == round(cells["full", False, 1.0]["score"], 1)
        assert (row["documents"], row["questions"]) == (2, cell["questions"])
        assert (row["dtype"], row["on_small_budget"]) == ("float32", "fewer")
        assert set(row) == {
            "benchmark",
            "ratio",
            "dtype",
            "on_small_budget",
            "base",
            "restored",
            "gain",
            "full",
            "questions",
            "documents",
        }
    assert json.loads(hub.files(REPO)["restorekv.json"])["results"] == results
    assert "| tiny | 0.5 |" in hub.files(REPO)["README.md"].decode() and "| tiny |" in dry.out
    assert rows((own / "README.md").read_text(), "Results")


def test_results_say_which_weights_were_measured(tmp_path):
    """Published in another dtype, the adapter is not quite the one whose figures the card has."""
    row = {"benchmark": "b", "ratio": 0.1, "restored": 50.0}
    adapter = adapter_of()
    adapter.card = replace(adapter.card, results=[row, row | {"ratio": 0.2}])
    folder = tmp_path / "own"
    adapter.save_pretrained(folder)
    same = cli("push", folder, REPO, "--dry-run", "--dtype", "float32").out
    assert same == cli("push", folder, REPO, "--dry-run").out and "lora dtype" not in same
    half = cli("push", folder, REPO, "--dry-run", "--dtype", "float16").out
    assert "| b | 0.1 | 50.0 | float32 |" in half and "| b | 0.2 | 50.0 | float32 |" in half
    assert "lora dtype: the type of the LoRA weights when this was measured" in half
    assert "in the file they are float16." in half
    # What was measured in float32 stays so when the weights change once more.
    card = read_adapter(folder).card
    for dtype in ("float16", "bfloat16"):
        card = adapter_file.change_lora_dtype(card, dtype)
    assert [row["lora_dtype"] for row in card.results] == ["float32", "float32"]
    # In Python as well.
    published = adapter.to_stored(torch.float16).card.results
    assert [row["lora_dtype"] for row in published] == ["float32", "float32"]
    assert adapter.to_stored().card.results == adapter.card.results


def test_results_replace_older_ones_of_their_kind(measured, own):
    fresh = publish.read_results(measured / "eval.json", read_adapter(own))
    other = {"benchmark": "mine", "ratio": 0.5, "restored": 1}
    card = replace(read_adapter(own).card, results=[{**fresh[1], "restored": -1}, other])
    assert publish.merge_results(card, fresh).results == [other, *fresh]
    assert publish.merge_results(replace(card, results=None), fresh).results == fresh


def test_results_of_another_dtype_do_not_replace_each_other(measured, own):
    fresh = publish.read_results(measured / "eval.json", read_adapter(own))
    half = [{**row, "dtype": "bfloat16"} for row in fresh]
    clipped = [{**row, "on_small_budget": "clip"} for row in fresh]
    card = replace(read_adapter(own).card, results=half + clipped)
    assert publish.merge_results(card, fresh).results == half + clipped + fresh


def test_conventions_that_are_not_the_adapters_are_named(measured, own):
    stored, changed = read_adapter(own), own / "changed.json"
    payload = json.loads((measured / "eval.json").read_text())
    for row in payload["rows"]:
        row |= {"prefix_policy": "counted", "allocation": "adakv", "low": 1.04, "high": 2.06}
    changed.write_text(json.dumps(payload))
    read = publish.read_results(changed, stored)
    assert {(row["low"], row["high"]) for row in read} == {(1.0, 2.1)}
    assert {
        (row["prefix_policy"], row["allocation"]) for row in publish.read_results(changed, stored)
    } == {("counted", "adakv")}


@pytest.mark.parametrize(
    "record, names",
    [
        ({"evictor": "kvzip,snapkv:window=4"}, ["kvzip"]),
        ({"evictor": "snapkv", "also_for": ["kvzip"]}, ["kvzip"]),
        ({"evictor": "kvzip", "also_for": ["h2o"]}, [None]),
        ({"evictor": None}, [None]),
    ],
)
def test_an_adapter_of_several_evictors_has_results_of_each(measured, own, record, names):
    stored = read_adapter(own)
    card = replace(stored.card, **record)
    read = publish.read_results(measured / "eval.json", replace(stored, card=card))
    assert [row.get("evictor") for row in read] == names * 2
    others = [{**row, "evictor": "h2o"} for row in read]
    assert publish.merge_results(replace(card, results=others), read).results == others + read


def test_results_under_another_protocol_and_of_cut_texts(measured, own):
    """A protocol adds settings to a method, which the adapter's record does not have."""
    payload = json.loads((measured / "eval.json").read_text())
    for row in payload["rows"]:
        row |= {"protocol": "kvzip", "max_context": 300}
        if row["evictor"] != "full":
            row["method"] = f"{row['evictor']}:chunk=2000,space=true"
    (changed := own / "changed.json").write_text(json.dumps(payload))
    found = publish.read_results(changed, read_adapter(own))
    assert found and all(row["protocol"] == "kvzip" for row in found)
    assert all(row["max_context"] == 300 and "evictor" not in row for row in found)
    plain = publish.read_results(measured / "eval.json", read_adapter(own))
    card = replace(read_adapter(own).card, results=plain)
    assert publish.merge_results(card, found).results == plain + found


def test_results_beside_caches_that_were_held_otherwise(measured, own):
    """Every row is compared with a base that was held in the same way, and names that way."""
    payload = json.loads((measured / "eval.json").read_text())
    few = [
        {**row, "kv_dtype": "int8", "score": row["score"] / 2}
        for row in payload["rows"]
        if row["evictor"] != "full"
    ]
    parts = [
        {**row, "streaming_chunk": 64, "score": row["score"] / 4}
        for row in payload["rows"]
        if row["evictor"] != "full"
    ]
    (changed := own / "changed.json").write_text(
        json.dumps({**payload, "rows": parts + few + payload["rows"]})
    )
    plain = {
        row["ratio"]: row for row in publish.read_results(measured / "eval.json", read_adapter(own))
    }
    found = publish.read_results(changed, read_adapter(own))
    assert len(found) == 3 * len(plain)
    for row in found:
        part = 4 if row.get("streaming_chunk") == 64 else 2 if row.get("kv_dtype") == "int8" else 1
        assert row["base"] == pytest.approx(plain[row["ratio"]]["base"] / part, abs=0.051)
    assert (
        publish.merge_results(replace(read_adapter(own).card, results=found), found).results
        == found
    )


def test_results_of_another_adapter_are_refused(measured, own, world):
    def refusal(folder, file):
        done = cli("push", folder, REPO, "--dry-run", "--results", file)
        assert done.code == 1 and done.err.count("\n") == 1 and not done.out
        return done.err

    eval_json = measured / "eval.json"
    assert "was measured with the evictor knorm; evaluate the adapter with kvzip" in refusal(
        world.adapter, eval_json
    )
    assert "with a different base model" in refusal(world.adapter_of_other, eval_json)
    stored = read_adapter(own)
    shifted = own / "changed.json"
    payload = json.loads(eval_json.read_text())
    for row in payload["rows"]:
        row["adapter"] = row["adapter"] and "0" * 16
    shifted.write_text(json.dumps(payload))
    assert f"has no results of this adapter ({stored.weights_hash()})" in refusal(own, shifted)
    for nonsense in ("{", "[]", '{"rows": []}', '{"rows": 3}', '{"rows": [{}]}'):
        shifted.write_text(nonsense)
        assert "is not what `restorekv eval --json` writes" in refusal(own, shifted)
    missing = own / "none.json"
    assert f"The file of results {missing} does not exist" in refusal(own, missing)
    assert f"The file of results {own} is a folder" in refusal(own, own)


def test_results_of_the_first_restore_tokens_alone_are_refused(measured, own):
    adapter = RestoreAdapter.from_pretrained(load_model(read_adapter(own).card.model)[0], own)
    with pytest.warns(RestoreKVWarning, match="not trained to work with 3 of its 4"):
        truncated = adapter.truncate(3).identity()["hash"]
    payload = json.loads((measured / "eval.json").read_text())
    for row in payload["rows"]:
        row["adapter"] = row["adapter"] and truncated
    changed = own / "changed.json"
    changed.write_text(json.dumps(payload))
    done = cli("push", own, REPO, "--dry-run", "--results", changed)
    assert done.code == 1 and done.err == (
        f"error: {changed} was measured with the first 3 of the adapter's 4 restore tokens; "
        "evaluate it without --restore-tokens.\n"
    )


def test_finishing_again_keeps_what_was_measured_of_the_same_weights(measured, own):
    adapter = RestoreAdapter.from_pretrained(load_model(read_adapter(own).card.model)[0], own)
    results = [{"benchmark": "suite", "ratio": 0.1}]
    adapter.record_results(results, 0.3, ["snapkv"], {"snapkv": 0.1})
    adapter.save_pretrained(own)
    adapter.record_training(evictor="kvzip", prefix_policy="free")
    adapter.save_pretrained(own)
    card = read_adapter(own).card
    assert card.results == results and card.helps_up_to == 0.3
    assert card.also_for == ["snapkv"] and card.helps_from == {"snapkv": 0.1}
    with torch.no_grad():
        adapter.embeddings += 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter.save_pretrained(own)
    card = read_adapter(own).card
    assert card.results is card.helps_up_to is card.also_for is card.helps_from is None


def test_eval_tells_of_published_adapters(world):
    shown = cli("eval", "--help").out.replace("│", " ")
    assert "published, auto or none" in " ".join(shown.split())
    result = cli("eval", "--model", world.model, "--benchmark", "tiny", "--evictor", "kvzip@")
    assert result.code == 1 and "a hub id, published, auto or none after @" in result.err


def test_the_python_push_prepares_in_the_same_way(hub):
    with pytest.raises(AdapterError, match="is not a name for a repository on the hub"):
        adapter_of(evictor="kvzip").push_to_hub("mine")
