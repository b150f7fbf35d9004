"""Runs that end early lose no finished step, and folders that are not theirs stay as they are."""

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from restorekv import spec
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.files import make_unique_name
from restorekv.train import checkpoint, loop
from restorekv.train.loop import make_initial_adapter, train_adapter
from restorekv.train.run_folder import CHECKPOINT_FILE, LOG_FILE, check_folders
from tests.helpers.cli_world import cli
from tests.helpers.models import build_model
from tests.helpers.training import CONFIG, EXAMPLES, losses


def test_a_killed_run_resumes_with_the_same_losses(tiny_tokenizer, tmp_path):
    train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "whole")

    def kill(step: int, steps: int, loss: float) -> None:
        if step == 5:
            raise RestoreKVError("killed")  # which saves nothing

    with pytest.raises(RestoreKVError, match="killed"):
        train_adapter(
            build_model("llama"), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "cut", progress=kill
        )
    train_adapter(
        build_model("llama"), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "cut", resume=True
    )
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, other = (
        (tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in ("whole", "cut")
    )
    assert one == other


@pytest.mark.parametrize(
    ("moment", "taken"),
    [
        ("loss", [3, 4]),
        pytest.param("update", [4], marks=pytest.mark.slow),
        pytest.param("log", [4], marks=pytest.mark.slow),
        pytest.param("progress", [4], marks=pytest.mark.slow),
    ],
)
def test_an_interruption_keeps_every_finished_step(
    tiny_tokenizer, tmp_path, monkeypatch, moment, taken
):
    config, steps, calls = replace(CONFIG, steps=4, checkpoint_every=50), [], []
    train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, config, tmp_path / "whole")

    def interrupting(inner):
        def call(*arguments):
            calls.append(1)
            # In the third step, whose second context is the sixth.
            if len(calls) == (6 if moment == "loss" else 3):
                signal.raise_signal(signal.SIGINT)
            return inner(*arguments)

        return call

    def progress(step: int, *_: object) -> None:
        steps.append(step)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        for name in {"loss": ["compute_sample_loss"], "update": ["_take_optimizer_step"]}.get(
            moment, []
        ):
            patch.setattr(loop, name, interrupting(getattr(loop, name)))
        if moment == "log":
            patch.setattr(SummaryWriter, "add_scalar", interrupting(SummaryWriter.add_scalar))
        own = interrupting(progress) if moment == "progress" else progress
        train_adapter(
            build_model("llama"), tiny_tokenizer, EXAMPLES, config, tmp_path / "cut", progress=own
        )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    steps.clear()
    train_adapter(
        build_model("llama"), tiny_tokenizer, EXAMPLES, config, tmp_path / "cut", True, progress
    )
    assert steps == taken, "no finished step is taken again"
    assert (
        losses(tmp_path / "cut") == losses(tmp_path / "whole")
        and len(losses(tmp_path / "cut")) == 4
    )
    one, other = (
        (tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in ("whole", "cut")
    )
    assert one == other


def test_a_log_that_cannot_be_written_leaves_a_checkpoint_that_resumes(
    tiny_tokenizer, tmp_path, monkeypatch
):
    """The step was taken before its line: a checkpoint that counts it not is of two steps."""
    config = replace(CONFIG, steps=4, checkpoint_every=50)
    train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, config, tmp_path / "whole")
    write = SummaryWriter.add_scalar
    lines = []

    def fail_at_the_third(*arguments):
        lines.append(arguments)
        if len(lines) == 3:
            raise OSError("No space left on device")
        return write(*arguments)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(SummaryWriter, "add_scalar", fail_at_the_third)
        train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, config, tmp_path / "cut")
    train_adapter(
        build_model("llama"), tiny_tokenizer, EXAMPLES, config, tmp_path / "cut", resume=True
    )
    one, other = (
        (tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in ("whole", "cut")
    )
    assert one == other


def test_a_run_is_not_continued_with_another_version_of_its_evictor(
    tiny_tokenizer, tmp_path, monkeypatch
):
    config = replace(CONFIG, steps=2, contexts=1)
    train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, config, tmp_path / "run")
    read = spec._read_source
    monkeypatch.setattr(spec, "_read_source", lambda cls: read(cls) + "# changed")
    with pytest.raises(RestoreKVError, match="code is "):
        train_adapter(
            build_model("llama"), tiny_tokenizer, EXAMPLES, config, tmp_path / "run", True
        )


@pytest.mark.parametrize("change", ["weights", "data"])
def test_a_run_is_not_continued_with_another_adapter_in_the_folder_it_began_from(
    tiny_tokenizer, tmp_path, change
):
    """Its weights are the checkpoint's, but the record of its data and license is the folder's."""
    model = build_model("llama")
    data = [{"source": "essays", "license": "cc-by-nc-4.0"}]
    first = make_initial_adapter(model, tiny_tokenizer, CONFIG)
    first.card = replace(first.card, data=data)
    first.save_pretrained(tmp_path / "first")
    config = replace(CONFIG, init=str(tmp_path / "first"), steps=2, contexts=1)
    with pytest.warns(RestoreKVWarning, match="not for commercial use"):
        train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run")

    seed = 1 if change == "weights" else CONFIG.seed
    second = make_initial_adapter(model, tiny_tokenizer, replace(CONFIG, seed=seed))
    second.card = replace(second.card, data=data if change == "weights" else None)
    shutil.rmtree(tmp_path / "first")
    second.save_pretrained(tmp_path / "first")
    with pytest.raises(RestoreKVError, match=r"init_adapter is .*, was "):
        train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run", resume=True)


