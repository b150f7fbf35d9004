"""Model cards are valid for the hub and true to the record, their commands run, and they never
replace what a person wrote.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard

from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.model.load import load_model
from restorekv.model.names import tiny_path
from restorekv.pipeline import compress
from restorekv.restore import model_card
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.adapter_file import read_adapter
from restorekv.seal import seal_record
from tests.helpers.cards import adapter_of, card_of, rows
from tests.helpers.cli_world import TEXT, World, build_world, cli
from tests.helpers.hub_world import front_matter_errors, local_hub

ROOT = Path(__file__).parents[2]
SETTINGS = {"lr": 2e-4, "targets": ["q_proj"], "clip": None, "note": "a | b\nc <img>"}
DATA = [
    {"source": "LongAlpaca", "examples": 2488, "contexts": 500, "license": "CC BY-NC 4.0"},
    {"source": "PG-19", "examples": 2260, "license": "Apache-2.0"},
]
RESULTS = [{"benchmark": "suite", "ratio": 0.05, "base": 70.1, "restored": 92.7, "full": 96.8}]


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


def test_everything_recorded_is_shown():
    adapter = adapter_of(
        settings=SETTINGS, data=DATA, allocation="adakv", restore_from="evicted", separator="\n\n"
    )
    adapter.record_results(RESULTS)
    text = card_of(adapter)
    facts = rows(text, "What it was made for")
    assert facts["base model"] == ["Qwen/Qwen3-tiny"]
    assert facts["fingerprint of its weights"] == [adapter.card.fingerprint]
    assert json.loads(facts["RoPE"][0]) == adapter.card.rope
    assert (
        facts["evictor"] == ["kvzip"]
        and facts["restore tokens (n)"] == ["4"]
        and facts["allocation"] == ["adakv"]
    )
    assert json.loads(facts["text between document and question"][0]) == "\n\n"
    assert facts["ratios of training (the share that stays)"] == ["0.025 to 0.25"] and facts[
        "the restore pass reads"
    ] == ["the evicted cache"]
    assert rows(text, "Training") == {
        "lr": ["0.0002"],
        "targets": ["q_proj"],
        "note": ["a \\| b c &lt;img>"],
        "clip": ["none"],
    }
    data = rows(text, "Data and license")
    assert data == {
        "LongAlpaca": ["2488", "500", "CC BY-NC 4.0"],
        "PG-19": ["2260", "not recorded", "Apache-2.0"],
    }
    assert rows(text, "Licenses of the data") == {
        "cc-by-nc-4.0": ["500", "2488"],
        "apache-2.0": ["0", "2260"],
    }
    assert "License of this adapter: cc-by-nc-4.0. Not for commercial use." in text
    assert rows(text, "Results") == {"suite": ["0.05", "70.1", "92.7", "96.8"]}


def test_what_is_not_recorded_is_not_shown():
    text = card_of(adapter_of())
    facts = rows(text, "What it was made for")
    unknown = (
        "evictor",
        "chat prefix",
        "allocation",
        "the restore pass reads",
        "ratios of training (the share that stays)",
        "text between document and question",
    )
    assert all(facts[name] == ["not recorded"] for name in unknown)
    for title, words in {
        "Training": "Not recorded.",
        "Data and license": "Not recorded.",
        "Results": "None recorded.",
    }.items():
        assert text.split(f"## {title}\n\n")[1].startswith(words)
    assert "License of this adapter: unknown; ask whoever trained it." in text
    assert "Which evictor this adapter belongs to is not recorded" in text
    assert ModelCard(text).data.license == "unknown"


@pytest.mark.parametrize(
    ("name", "license", "expected"),
    [
        ("Qwen/Qwen3-8B", "CC BY-NC 4.0", ("Qwen/Qwen3-8B", "cc-by-nc-4.0", None)),
        ("Qwen/Qwen3-8B", "Apache-2.0", ("Qwen/Qwen3-8B", "apache-2.0", None)),
        ("tiny", None, (None, "unknown", None)),
        ("/home/me/model", "My: own\nlicense", (None, "other", "my-own-license")),
        ("tests", "public domain", (None, "other", "public-domain")),
    ],
)
def test_front_matter_is_what_the_hub_takes(name, license, expected):
    text = card_of(adapter_of(name, license=license, settings={"a": 1}))
    data = ModelCard(text).data
    assert (data.base_model, data.license, data.license_name) == expected
    assert data.library_name == "peft" and {"restorekv", "kv-cache", "lora"} <= set(data.tags)
    assert front_matter_errors(text) == []


def code_blocks(text, language):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_commands_of_a_card_run(world, tmp_path, monkeypatch):
    """Its Python and shell commands give the same compressed context, with the card's settings."""
    adapter = RestoreAdapter.create(load_model(world.model)[0], 4, rank=2)
    adapter.record_training(
        evictor="kvzip+", prefix_policy="counted", ratio_range=(0.3, 0.6), allocation="per-layer"
    )
    adapter.save_pretrained(tmp_path / "adapter")
    stored = read_adapter(tmp_path / "adapter")
    text = model_card.render_card(stored.card, stored.config, str(tmp_path / "adapter"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doc.txt").write_text(TEXT)
    namespace = {}
    exec(code_blocks(text, "python")[0], namespace)
    manifest = namespace["small"].manifest
    assert (
        manifest.evictor,
        manifest.ratio,
        manifest.prefix_policy,
        manifest.allocation,
        manifest.restore_tokens,
    ) == ("kvzip+", "3/10", "counted", "per-layer", 4)
    first, second = code_blocks(text, "sh")[0].splitlines()
    assert cli(*shlex.split(first)[1:], "--json", "made.json").code == 0
    assert json.loads((tmp_path / "made.json").read_text())["pairs"] == manifest.pairs
    assert cli(*shlex.split(second)[1:], "--max-new-tokens", 2).code == 0


@pytest.mark.parametrize(
    "evictor, example",
    [
        ("kvzip+,snapkv:window=4,kernel=5", "kvzip+"),
        ("snapkv:window=4,kernel=5,h2o", "snapkv:window=4,kernel=5"),
        ("fastkvzip:gate=d9426a54e3853592", "fastkvzip"),
    ],
)
def test_the_example_names_one_evictor_that_the_user_has(world, evictor, example):
    adapter = RestoreAdapter.create(load_model(world.model)[0], 4, rank=2)
    adapter.record_training(evictor=evictor)
    text = model_card.render_card(adapter.card, adapter.lora_config)
    assert f'evictor="{example}"' in text


def kvpress_section(**record):
    return card_of(adapter_of(**record)).split("## In kvpress 0.5.5")[1]


def test_differences_from_kvpress_are_listed():
    plain = kvpress_section(prefix_policy="counted")
    for words in (
        "chat prefix counts",
        "Pairs compete",
        "reads the full cache",
        "own settings",
        "expect worse",
    ):
        assert words not in plain
    assert "kvzip_plus_normalization=False" in plain and '[-1] + ""' in plain
    plus = kvpress_section(evictor="kvzip+:chunk=64", allocation="per-head", restore_from="evicted")
    assert (
        "kvzip_plus_normalization=True" in plus
        and '+ "_plus"' in plus
        and "not those of kvzip+:chunk=64" in plus
    )
    assert (
        "chat prefix counts" in plus and "here: per-head" in plus and "reads the full cache" in plus
    )
    assert "was trained with snapkv" in kvpress_section(evictor="snapkv")
    assert "cannot be used there" in kvpress_section(evictor="kvzip", targets=())


def test_the_card_says_what_happens_to_a_budget_without_room(world):
    model, tokenizer = load_model(world.model)
    adapter = RestoreAdapter.create(model, 8, rank=2)
    adapter.record_training(evictor="kvzip", prefix_policy="free", ratio_range=(0.01, 0.4))
    with pytest.warns(RestoreKVWarning, match="everything is kept, at ratio 1"):
        small = compress(model, tokenizer, TEXT, ratio=0.01, adapter=adapter)
    assert small.manifest.ratio == "1" and small.manifest.restore_tokens == 0
    section = card_of(adapter).split("## In kvpress 0.5.5")[1]
    assert "here the whole text is kept by default, with a warning" in section
    assert "refused here" not in section


def test_only_the_corpus_whose_sources_are_named_says_so():
    """A user's own corpus may have the same title, but does not name its sources."""
    where = "names the sources of the corpus of many genres"
    for origin, is_named in (("41 files, ea14c13fa8dcb481", True), ("own.jsonl, 1f", False)):
        source = f"Corpus of many genres ({origin}, seed 0)"
        rows = [{"source": source, "license": name} for name in ("mit", "isc")]
        assert (where in card_of(adapter_of(data=rows))) == is_named


def test_our_cards_are_renewed_and_others_stay(tmp_path):
    first, second = adapter_of(license="mit"), adapter_of(license="apache-2.0")
    first.save_pretrained(tmp_path)
    second.save_pretrained(tmp_path)
    readme = tmp_path / "README.md"
    assert readme.read_text() == card_of(second)
    for theirs in (
        b"# Mine\n",
        readme.read_bytes().replace(b"apache", b"Apache"),
        b"\xff\xfe",
        b"",
    ):
        readme.write_bytes(theirs)
        with pytest.warns(RestoreKVWarning, match=r"README.md, so it stays"):
            first.save_pretrained(tmp_path)
        assert readme.read_bytes() == theirs
        assert RestoreAdapter.from_pretrained(first.model, tmp_path).card == first.card
    readme.unlink()
    readme.mkdir()
    with pytest.warns(RestoreKVWarning, match="stays"):
        first.save_pretrained(tmp_path)


def test_shipped_cards_load_unchanged(tmp_path):
    for folder in tiny_path("adapters").iterdir():
        entries, card = (
            json.loads((folder / "restorekv.json").read_text()),
            read_adapter(folder).card,
        )
        assert {
            key: value
            for key, value in entries.items()
            if key not in ("version", "sha256", "checksum")
        } == {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in vars(card).items()
            if key in entries
        }
        assert (card.settings, card.data, card.results, card.license, card.source) == (None,) * 5


@pytest.mark.parametrize(
    ("field", "nonsense"),
    [
        ("settings", [1]),
        ("data", {"a": 1}),
        ("data", ["a"]),
        ("results", 3),
        ("license", 4),
        ("source", []),
        ("separator", 1),
    ],
)
def test_a_record_of_another_kind_is_refused(tmp_path, field, nonsense):
    adapter = adapter_of()
    adapter.save_pretrained(tmp_path)
    path = tmp_path / "restorekv.json"
    path.write_text(json.dumps(seal_record({**json.loads(path.read_text()), field: nonsense})))
    with pytest.raises(AdapterError, match=r"restorekv.json is damaged"):
        RestoreAdapter.from_pretrained(adapter.model, tmp_path)


def test_only_json_is_recorded():
    with pytest.raises(AdapterError, match="plain JSON"):
        adapter_of(settings={"dtype": torch.float32})
    with pytest.raises(AdapterError, match="plain JSON"):
        adapter_of().record_results([{"score": torch.ones(1)}])


def test_push_prints_publishes_and_refuses(world, tmp_path, monkeypatch):
    dry = cli("push", world.adapter, "me/mine", "--dry-run", "--license", "mit")
    assert (
        dry.code == 0
        and ModelCard(dry.out).data.license == "mit"
        and 'adapter="me/mine"' in dry.out
    )
    with local_hub(monkeypatch, tmp_path / "cache") as hub:
        done = cli(
            "push",
            world.adapter,
            "me/mine",
            "--license",
            "mit",
            "--private",
            "--message",
            "First",
            "--dtype",
            "bfloat16",
        )
        assert done.code == 0 and "Published" in done.out, done.err
        assert (
            done.err.startswith("warning: The base model is recorded as")
            and done.err.count("\n") == 1
        )
        assert hub.files("me/mine")["README.md"].decode() == dry.out.replace(
            "| float32 |", "| bfloat16 |"
        ).replace(
            dry.out.splitlines()[-1], hub.files("me/mine")["README.md"].decode().splitlines()[-1]
        )
        assert hub.messages == ["First"] and hub.private["me/mine"]
        model, tokenizer = load_model(world.model)
        compress(model, tokenizer, TEXT, ratio=0.3, adapter="me/mine")
        refused = cli("push", world.adapter, "others/mine")
        assert refused.code == 1 and refused.err.splitlines()[-1].startswith(
            "error: The hub refuses others/mine (403"
        )
    for folder, words in {"text": "is not a folder", "model": "has no adapter_config.json"}.items():
        wrong = cli("push", getattr(world, folder), "me/mine", "--dry-run")
        assert wrong.code == 1 and words in wrong.err and wrong.err.count("\n") == 1
    assert cli("push", world.adapter, "me/mine", "--dtype", "int8").code == 1
