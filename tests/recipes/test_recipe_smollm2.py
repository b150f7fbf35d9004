"""The recipe of what ships for SmolLM2: its training texts, and that evaluation texts are not among
them.
"""

from pathlib import Path

import pytest
import torch

from recipes.smollm2 import build
from restorekv.cli import COMMANDS, _load_command
from restorekv.data.files import iterate_values
from restorekv.data.mixture import read_mixture
from restorekv.data.overlap import EvaluationIndex
from restorekv.evictors import gate_file
from restorekv.model.names import SMOLLM2, shipped_path
from restorekv.restore import adapter_file
from restorekv.tasks.splits import EVALUATION_NOVEL, TRAINING, split_fairytale, split_novel

TEXTS = Path(__file__).parents[2] / "recipes" / "smollm2" / "texts"
READY = TEXTS.parent / "data"
SHIPPED = Path(__file__).parents[2] / "src" / "restorekv" / "tasks" / "texts"
# Sheets of different countries share up to a fifth of their 13-grams, the words of the form.
BOILERPLATE = 0.25


def contexts(path: Path) -> list[str]:
    return [row.get("context") or row["text"] for _, row in iterate_values(path)]


@pytest.fixture(scope="module")
def evaluation() -> dict[str, list[str]]:
    """Every text that a benchmark of the package may ask about."""
    questions = [
        row
        for name in ("squad", "hotpotqa")
        for _, row in iterate_values(SHIPPED / "share-alike" / f"{name}.json.gz")
    ]
    return {
        "stories": contexts(SHIPPED / "fairytaleqa" / "val.jsonl.gz"),
        "novel": contexts(SHIPPED / "novels" / f"{EVALUATION_NOVEL}.txt.gz"),
        "sheets": contexts(SHIPPED / "factbook" / "evaluation.jsonl.gz"),
        "articles": [str(row) for row in questions],
    }


def test_training_texts_share_no_passage_with_evaluation_texts(evaluation):
    named = [(kind, text) for kind, texts in evaluation.items() for text in texts]
    index = EvaluationIndex(iter(named), BOILERPLATE)
    files = [
        TEXTS / "stories.jsonl.gz",
        TEXTS / "sections.jsonl.gz",
        *sorted((TEXTS / "novels").iterdir()),
    ]
    trained = [(path.name, text) for path in files for text in contexts(path)]
    assert len(trained) > 300
    assert [
        (name, index.find_match(text)) for name, text in trained if index.find_match(text)
    ] == []
    assert index.find_match(evaluation["stories"][3]) and index.find_match(evaluation["sheets"][0])


def test_training_texts_are_of_the_training_split():
    stories = [row["id"] for _, row in iterate_values(TEXTS / "stories.jsonl.gz")]
    assert len(stories) == sum(split_fairytale("train", index) == TRAINING for index in range(232))
    novels = {path.name.removesuffix(".txt.gz") for path in (TEXTS / "novels").iterdir()}
    assert len(novels) == 14 and all(split_novel(name) == TRAINING for name in novels)


def test_what_ships_says_what_it_is():
    """Whole and small, for SmolLM2, trained on texts that anyone may use."""
    folders = sorted(shipped_path(SMOLLM2, "adapters").iterdir())
    for folder in folders:
        stored = adapter_file.read_adapter(folder)
        card = stored.card
        assert (card.model, card.prefix_policy) == (SMOLLM2, "free")
        evictor, _, allocation = folder.name.partition(".")
        trained = [spec.partition(":")[0] for spec in card.evictor.split(",")]
        assert (trained, card.allocation) == ([evictor], allocation or "global")
        assert (
            card.license == "apache-2.0"
            and not card.local
            and card.weights["architecture"]["layers"] == 30
        )
        # Nothing that only some may use, nothing to be shared alike.
        permissive = {"apache-2.0", "public-domain", "cc0-1.0"}
        if evictor == build.FIRST and not allocation:
            permissive |= {"bsd-2-clause", "bsd-3-clause", "cc-by-3.0", "cc-by-4.0"}
            permissive |= {"curl", "isc", "mit", "unlicense"}
        assert {row["license"] for row in card.data} <= permissive
        assert not Path(card.settings.get("init") or "").is_absolute()
        assert all(tensor.dtype == torch.bfloat16 for tensor in stored.lora.values())
    gate = gate_file.read_gate(shipped_path(SMOLLM2, "gates", "fastkvzip.safetensors"))
    assert gate.card.model == SMOLLM2 and gate.card.fingerprint == card.fingerprint
    assert "kvzip" in [folder.name for folder in folders]
    assert (
        sum(file.stat().st_size for file in shipped_path(SMOLLM2).rglob("*") if file.is_file())
        < 22e6
    )


