"""Several processes train as one does, with whole and with spread backbones; a run that is killed
is no run lost.
"""

import csv
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed.fsdp
from safetensors.torch import load_file

from restorekv.errors import RestoreKVError
from restorekv.model.identity import describe_weights, fingerprint_model
from restorekv.model.shape import get_backbone
from restorekv.train import checkpoint, loop, parallel
from restorekv.train.config import TrainConfig
from restorekv.train.examples import TrainingContext
from restorekv.train.loop import train_adapter
from restorekv.train.parallel import (
    is_shared,
    open_process_group,
    select_own_device,
    shard_model,
    wants_shards,
)
from tests.helpers import decoders
from tests.helpers.hybrids import build_hybrid, list_targets
from tests.helpers.models import build_model

TEXT = (
    "the code of the red house is seven; who lives in the blue house? the blue house is the "
    "code of who. "
)
ASKED = ("who lives in the red house?", "is the code seven?")
# Lengths, and with them the number of scoring passes, differ widely; the last one's answers need no
# decoding.
EXAMPLES = [
    TrainingContext(TEXT * 4 + "red", ASKED, (" seven", None)),
    TrainingContext(TEXT + "blue", ASKED, (None, " seven")),
    TrainingContext(TEXT * 2 + "house", ASKED, (None, None)),
    TrainingContext(TEXT + "lives", ASKED, (None, None), ((5, 6, 7), (8, 9))),
]
CONFIG = TrainConfig(
    evictor="kvzip:chunk=40",
    restore_tokens=2,
    rank=2,
    alpha=4,
    lr=1e-2,
    warmup=1,
    steps=2,
    questions=2,
    ratio_min=0.1,
    ratio_max=0.4,
    max_new_tokens=3,
    checkpoint_every=1,
)
ADAPTER = ("adapter_model.safetensors", "restore_embeddings.safetensors")


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def together(job: Callable, *arguments: object, size: int = 2, seconds: float = 120) -> list:
    """What job(group, *arguments) returns in each of `size` processes, or the exception that it
    raises there.
    """
    fork, port = get_context("fork"), free_port()

    def work(rank: int, end) -> None:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_PORT": str(port),
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        try:
            with open_process_group(select_own_device("cpu")) as group:
                end.send(job(group, *arguments))
        except Exception as error:
            end.send(error)

    pipes = [fork.Pipe(duplex=False) for _ in range(size)]
    members = [fork.Process(target=work, args=(rank, ours)) for rank, (_, ours) in enumerate(pipes)]
    for member in members:
        member.start()
    try:
        deadline = time.monotonic() + seconds
        ready = [theirs.poll(max(deadline - time.monotonic(), 0)) for theirs, _ in pipes]
        assert all(ready), f"processes wait for each other: {ready}"
        return [theirs.recv() for theirs, _ in pipes]
    finally:
        for member in members:
            member.kill()
            member.join()


def rows(folder: Path) -> list[list[str]]:
    """Step, loss and learning rate of every step, as they were written."""
    with (folder / "loss.csv").open() as file:
        return [row[:3] for row in csv.reader(file)][1:]


def losses(folder: Path) -> list[float]:
    return [float(row[1]) for row in rows(folder)]


def difference(one: Path, other: Path) -> float:
    """The largest between the tensors of two adapters."""
    pairs = [
        (load_file(one / "adapter" / name), load_file(other / "adapter" / name)) for name in ADAPTER
    ]
    return max(float((left[key] - right[key]).abs().max()) for left, right in pairs for key in left)


