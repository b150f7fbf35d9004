"""The experiments: the paper's figures, that its claims hold in them, and the cells that they ask
for.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paper import plan
from paper.analysis.case import DocumentFigures
from paper.experiment import Comparison, Most, Place
from paper.experiments import EXPERIMENTS, FURTHER, choose_experiments, facts, mechanism
from paper.experiments.methods import METHODS, name_restored_row
from paper.experiments.training_data import MIXTURE
from paper.scores import get_paper_margin
from paper.setting import make_backbone_setting, make_tiny_setting
from paper.study import Study
from paper.write import write_introduction
from restorekv.errors import RestoreKVError
from restorekv.evaluation.grid import Cell
from restorekv.evaluation.run import check_cells

EVERY = ",".join((*EXPERIMENTS, *FURTHER))


@pytest.fixture
def setting(tmp_path):
    return make_tiny_setting(tmp_path)


@pytest.fixture
def real(tmp_path):
    return make_backbone_setting(tmp_path, "Qwen/Qwen3-4B", None)


def experiments(setting):
    return {experiment.name: experiment for experiment in choose_experiments(EVERY, setting)}


# ---- the paper


@pytest.mark.parametrize(
    ("experiment", "row", "benchmark", "scores"),
    [
        ("components", "embeddings", "ruler", {0.2: 92.7, 0.1: 82.6, 0.05: 42.1}),
        ("components", "qkvo", "ruler", {0.2: 93.5, 0.1: 88.4, 0.05: 72.0}),
        ("prune-first", "evicted", "ruler", {0.2: 93.7, 0.1: 87.6, 0.05: 64.4}),
        ("tokens", "n4", "ruler", {0.2: 93.4, 0.1: 87.0, 0.05: 68.5}),
        ("tokens", "n16", "ruler", {0.2: 93.3, 0.1: 87.8, 0.05: 69.1}),
        ("ratio-range", "0.05 to 0.5", "ruler", {0.4: 94.0, 0.2: 92.8, 0.1: 84.5, 0.05: 51.5}),
        ("ratio-range", "0.025 to 0.5", "ruler", {0.4: 94.1, 0.2: 93.1, 0.1: 86.1, 0.05: 63.5}),
        ("mismatch", "mismatched", "ruler", {0.2: 93.5, 0.1: 81.6, 0.05: 42.0}),
        ("seeds", "full", "ruler", {0.4: 94.25, 0.2: 93.37, 0.1: 88.21, 0.05: 72.81}),
        ("offset", "offset", "ruler", {0.2: 90.5, 0.1: 80.8, 0.05: 36.9}),
        ("methods", "kvzip restored", "qasper", {0.2: 39.0, 0.1: 37.7, 0.05: 28.7}),
        ("methods", "kvzip+", "longhealth", {0.2: 73.2, 0.1: 67.8, 0.05: 63.2}),
        ("methods", "contrastkv restored", "quality", {0.2: 67.6, 0.1: 63.3, 0.05: 51.9}),
        ("methods", "snapkv", "ruler", {0.2: 33.8, 0.1: 20.6, 0.05: 12.7}),
        ("methods", "h2o restored", "longhealth", {0.2: 64.8, 0.1: 59.0, 0.05: 46.8}),
        ("main", "kvzip restored", "ruler", {0.4: 94.3, 0.2: 93.5, 0.1: 88.8, 0.05: 73.2}),
        ("teaser", "kvzip+ restored", "ruler", {0.0625: 86.4}),
        ("fast-kvzip", "fastkvzip restored", "ruler", {0.0625: 79.3}),
        ("tradeoff", "am-fast", "ruler", {0.05: 52.8}),
        ("scbench", "kvzip restored", "scbench", {0.4: 29.7, 0.2: 33.1, 0.1: 32.4, 0.05: 25.6}),
    ],
)
def test_the_papers_figures(setting, experiment, row, benchmark, scores):
    told = experiments(setting)[experiment].rows[row].paper
    assert {
        place.ratio: points for place, points in told.items() if place.benchmark == benchmark
    } == scores


def test_longbench_tells_both_backbones(setting, real):
    tight = Place("longbench", 0.0625, "Synth")
    llama, qwen = (experiments(each)["longbench"] for each in (setting, real))
    assert llama.backbone == "Llama-3.1-8B-Instruct" and qwen.backbone == "Qwen3-8B"
    assert (
        llama.rows["kvzip"].paper[tight] == 20.6
        and llama.rows["kvzip"].also["Qwen3-8B"][tight] == 14.3
    )
    assert qwen.rows["kvzip restored"].paper[tight] == 15.0
    for row in llama.rows.values():
        for points in (row.paper, *row.also.values()):
            for place in (place for place in llama.places if place.parts and not place.relative):
                mean = sum(points[each] for each in place.each) / 6
                assert points[place] == pytest.approx(mean, abs=0.0501), (
                    "the paper's own mean of its categories"
                )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_claim_holds_in_the_papers_own_figures(setting, real, name):
    for each in (setting, real):
        experiment = experiments(each)[name]
        if isinstance(experiment, Study):
            continue
        assert {*experiment.against, *experiment.against.values()} <= set(experiment.rows)
        for claim in experiment.claims:
            for other in ("", *experiment.backbones):
                value = get_paper_margin(claim, experiment, other)
                least = claim.least if isinstance(claim, Most) else 0
                assert value is None or (value >= least and value > 0), claim.text


def test_sixty_pairs_of_which_one_does_not_improve(setting):
    methods = experiments(setting)["methods"]
    assert len(methods.places) == 12 and get_paper_margin(methods.claims[0], methods) == 59
    worse = [
        (method, place.benchmark, place.ratio)
        for method in METHODS
        for place in methods.places
        if methods.rows[name_restored_row(method)].paper[place] <= methods.rows[method].paper[place]
    ]
    assert worse == [("snapkv", "quality", 0.1)]


def test_the_same_figures_stand_for_the_same_run_in_every_table(setting):
    """KVzip and RestoreKV appear in many tables of one experiment; only the seeds' table has means
    of its own.
    """
    made = experiments(setting)
    whole = [
        ("components", "full"),
        ("prune-first", "full"),
        ("tokens", "n8"),
        ("ratio-range", "0.025 to 0.25"),
        ("mismatch", "matched"),
        ("offset", "full"),
        ("methods", "kvzip restored"),
        ("main", "kvzip restored"),
    ]
    bases = [(name, "base") for name, _ in whole[:6]] + [("methods", "kvzip"), ("main", "kvzip")]
    for rows, figures in ((whole, (93.5, 88.8, 73.2)), (bases, (91.4, 80.1, 38.2))):
        told = {
            tuple(made[name].rows[row].paper[Place("ruler", r)] for r in (0.2, 0.1, 0.05))
            for name, row in rows
        }
        assert told == {figures}


def test_every_table_and_figure_is_there_once(setting):
    numbers = [
        experiment.number
        for name, experiment in experiments(setting).items()
        if name in EXPERIMENTS
    ]
    labels = [
        experiment.label for name, experiment in experiments(setting).items() if name in EXPERIMENTS
    ]
    assert sorted(numbers) == sorted(
        [f"Figure {n}" for n in "13456AB"] + [f"Table {n}" for n in "1234ABCDEFGH"]
    )  # Figure 2 is a drawing
    assert len(set(labels)) == len(labels) and all(
        re.match(r"(fig|tab):", label) for label in labels
    )


# ---- cells


def test_every_cell_can_be_asked(setting, real):
    for each in (
        setting,
        replace(real, adapters="published", setup=replace(real.setup, model="Qwen/Qwen3-8B")),
    ):
        cells = plan.list_cells(choose_experiments(EVERY, each), each)
        check_cells(cells)
        assert len({cell.name for cell in cells}) == len(cells)


def test_experiments_share_cells(setting):
    """KVzip at r = 0.05 stands in nine tables and is asked once; all of KVzip's cells share one
    preparation.
    """
    made = choose_experiments("", setting)
    base = Cell(
        "tiny", "tiny:count=104", "kvzip", "0.05", prefix_policy="free", on_small_budget="fewer"
    )
    assert (
        sum(
            base in {need.cell for need in plan.list_needs(experiment, setting)}
            for experiment in made
        )
        == 9
    )
    cells = plan.list_cells(made, setting)
    assert cells.count(base) == 1 and 100 < len(cells) < 160
    # Kvzip on two sets of documents.
    assert len({cell.preparation for cell in cells if cell.evictor != "full"}) == 8


def test_groups_of_the_suite_stand_for_benchmarks(setting):
    for key in ("ruler", "qasper", "quality", "longhealth", "longbench", "scbench"):
        assert setting.benches[key].standing
    assert setting.benches["quality"].parts == {"": ("choice4",)}
    assert "Few-shot" not in setting.benches["longbench"].parts
    assert "low=1300" in setting.benches["scbench"].spec


def test_count_is_of_every_benchmark(tmp_path):
    assert make_tiny_setting(tmp_path, 5).benches["ruler"].spec == "tiny:count=5"
    assert (
        make_backbone_setting(tmp_path, "m", None, 5).benches["ruler"].spec
        == "ruler:count=5,source=hub"
    )
    given = make_backbone_setting(tmp_path, "m", None, given=["quality:path=dev.jsonl"]).benches
    assert (
        given["quality"].spec == "quality:path=dev.jsonl"
        and given["ruler"].spec == "ruler:source=hub"
    )
    with pytest.raises(RestoreKVError, match="does not ask needle"):
        make_backbone_setting(tmp_path, "m", None, given=["needle"])
    assert make_backbone_setting(tmp_path, "m", None).benches["scbench"].protocol == "kvzip"


def test_generated_samples_stand_in_for_rulers_own(tmp_path):
    spec = "ruler:source=generated,count=13"
    official, made = (
        make_backbone_setting(tmp_path, "m", None, given=given).benches["ruler"]
        for given in ([], [spec])
    )
    assert not official.standing and official.shown == "RULER-4K"
    assert (
        "not RULER's own samples" in made.standing
        and "qa_1: generated documents instead of SQuAD" in made.standing
    )
    assert made.shown == "RULER-4K (stand-in)"


def test_the_page_tells_every_protocol_and_prefix_policy(real):
    """The full cache has no budget, and so no policy to tell."""
    common = {"model": "m", "benchmark": "ruler"}
    cells = [
        Cell.full_cache(**common),
        Cell(**common, evictor="kvzip", ratio="0.1"),
        Cell(**common, evictor="am-fast", ratio="0.1", prefix_policy="free"),
        Cell("m", "scbench", "kvzip", "0.1", protocol="kvzip"),
    ]
    results = {}
    for cell, policy in zip(cells, ("free", "counted", "free", "free"), strict=True):
        facts = {
            "fingerprint": "1f",
            "dtype": "bfloat16",
            "device": "cuda",
            "allocation": "global",
            "budget": "B",
        }
        facts |= {"prefix_policy": policy, "protocol": {"name": cell.protocol}, "interval": "95 %"}
        facts |= {
            "score": f"mean over {cell.benchmark}",
            "benchmark": {"title": cell.benchmark.upper()},
        }
        results[cell] = SimpleNamespace(done=True, identity=facts)
    told = write_introduction(real, dict(list(results.items())[:2]), [])[1]
    assert "kvpress protocol, chat prefix counted in the budget, global" in told
    told = write_introduction(real, results, [])[1]
    assert "kvpress protocol, chat prefix counted in the budget (RULER)" in told
    assert "kvpress protocol, chat prefix kept beside the budget (RULER with AM-fast)" in told
    assert "kvzip protocol, chat prefix kept beside the budget (SCBENCH)" in told
    assert "mean over ruler or mean over scbench" in told


def test_adapters_of_another_model(tmp_path, real):
    (methods,) = choose_experiments("methods", real)
    told = list(plan.list_missing(methods, real))
    assert len(told) == 5 and told[0] == "RestoreKV: no adapter (restorekv,seed=0)"
    assert not any(need.cell.restored for need in plan.list_needs(methods, real))
    place = tmp_path / "adapters" / "kvzip"
    place.mkdir(parents=True)
    (place / "adapter_config.json").write_text("{}")
    given = replace(real, adapters=str(tmp_path / "adapters"))
    assert len(list(plan.list_missing(methods, given))) == 4
    assert {need.cell.adapter for need in plan.list_needs(methods, given)} == {None, str(place)}
    (offset,) = choose_experiments("offset", given)
    assert given.locate_adapters(offset.rows["full"]) == {0: str(place), 1: None, 2: None}, (
        "seed 0 is the method's own"
    )


def test_the_authors_adapters(real):
    published = replace(
        real, adapters="published", setup=replace(real.setup, model="Qwen/Qwen3-8B")
    )
    (methods,) = choose_experiments("methods", published)
    assert published.locate_adapters(methods.rows["kvzip+ restored"]) == {
        0: "higokri/RestoreKV-Qwen3-8B_plus"
    }
    assert published.locate_adapters(methods.rows["h2o restored"]) == {0: None}


def test_mistakes_are_told(tmp_path, setting):
    with pytest.raises(RestoreKVError, match="no table or figure 'tabel'"):
        choose_experiments("tokens,tabel", setting)
    with pytest.raises(RestoreKVError, match="no folder"):
        make_backbone_setting(tmp_path, "m", str(tmp_path / "nowhere"))
    with pytest.raises(RestoreKVError, match="at least 0"):
        make_tiny_setting(tmp_path, -1)


# ---- facts


def test_training_data_has_the_papers_rows(setting, tmp_path):
    assert MIXTURE.exists()
    (table,), claims = experiments(setting)["training-data"].show(setting, tmp_path)
    assert [row[0] for row in table.rows] == ["LongAlpaca", "PG-19", "Tulu-3 FLAN", "Total"]
    assert [row[2] for row in table.rows] == ["2,488", "2,260", "1,500", "6,248"] and not claims


def test_metrics_and_machine(setting, tmp_path):
    (metrics,), _ = facts.show_measures(setting, tmp_path)
    assert len(metrics.rows) == 6 and all("letter or token F1" in row[1] for row in metrics.rows)
    (machine,), _ = facts.show_machine(setting, tmp_path)
    assert machine.rows[4][2] == "PyTorch 2.8.0 (CUDA 12.8)"


def test_what_is_not_measured_is_said(setting, tmp_path):
    for name in ("mechanism", "efficiency"):
        assert experiments(setting)[name].show(setting, tmp_path) == (["Not measured yet."], [])


def test_attention_claims_are_paired_by_document():
    """Masses of 0.5, 0.1 and 0.3 in both layers, and documents where all are half as large."""

    def document(scale):
        masses = {"full": 0.5, "base": 0.1, "restored": 0.3}
        return {
            name: {
                "masses": [[scale * mass, 0, 0, 0], [scale * mass, 0, 0, 0]],
                "first": [1 / mass, 0, 0, 0],
            }
            for name, mass in masses.items()
        }

    found = DocumentFigures([document(1), document(0.5)] * 3, [1, 3] * 3)
    predictions = DocumentFigures(
        [{name: {"first": told["first"]} for name, told in document(1).items()}] * 6, [1, 3] * 3
    )
    taken, back, profile, closer = mechanism.list_claims(found, predictions)
    assert taken.value == pytest.approx(100 * 0.4 * (1 + 3 * 0.5) / 4) and taken.verdict == "holds"
    assert back.value == pytest.approx(100 * 0.2 * 0.625) and back.paper == (0.74,)
    assert profile.value == pytest.approx(0) and profile.verdict == "within noise"
    assert closer.value == pytest.approx(10 - 1 / 0.3)


def test_comparisons_have_names_that_are_files(setting):
    for experiment in experiments(setting).values():
        assert re.fullmatch(r"[a-z0-9-]+", experiment.name)
        assert isinstance(experiment, Comparison | Study)
