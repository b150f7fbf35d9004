"""The ablations: rows and claims of their tables, the trainings behind them, and a training in
small.
"""

import warnings
from dataclasses import replace

import pytest

from paper import plan, training
from paper.experiment import Row
from paper.experiments import FURTHER, choose_experiments
from paper.recipe import ABLATIONS
from paper.setting import TRAINED, make_backbone_setting, make_tiny_setting
from restorekv.compression.adapters import load_adapter
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.model.load import load_model
from restorekv.restore.adapter import RestoreAdapter

NAMES = "components,prune-first,tokens,ratio-range,mismatch,seeds,offset"
SMALL = replace(ABLATIONS, contexts=1, questions=1, max_new_tokens=8, steps=2)


def names(setting, which=NAMES):
    """Of every training that some row asks for, whether its adapter is at hand or not."""
    rows = [
        row for experiment in choose_experiments(which, setting) for row in experiment.rows.values()
    ]
    found = [
        setting.training(row.adapter, seed)
        for seed in setting.seeds
        for row in rows
        if row.adapter not in (None, "own")
    ]
    return list(dict.fromkeys(each.name for each in found))


def test_tables_share_trainings_and_names_stay(tmp_path):
    made = names(make_tiny_setting(tmp_path))
    assert len(made) == 3 * 15
    assert made[:15] == [
        "restorekv,targets=none,seed=0",
        "restorekv,targets=q+k+v,seed=0",
        "restorekv,targets=q+k+v+o,seed=0",
        "restorekv,embeddings=fixed,seed=0",
        "restorekv,seed=0",
        "restorekv,restore_from=evicted,seed=0",
        "restorekv,restore_tokens=1,seed=0",
        "restorekv,restore_tokens=2,seed=0",
        "restorekv,restore_tokens=4,seed=0",
        "restorekv,restore_tokens=8,seed=0",
        "restorekv,restore_tokens=16,seed=0",
        "restorekv,ratio_max=0.5,seed=0",
        "restorekv,ratio_min=0.05,seed=0",
        "restorekv,ratio_max=0.5,ratio_min=0.05,seed=0",
        "restorekv,evictor=snapkv,seed=0",
    ]


def test_seed_0_of_every_row_ships_and_three_of_the_method(tmp_path):
    setting = make_tiny_setting(tmp_path)
    shipped = {path.name for path in (TRAINED / "tiny").iterdir() if path.is_dir()}
    assert shipped == {*names(replace(setting, seeds=(0,))), "restorekv,seed=1", "restorekv,seed=2"}
    for experiment in choose_experiments(NAMES, setting):
        assert not list(plan.list_missing(experiment, setting))
    assert len(plan.list_trainings(choose_experiments(NAMES, setting), setting)) == 3 * 15 - 17
    assert (
        plan.list_trainings(
            choose_experiments("", replace(setting, seeds=(0,))), replace(setting, seeds=(0,))
        )
        == []
    )


def test_what_ships_was_trained_as_its_name_says(tmp_path):
    model, _ = load_model("tiny")
    setting = make_tiny_setting(tmp_path)
    for experiment in choose_experiments(NAMES, setting):
        for row in experiment.rows.values():
            for seed, place in setting.locate_adapters(row).items():
                if seed is None or place is None:
                    continue
                assert place.startswith("paper/ablations/tiny/")
                with warnings.catch_warnings():
                    # Some are for other uses than this one.
                    warnings.simplefilter("ignore", RestoreKVWarning)
                    told = load_adapter(model, place, Eviction.make("kvzip")).card.settings
                config = vars(setting.training(row.adapter, seed).config)
                same = {
                    key: list(value) if isinstance(value, tuple) else value
                    for key, value in config.items()
                }
                # Settings that were not there yet.
                added = {"init": "", "draws": 1, "ratio_weight": 0.0, "loss_power": 1.0}
                added |= {"answer_decay": 0.0, "knows_ratio": False}
                assert {**same, "processes": 1} == {**added, **told}, place


def test_the_papers_default_is_a_row_of_its_own_table(tmp_path):
    setting = make_backbone_setting(tmp_path, "elsewhere", None)
    (tokens,), (offset,) = (
        choose_experiments("tokens", setting),
        choose_experiments("offset", setting),
    )
    assert (
        list(tokens.rows) == ["base", "n1", "n2", "n4", "n8", "n16"]
        and tokens.against["n1"] == "n8"
    )
    assert offset.rows["offset"].conventions == {"offset": 8}