def run(
    group,
    tokenizer,
    folder: Path,
    config: TrainConfig,
    spreading: bool,
    resume: bool = False,
    stop: int = 0,
):
    """A run on a random model; returns the shares of the decoder layers' numbers that this process
    holds.
    """
    model = build_model("qwen3")
    layers = get_backbone(model).layers
    whole = sum(p.numel() for p in layers.parameters())
    if spreading:
        shard_model(model, torch.device("cpu"))

    def progress(step: int, *_: object) -> None:
        if step == stop:
            raise RestoreKVError("stopped")

    train_adapter(model, tokenizer, EXAMPLES, config, folder, resume, progress, group=group)
    return (
        sum(p.to_local().numel() if spreading else p.numel() for p in layers.parameters()) / whole
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory, tiny_tokenizer) -> Path:
    """One process with two contexts a step."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    train_adapter(
        build_model("qwen3"), tiny_tokenizer, EXAMPLES, replace(CONFIG, contexts=2), folder
    )
    return folder


@pytest.mark.parametrize("spreading", (False, True))
def test_two_processes_train_as_one_with_twice_the_contexts(
    alone, tiny_tokenizer, tmp_path, spreading
):
    shares = together(run, tiny_tokenizer, tmp_path / "run", CONFIG, spreading)
    assert shares == pytest.approx([0.5, 0.5] if spreading else [1, 1], abs=0.01)
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5, abs=1e-6)
    assert difference(tmp_path / "run", alone) < 1e-5
    with pytest.raises(RestoreKVError, match="processes is 1, was 2"):
        train_adapter(
            build_model("qwen3"), tiny_tokenizer, EXAMPLES, CONFIG, tmp_path / "run", resume=True
        )


def test_a_run_of_two_processes_resumes(alone, tiny_tokenizer, tmp_path):
    stopped = together(run, tiny_tokenizer, tmp_path / "run", CONFIG, False, False, 1)
    assert (
        all("stopped" in str(error) for error in stopped)
        and not (tmp_path / "run" / "adapter").exists()
    )
    assert together(run, tiny_tokenizer, tmp_path / "run", CONFIG, False, True) == [1, 1]
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5, abs=1e-6)
    assert difference(tmp_path / "run", alone) < 1e-5


@pytest.mark.parametrize("interrupted", [(0, 1), (0,)])
def test_a_run_of_two_processes_keeps_its_steps_when_it_is_interrupted(
    alone, tiny_tokenizer, tmp_path, interrupted
):
    config = replace(CONFIG, checkpoint_every=50)

    def job(group):
        def progress(step: int, *_: object) -> None:
            if group.rank in interrupted:
                os.kill(os.getpid(), signal.SIGINT)

        arguments = (
            build_model("qwen3"),
            tiny_tokenizer,
            EXAMPLES,
            config,
            tmp_path / "run",
            False,
            progress,
        )
        try:
            train_adapter(*arguments, group=group)
        except KeyboardInterrupt:
            return "interrupted"

    first, second = together(job)
    assert first == "interrupted" and (second == first or "Another process" in str(second))
    assert (
        len(rows(tmp_path / "run")) == 1
        and (tmp_path / "run" / checkpoint.CHECKPOINT_FILE).exists()
    )
    assert together(run, tiny_tokenizer, tmp_path / "run", config, False, True) == [1, 1]
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5, abs=1e-6)
    assert difference(tmp_path / "run", alone) < 1e-5


def test_who_has_no_gradient_counts_as_zero_and_a_failure_ends_all():
    def job(group):
        parameters = [torch.nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
        parameters[0].grad = torch.full((2, 2), 1.0 + 2 * group.rank)
        if group.rank:
            parameters[1].grad = torch.full((2, 2), 5.0)
        group.average_gradients(parameters)
        assert group.average_loss(float(group.rank)) == 0.5
        found = [None if p.grad is None else p.grad.unique().tolist() for p in parameters]
        if group.rank:
            raise RestoreKVError(str(found))
        group.wait()

    first, second = together(job, seconds=60)
    assert str(second) == "[[2.0], [2.5], None]"
    assert isinstance(first, RestoreKVError) and "Another process" in str(first)


def test_adapters_that_differ_are_refused(tiny_tokenizer, tmp_path, monkeypatch):
    make = loop.make_initial_adapter

    def make_own(model, tokenizer, config, notice):
        return make(model, tokenizer, replace(config, seed=int(os.environ["RANK"])), notice)

    monkeypatch.setattr(loop, "make_initial_adapter", make_own)
    errors = together(run, tiny_tokenizer, tmp_path / "run", CONFIG, False)
    assert all("different settings, models, adapters or data" in str(error) for error in errors)
    assert not (tmp_path / "run").exists()


def test_passes_pair_up_however_many_each_process_makes():
    ids = torch.arange(3, 20)[None]
    expected = build_model("llama")(ids).logits

    def job(group):
        model = build_model("llama")
        known = fingerprint_model(model), describe_weights(model)
        shard_model(model, torch.device("cpu"))
        assert (fingerprint_model(model), describe_weights(model)) == known
        passes = []
        get_backbone(model).register_forward_pre_hook(lambda *_: passes.append(1))
        with torch.no_grad():
            for own in ((1, 4), (3, 0), (2, 2)):
                with group.allow_uneven_passes(model):
                    for length in range(own[group.rank]):
                        model(ids[:, : 5 + 3 * length])
            made = len(passes)
            return made, float((model(ids).logits - expected).abs().max())

    assert together(job, seconds=60) == [(9, 0.0), (9, 0.0)]


def test_a_spread_backbone_needs_a_restore_token_at_every_ratio(tiny_tokenizer, tmp_path):
    short = [*EXAMPLES, TrainingContext("the red house", ("is it?",), (None,), where="line 5")]
    config = replace(CONFIG, ratio_min=0.05, ratio_max=1)

    def job(group):
        model = build_model("qwen3")
        shard_model(model, torch.device("cpu"))
        train_adapter(model, tiny_tokenizer, short, config, tmp_path / "run", group=group)

    assert all(
        "line 5" in str(error) and "r = 0.05" in str(error) for error in together(job, seconds=60)
    )


@pytest.mark.skipif(not decoders.HAS_LAYER_CONFIGS, reason="the class is not known")
def test_spread_layers_that_share_pairs_train_like_whole_ones(tiny_tokenizer, tmp_path):
    """Of such a model, a restore pass ends before the last layers, which leave no pairs."""
    targets = list_targets(build_hybrid("gemma4_sharing"))
    config = replace(CONFIG, targets=targets)

    def job(group):
        model = build_hybrid("gemma4_sharing")
        shard_model(model, torch.device("cpu"))
        train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run", group=group)

    twice = replace(config, contexts=2)
    model = build_hybrid("gemma4_sharing")
    train_adapter(model, tiny_tokenizer, EXAMPLES, twice, tmp_path / "alone")
    assert together(job) == [None, None]
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5, abs=1e-6)
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    (
        {"contexts": 2},
        {"evictor": "kvzip+:chunk=30", "restore_from": "evicted", "contexts": 2},
        {"evictor": "expected-attention", "hidden_weight": 0.5, "attention_weight": 0.5, "keep": 2},
        {"evictor": "h2o", "nested": True, "targets": ("k_proj", "v_proj")},
    ),
    ids=str,
)
def test_spread_backbones_train_with_every_setting(tiny_tokenizer, tmp_path, settings):
    config = replace(CONFIG, steps=6, **settings)
    twice = replace(config, contexts=2 * config.contexts)
    train_adapter(build_model("qwen3"), tiny_tokenizer, EXAMPLES, twice, tmp_path / "alone")
    assert together(run, tiny_tokenizer, tmp_path / "run", config, True)[0] == pytest.approx(
        0.5, abs=0.01
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5, abs=1e-6)
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-4


def test_what_cannot_be_shared_is_refused(monkeypatch):
    with pytest.raises(RestoreKVError, match="Only several processes"):
        wants_shards(True)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert not wants_shards(False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert wants_shards(False)
    with pytest.raises(RestoreKVError, match="its own GPU"):
        select_own_device("mps")
    assert is_shared("cuda:1") and not is_shared("cuda") and not is_shared("cpu")
    with pytest.raises(RestoreKVError, match="without a number"):
        wants_shards(True, shared=is_shared("cuda:1"))
    with (
        pytest.raises(RestoreKVError, match="do not find each other"),
        open_process_group(select_own_device("cpu")),
    ):
        pass


@pytest.mark.parametrize(
    ("device", "rank", "own", "backend"),
    [
        ("cuda", "3", "cuda:3", "nccl"),
        ("cuda:1", "3", "cuda:1", "gloo"),
        ("cpu", "3", "cpu", "gloo"),
    ],
)
def test_processes_have_a_gpu_each_or_one_for_all(monkeypatch, device, rank, own, backend):
    """Seven processes on one H200 trained the adapter for KVzip that way; here is no GPU."""
    monkeypatch.setenv("WORLD_SIZE", "7")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(parallel, "parse_device", torch.device)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    begun = {}

    def init(backend, timeout, device_id):
        begun.update(backend=backend, device=device_id)
        raise RuntimeError("far enough")

    monkeypatch.setattr(parallel.dist, "init_process_group", init)
    selected = select_own_device(device)
    assert str(selected) == own
    with (
        pytest.raises(RestoreKVError, match="far enough"),
        open_process_group(selected, is_shared(device)),
    ):
        pass
    assert begun == {"backend": backend, "device": selected if backend == "nccl" else None}


def killed(moment: int, how: str, *arguments: object) -> int:
    """Trains in a process that kills itself at its `moment`-th file to be written; returns what it
    ended with.
    """

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        count, whole, save = 0, os.replace, safetensors.torch.save_file

        def replacing(source, target) -> None:
            nonlocal count
            count += 1
            if count == moment and how == "before":
                die()
            whole(source, target)
            if count == moment:
                die()

        def saving(tensors, path, metadata) -> None:
            save(tensors, path, metadata)
            if count + 1 == moment:
                os.truncate(path, path.stat().st_size // 2)
                die()

        os.replace, safetensors.torch.save_file = replacing, saving if how == "within" else save
        train_adapter(build_model("llama"), *arguments, resume=True)

    child = get_context("fork").Process(target=work)
    child.start()
    child.join(100)
    return child.exitcode


@pytest.mark.slow
def test_a_run_survives_kills_at_every_kind_of_moment(tiny_tokenizer, tmp_path):
    config = replace(CONFIG, steps=4, keep=4)
    arguments = tiny_tokenizer, EXAMPLES[1:], config
    train_adapter(build_model("llama"), *arguments, tmp_path / "whole")
    moments = [
        (1, "within"),
        (1, "before"),
        (2, "after"),
        (2, "within"),
        (1, "after"),
        (3, "before"),
        (4, "after"),
    ]
    for moment, how in moments:
        assert killed(moment, how, *arguments, tmp_path / "cut") == -signal.SIGKILL
    assert killed(0, "", *arguments, tmp_path / "cut") == 0
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole") and len(rows(tmp_path / "cut")) == 4
    same_files(tmp_path / "cut", tmp_path / "whole")


def same_files(one: Path, other: Path) -> None:
    """Every file of both adapters, byte by byte."""
    names = {path.name for path in (other / "adapter").iterdir()}
    assert {path.name for path in (one / "adapter").iterdir() if path.is_file()} == names
    for name in names:
        assert (one / "adapter" / name).read_bytes() == (other / "adapter" / name).read_bytes(), (
            name
        )


@pytest.fixture(scope="module")
def command(tmp_path_factory, tiny_tokenizer) -> list[str]:
    """`train` with a tiny model, from a folder, as a user calls it."""
    folder = tmp_path_factory.mktemp("world")
    build_model("qwen3").save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    lines = [
        json.dumps({"context": example.context, "questions": ASKED}) + "\n" for example in EXAMPLES
    ]
    (folder / "data").write_text("".join(lines))
    options = (
        "--restore-tokens 2 --rank 2 --warmup 1 --max-new-tokens 3 --ratio-min 0.1 "
        "--checkpoint-every 2"
    )
    return [
        "train",
        "--model",
        str(folder / "model"),
        "--data",
        str(folder / "data"),
        *options.split(),
    ]


@pytest.mark.slow
def test_runs_killed_at_random_end_as_one_that_was_not(command, tmp_path):
    told = (tmp_path / "told").open("w")
    same = {"stdout": told, "stderr": told}
    command = [sys.executable, "-m", "restorekv", *command, "--steps", "60", "--resume", "--out"]
    subprocess.run([*command, tmp_path / "whole"], check=True, **same)
    with (tmp_path / "whole" / "loss.csv").open() as file:
        pace = sum(float(row["seconds"]) for row in csv.DictReader(file)) / 60
    chance, found = random.Random(4), tmp_path / "cut" / checkpoint.CHECKPOINT_FILE
    for _ in range(6):
        child, begun = subprocess.Popen([*command, tmp_path / "cut"], **same), time.time()
        while not found.exists() or found.stat().st_mtime < begun:
            assert child.poll() is None, (tmp_path / "told").read_text()
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 6) * pace)
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert 12 <= len(rows(tmp_path / "cut")) < 60 and not (tmp_path / "cut" / "adapter").exists()
    subprocess.run([*command, tmp_path / "cut"], check=True, **same)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    same_files(tmp_path / "cut", tmp_path / "whole")


def ended(command: list) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; everything it started ends with it."""
    child = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = child.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        raise
    return child.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ("torchrun", "accelerate", "spread"))
def test_launchers_start_what_trains_as_one_process(command, tmp_path, launcher):
    port = str(free_port())
    launch = {
        "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", port],
        "accelerate": ["accelerate.commands.launch", "--multi_gpu"],
        "spread": ["accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2"],
    }[launcher]
    if launcher != "torchrun":
        pytest.importorskip("accelerate")
        launch += ["--num_processes", "2", "--main_process_port", port]
    one = ended(
        ["restorekv", *command, "--contexts", "2", "--steps", "3", "--out", tmp_path / "alone"]
    )
    assert one[0] == 0, one[2]
    both = [*launch, "-m", "restorekv", *command, "--steps", "3", "--out", tmp_path / "both"]
    code, out, err = ended(both)
    assert code == 0, err
    assert out.count("Wrote") == err.count("Before training") == 1
    assert losses(tmp_path / "both") == pytest.approx(
        losses(tmp_path / "alone"), rel=1e-5, abs=1e-6
    )
    code, out, err = ended(both)
    assert code != 0 and "already holds a run" in err
