"""Whatever a user can get wrong ends in one sentence on stderr, a non-zero exit and no half-written
file.
"""

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest

import restorekv.cli.train
import restorekv.compression.full_cache
import restorekv.evaluation.run
import restorekv.train.loop
from restorekv.context import CompressedContext
from tests.helpers.bad_input import (
    CASES,
    USAGE,
    files_below,
    flags,
    old_run,
    train,
)
from tests.helpers.cli_world import TEXT, Result, World, build_world, cli


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_tokenizer) -> World:
    return build_world(tmp_path_factory.mktemp("world"), tiny_tokenizer)


def assert_refused(result: Result, words: str, code: int = 1) -> None:
    assert result.code == code, result
    line = result.err
    assert line.startswith("error: ") and line.endswith(".\n") and line.count("\n") == 1, line
    assert not re.search(r"[.!?] [A-Z]", line), f"more than one sentence: {line}"
    assert re.search(words, line), line
    assert "Traceback" not in result.out + line and not result.out.strip(), result.out


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_one_sentence(world, tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    build, words = CASES[name]
    args = build(world, tmp_path)
    before = files_below(tmp_path), files_below(world.root)
    assert_refused(cli(*args), words)
    assert (files_below(tmp_path), files_below(world.root)) == before


@pytest.mark.parametrize("name", USAGE)
def test_wrong_usage_points_to_the_help(world, tmp_path, name):
    build, words = USAGE[name]
    assert_refused(cli(*build(world, tmp_path)), f"{words}.*see restorekv .*--help", code=2)
    assert not files_below(tmp_path)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 16 KB; only root may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)]
    if (
        os.geteuid()
        or shutil.which("mount") is None
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("cannot mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_disk_that_is_really_full(world, small_disk):
    before = Path(world.cache).read_bytes()[:4000]
    (small_disk / "doc.rkv").write_bytes(before)
    result = cli(*flags("--ratio", 0.5, "-o", small_disk / "doc.rkv")(world, small_disk))
    assert_refused(result, "No space left on device; free some space")
    assert [path.name for path in small_disk.iterdir()] == ["doc.rkv"]
    assert (small_disk / "doc.rkv").read_bytes() == before


def test_a_picture_on_a_full_disk(world, small_disk):
    plot = small_disk / "plot.png"
    result = cli("inspect", world.cache, "--plot", plot)
    assert_refused(Result(result.code, "", result.err), "No space left on device")
    assert not list(small_disk.iterdir())


def test_a_file_larger_than_allowed(world, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        result = cli(*flags("--ratio", 0.5)(world, tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_refused(result, "File too large")
    assert not files_below(tmp_path)


def test_a_disk_that_fills_up_at_the_last_moment(world, tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert_refused(cli(*flags("--ratio", 0.5)(world, tmp_path)), "No space left on device")
    assert not files_below(tmp_path)


def test_a_folder_that_may_not_be_written(world, tmp_path):
    # Root may write wherever the kernel lets it.
    folder = Path("/sys") if os.geteuid() == 0 else tmp_path / "locked"
    if os.geteuid():
        folder.mkdir(mode=0o555)
    result = cli(*flags("--ratio", 0.5, "-o", folder / "doc.rkv")(world, tmp_path))
    assert_refused(result, "not writable|Permission denied|Read-only|not permitted")


def interrupt(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_while_answering(world, monkeypatch):
    """What is said does not stick to the answer."""

    def stream(*_: object, **__: object) -> Iterator[str]:
        yield "Half an"
        interrupt()

    monkeypatch.setattr(CompressedContext, "ask", stream)
    result = cli("ask", world.cache, "Which code?", "--model", world.model)
    assert result.code == 130 and result.out == "Half an\n"
    assert result.err.startswith("error: Interrupted")


@pytest.mark.parametrize("moment", ["while scoring", "while writing"])
def test_interrupted_while_compressing(world, tmp_path, monkeypatch, moment):
    if moment == "while scoring":
        monkeypatch.setattr(restorekv.compression.full_cache, "prefill", interrupt)
    else:
        monkeypatch.setattr(os, "fsync", interrupt)
    assert_refused(cli(*flags("--ratio", 0.5)(world, tmp_path)), "Interrupted", code=130)
    assert not files_below(tmp_path)


def test_a_folder_that_holds_a_run_is_refused_before_the_model_is_loaded(
    world, tmp_path, monkeypatch
):
    command = old_run()(world, tmp_path)
    monkeypatch.setattr("restorekv.cli.loading.open_model", None)
    assert_refused(cli(*command), "already holds a run")


def test_interrupted_while_training_names_the_way_on(world, tmp_path, monkeypatch):
    monkeypatch.setattr(restorekv.train.loop, "_run_forward_backward", interrupt)
    result = cli(*train()(world, tmp_path))
    assert "\nBefore training, loss" in result.err
    error = result.err[result.err.index("error: ") :]
    assert_refused(replace(result, err=error), "Interrupted; no checkpoint yet", code=130)
    assert not (tmp_path / "run" / "adapter").exists()


def test_interrupted_over_a_folder_of_texts_names_the_way_on(world, tmp_path, monkeypatch):
    texts, out = tmp_path / "texts", tmp_path / "caches"
    texts.mkdir()
    (texts / "a.txt").write_text(TEXT)
    monkeypatch.setattr(restorekv.compression.full_cache, "prefill", interrupt)
    result = cli("compress", texts, "--model", world.model, "--adapter", "none", "-o", out)
    assert_refused(result, "Interrupted; the same command continues what is in", code=130)


def test_interrupted_while_evaluating_names_the_way_on(world, tmp_path, monkeypatch):
    monkeypatch.setattr(restorekv.evaluation.run, "run_grid", interrupt)
    asked = ("--benchmark", "tiny", "--evictor", "knorm@none", "--ratio", 0.5, "--count", 1)
    result = cli("eval", "--model", world.model, *asked, "--out", tmp_path / "run")
    assert_refused(result, "Interrupted; the same command continues what is in", code=130)


def test_a_real_process_gets_a_real_ctrl_c(world, tmp_path):
    """The process waits in the middle of compressing until the signal comes from outside."""
    script = (
        "import sys, time, restorekv.compression.full_cache as c, restorekv.cli as cli\n"
        "c.prefill = lambda *_, **__: (print('compressing', flush=True), time.sleep(600))\n"
        "cli.main(sys.argv[1:])\n"
    )
    args = [str(arg) for arg in flags("--ratio", 0.5)(world, tmp_path)]
    command = [sys.executable, "-c", script, *args]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "compressing\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert_refused(Result(process.returncode, "", told), "Interrupted", code=130)
    assert not files_below(tmp_path)


def test_output_that_cannot_be_printed():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", "import restorekv.cli as cli; cli.main()", "--help"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert_refused(Result(done.returncode, "", done.stderr), "No space left on device")