def test_a_second_ctrl_c_ends_at_once(tiny_tokenizer, tmp_path, monkeypatch):
    def interrupt(*_):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(checkpoint.seal, "seal_tensors", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train_adapter(
            build_model("llama"),
            tiny_tokenizer,
            EXAMPLES,
            CONFIG,
            tmp_path / "run",
            progress=interrupt,
        )
    assert not list((tmp_path / "run").glob("*checkpoint*"))


def test_a_log_that_lacks_steps_does_not_stop_a_whole_checkpoint(tiny_tokenizer, tmp_path):
    config, run = replace(CONFIG, steps=4, contexts=1), tmp_path / "run"
    train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, config, run)
    log = run / "loss.csv"
    header, *rows = log.read_text().splitlines(keepends=True)
    cases = {
        "": [],
        header: [],
        "".join([header, *rows[:2], rows[2][:-20]]): rows[:2],
        header + "".join(rows[1:]): rows[1:],
    }
    for text, left in [(None, []), *cases.items()]:
        log.unlink() if text is None else log.write_text(text)
        with pytest.warns(RestoreKVWarning, match=f"loss.csv lacks {4 - len(left)} of the 4 steps"):
            train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, config, run, resume=True)
        assert [line.split(",")[0] for line in log.read_text().splitlines()[1:]] == [
            row.split(",")[0] for row in left
        ]
    log.write_text("epoch,val\n1,0.5\n")
    with pytest.raises(RestoreKVError, match=r"loss\.csv is not the log of a run; move it away"):
        train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, config, run, resume=True)
    assert log.read_text() == "epoch,val\n1,0.5\n"


def test_a_run_that_is_done_and_lost_its_log_ends_without_a_stack_trace(
    tiny_model, tiny_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("restorekv.cli.loading.open_model", lambda *_: (tiny_model, tiny_tokenizer))
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"context": EXAMPLES[0].context, "questions": ["who lives?"]}))
    words = ["train", "--data", data, "--out", tmp_path / "run", "--steps", 1, "--rank", 1]
    words += ["--restore-tokens", 1, "--max-new-tokens", 2, "--ratio-min", 0.2]
    assert cli(*words).code == 0
    (tmp_path / "run" / "loss.csv").unlink()
    again = cli(*words, "--resume")
    assert again.code == 0, again.err
    assert "lacks 1 of the 1 steps done" in " ".join(again.err.split())


def test_another_run_is_neither_overwritten_nor_continued(tiny_tokenizer, tmp_path, monkeypatch):
    model = build_model("llama")
    train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")
    monkeypatch.setattr(checkpoint, "describe_origin", None)  # known before the data are hashed
    with pytest.raises(RestoreKVError, match="already holds a run"):
        train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")


def test_a_run_that_another_one_overtook_leaves_its_folder_alone(
    tiny_tokenizer, tmp_path, monkeypatch
):
    """Both found an empty folder, and the other one ended before this one had set itself up."""
    model = build_model("llama")
    own_check = loop.check_setup

    def be_overtaken(*arguments):
        monkeypatch.setattr(loop, "check_setup", own_check)
        train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run")
        return own_check(*arguments)

    monkeypatch.setattr(loop, "check_setup", be_overtaken)
    other = replace(CONFIG, seed=1)
    with pytest.raises(RestoreKVError, match="already holds a run"):
        train_adapter(model, tiny_tokenizer, EXAMPLES, other, tmp_path / "run")
    train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "whole")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_refused_training_leaves_nothing_behind(tiny_tokenizer, tmp_path, monkeypatch):
    model, run, file = build_model("llama"), tmp_path / "new" / "run", tmp_path / "file"
    file.write_text("mine")
    long = replace(EXAMPLES[0], context="house " * 5000, where="line 7")
    with pytest.raises(RestoreKVError, match="line 7 needs"):
        train_adapter(model, tiny_tokenizer, [long], CONFIG, run)
    monkeypatch.setattr(
        checkpoint, "describe_origin", None
    )  # the places come before the data are hashed
    for out, store in (
        (run, file),
        (run, file / "store"),
        (file / "run", None),
        (run, Path("/dev/null")),
    ):
        with pytest.raises(RestoreKVError, match="is a file; give the name of a folder"):
            train_adapter(model, tiny_tokenizer, EXAMPLES, CONFIG, out, store=store)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", ["model.safetensors", "loss.csv"])
def test_a_folder_of_something_else_is_left_alone(tiny_tokenizer, tmp_path, name, resume):
    (tmp_path / name).write_text("epoch,val\n1,0.5\n")
    with pytest.raises(RestoreKVError, match="holds other files"):
        train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path, resume)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        (name, "epoch,val\n1,0.5\n")
    ]


def test_a_run_may_have_its_store_in_its_folder(tiny_tokenizer, tmp_path):
    """The store is filled before the run has a file that shows whose folder it is."""
    run = tmp_path / "run"
    config = replace(CONFIG, steps=2)
    for folder, store in ((run, run / "kept" / "store"), (tmp_path / "other", None)):
        train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, config, folder, store=store)
    assert losses(run) == losses(tmp_path / "other")
    for left in (CHECKPOINT_FILE, LOG_FILE):
        (run / left).unlink()
    with pytest.raises(RestoreKVError, match="holds other files"):
        check_folders(run, store=run / "kept" / "store")


def test_a_run_killed_while_it_wrote_its_first_file_is_begun_anew(tiny_tokenizer, tmp_path):
    """What such a run leaves is no file of somebody else."""
    left = make_unique_name(tmp_path / LOG_FILE)
    left.write_text("step,lo")
    check_folders(tmp_path, resume=True)
    train_adapter(build_model("llama"), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path, resume=True)
    assert len(losses(tmp_path)) == CONFIG.steps