def test_the_mismatched_adapter_is_used_with_the_other_evictor(tmp_path):
    setting = make_tiny_setting(tmp_path)
    (mismatch,) = choose_experiments("mismatch", setting)
    row = mismatch.rows["mismatched"]
    assert setting.training(row.adapter, 1).config == replace(ABLATIONS, evictor="snapkv", seed=1)
    cell = setting.cells(row, mismatch.places[0], setting.locate_adapters(row)[0])[0]
    assert cell.evictor == "kvzip" and "evictor=snapkv" in cell.adapter


def test_an_evicted_row_is_asked_as_it_was_trained(tmp_path):
    setting = make_tiny_setting(tmp_path)
    (prune,) = choose_experiments("prune-first", setting)
    cells = {need.row: need.cell for need in plan.list_needs(prune, setting)}
    assert cells["evicted"].restore_from == "evicted"
    assert {cells["base"].restore_from, cells["full"].restore_from} == {"full"}


def test_beyond_the_paper_only_when_asked_for(tmp_path):
    setting = make_tiny_setting(tmp_path)
    assert "beyond" in FURTHER and "beyond" not in {
        experiment.name for experiment in choose_experiments("", setting)
    }
    (beyond,) = choose_experiments("beyond", setting)
    assert "long: no adapter" not in list(plan.list_missing(beyond, setting))
    told = list(plan.list_missing(beyond, setting))
    assert len(told) == 3 and "restorekv,ratio_law=log-uniform,seed=0" in told[0]


# ---- trainings


def small(tmp_path, **more):
    setting = make_tiny_setting(tmp_path, settings=SMALL)
    return replace(setting, setup=replace(setting.setup, contexts=2, **more))


def test_a_training_is_found_by_the_tables(tmp_path):
    setting, row = small(tmp_path), Row("RestoreKV", "kvzip", {})
    assert setting.locate_adapters(row) == {0: None, 1: None, 2: None}, (
        "what ships was trained otherwise"
    )
    wanted = setting.list_wanted(row)
    assert [each.state() for each in wanted] == ["not trained"] * 3
    training.train_all(wanted[:1], 1, 1)
    assert wanted[0].state() == "done"
    assert setting.locate_adapters(row) == {
        0: str(tmp_path / "trained" / "restorekv,seed=0" / "adapter"),
        1: None,
        2: None,
    }
    assert setting.list_wanted(row) == wanted[1:]


@pytest.mark.slow
def test_an_interrupted_training_goes_on(tmp_path, monkeypatch):
    model, _ = load_model("tiny")
    config = replace(SMALL, checkpoint_every=1)
    hashes = []
    for name in ("whole", "killed"):
        setting = replace(
            small(tmp_path / name), setup=replace(small(tmp_path / name).setup, settings=config)
        )
        (wanted,) = setting.list_wanted(Row("", "kvzip", {}))[:1]
        wanted.setup.folder.mkdir(parents=True)
        if name == "killed":

            def dies(text):
                if text.startswith("step 2"):
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                training.train_ablation(wanted, dies)
            assert wanted.state() == "step 2 of 2"
        training.train_ablation(wanted, lambda text: None)
        hashes.append(RestoreAdapter.from_pretrained(model, wanted.adapter).identity()["hash"])
    assert hashes[0] == hashes[1]


def test_a_held_training_is_left_to_its_holder(tmp_path):
    wanted = small(tmp_path).list_wanted(Row("", "kvzip", {}))[0]
    wanted.setup.folder.mkdir(parents=True)
    with training.claim_training(wanted) as mine, training.claim_training(wanted) as again:
        assert mine and not again
        training.train_in_turn([wanted], 1)
        assert not wanted.done


def test_a_folder_of_other_settings_is_refused(tmp_path):
    wanted = small(tmp_path).list_wanted(Row("", "kvzip", {}))[0]
    wanted.setup.folder.mkdir(parents=True)
    training.check_settings(wanted.setup)
    training.check_settings(
        replace(wanted.setup, settings=replace(SMALL, keep=1, checkpoint_every=9))
    )
    with pytest.raises(RestoreKVError, match="other settings"):
        training.check_settings(replace(wanted.setup, settings=replace(SMALL, lr=1.0)))
    with pytest.raises(RestoreKVError, match="other settings"):
        training.check_settings(replace(wanted.setup, contexts=9))