@pytest.mark.parametrize("name", ["novels", "stories"])
def test_the_training_data_that_ships_is_read(name):
    contexts, manifest = read_mixture(READY / name)
    assert len(contexts) == sum(source["contexts"] for source in manifest["sources"].values()) > 90
    assert {each.license for each in contexts} == set(manifest["licenses"])


def test_the_shared_adapter_begins_with_what_ships_and_sees_all_evictors(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "start_command", lambda *words: asked.append(words))
    monkeypatch.setattr(build, "wait_for", lambda *running: None)
    build.train_shared(tmp_path)
    (words,) = asked
    given = {word: words[place + 1] for place, word in enumerate(words[:-1])}
    assert given["--evictor"].split(",") == ["kvzip", *build.OTHERS]
    assert Path(given["--init"]).name == "kvzip" and words.count("--data") >= 5
    (tmp_path / "restore-shared" / "adapter").mkdir(parents=True)
    build.train_shared(tmp_path)
    assert len(asked) == 1


def test_the_folder_of_a_start_is_not_published():
    assert build.name_start({"init": "/a/b/kvzip", "lr": 1}) == {"init": "smollm2:kvzip", "lr": 1}
    assert build.name_start({"init": ""}) == {"init": ""}


def test_the_adapter_for_one_length_begins_with_what_ships(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(build, "start_command", lambda *words: asked.append(words))
    monkeypatch.setattr(build, "wait_for", lambda *running: None)
    build.train_per_head(tmp_path)
    (words,) = asked
    begun = Path(words[words.index("--init") + 1])
    assert begun.name == "kvzip" and begun.is_dir()
    assert " --allocation per-head " in " ".join(words)
    (tmp_path / "restore-kvzip.per-head" / "adapter").mkdir(parents=True)  # which is done
    build.train_per_head(tmp_path)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", [*build.SHAPE, *build.RATIOS]),
        ("train", build.OF_SHARED),
        *(("train", flags) for flags in build.LEGS.values()),
        ("data build", build.CORPUS),
        ("data build", build.OF_PEOPLE),
        *(("data build", [*build.ANSWERS, *flags.split()]) for flags in build.DATA.values()),
    ],
)
def test_the_commands_know_every_flag_of_the_recipe(command, flags):
    first, *rest = command.split()
    place = _load_command(*COMMANDS[first][:2], first)
    for name in rest:
        place = place.commands[name]
    known = {name for parameter in place.params for name in parameter.opts}
    given = [flag for flag in flags if flag.startswith("--")]
    assert given and set(given) <= known, set(given) - known


def test_every_leg_has_a_folder_of_its_own_and_is_the_one_installed(tmp_path, monkeypatch):
    """A leg after another one, or after the first training, is trained and not taken for done."""
    trained = []
    installed = []

    def start(*words):
        given = {word: words[place + 1] for place, word in enumerate(words[:-1])}
        trained.append((given["--seed"], Path(given["--out"]).name))
        (Path(given["--out"]) / "adapter").mkdir(parents=True)

    def install(place, evictor):
        installed.append((place.name, evictor))

    monkeypatch.setattr(build, "start_command", start)
    monkeypatch.setattr(build, "wait_for", lambda *running: None)
    monkeypatch.setattr(build, "install_adapter", install)
    (tmp_path / "restore-kvzip" / "adapter").mkdir(parents=True)
    for leg, seed in (("more", "1"), ("more", "2"), ("wide", "1"), ("more", "2")):
        build.main([str(tmp_path), "--leg", leg, "--seed", seed])
    more, other, wide = "restore-kvzip.more-1", "restore-kvzip.more-2", "restore-kvzip.wide-1"
    assert trained == [("1", more), ("2", other), ("1", wide)]
    assert installed == [(more, "kvzip"), (other, "kvzip"), (wide, "kvzip"), (other, "kvzip")]


def test_what_the_first_training_made_is_installed(tmp_path, monkeypatch):
    installed = []
    monkeypatch.setattr(build, "install_adapter", lambda *given: installed.append(given))
    (tmp_path / "restore-kvzip" / "adapter").mkdir(parents=True)
    (tmp_path / "restore-kvzip.more-1" / "adapter").mkdir(parents=True)
    build.main([str(tmp_path), "--install-only"])
    assert installed == [(tmp_path / "restore-kvzip", "kvzip")]
