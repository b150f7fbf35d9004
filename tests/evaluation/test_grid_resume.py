"""A run killed at any moment and carried on ends as one that was never killed, and nothing is done twice."""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from restorekv.evaluation import results
from restorekv.evaluation.run import run
from restorekv.evaluation.worker import opened_model
from tests.helpers.grid_world import bundled_grid, contents, logged

COUNT, PROGRAM, ROOT = 4, "tests.helpers.grid_world", Path(__file__).parents[2]
LINES = 2 * COUNT * 5  # of the log: every context asked of every cell, and on the disk


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The model stays open in this process, for its children."""
    folder = tmp_path_factory.mktemp("whole")
    opened_model.cache_clear()
    run(bundled_grid(COUNT), folder)
    return contents(folder)


def child(folder: Path, log: Path) -> int:
    """The run in a process forked from this one; its id."""
    process = os.fork()
    if process == 0:
        try:
            logged(log)
            run(bundled_grid(COUNT), folder)
        finally:
            os._exit(0 if len(results.load(folder)) == 5 else 1)
    return process


def program(folder: Path, log: Path) -> subprocess.Popen:
    """The run as a program of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.Popen(
        [sys.executable, "-m", PROGRAM, folder, log, str(COUNT)], env=environment, stderr=subprocess.PIPE, cwd=ROOT
    )


def entries(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def wait_until(log: Path, lines: int, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while len(entries(log)) < lines:
        assert time.monotonic() < end, "the run makes no progress"
        time.sleep(0.0005)


def check_log(log: Path, kills: int) -> None:
    """Every context is on the disk of every cell once; a kill costs at most the context under way."""
    told = Counter(entries(log))
    done, asked = ({line: n for line, n in told.items() if line.startswith(word)} for word in ("done", "asked"))
    assert set(done.values()) == {1}
    assert LINES // 2 - kills <= len(done) <= LINES // 2, "killed between the disk and the log, at most"
    assert len(asked) == LINES // 2
    again = sum(asked.values()) - len(asked)
    assert again <= kills * 5, "one context of five cells"


@pytest.mark.parametrize("seed", [0, 1])
def test_killed_ten_times_and_resumed(uninterrupted, tmp_path, seed):
    draw, folder, log, ends = random.Random(seed), tmp_path / "run", tmp_path / "log", Counter()
    for moment in sorted(draw.sample(range(LINES - 2), 10)):
        process = child(folder, log)
        wait_until(log, moment)
        time.sleep(draw.uniform(0, 0.03))
        os.kill(process, signal.SIGKILL)
        ends[os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])] += 1
    assert ends[-signal.SIGKILL] >= 8 and ends.keys() <= {0, -signal.SIGKILL}, "the last may have come to its end"
    assert os.waitpid(child(folder, log), 0)[1] == 0
    assert contents(folder) == uninterrupted
    check_log(log, 10)


@pytest.mark.slow
def test_a_program_killed_ten_times_and_resumed(uninterrupted, tmp_path):
    draw, folder, log = random.Random(2), tmp_path / "run", tmp_path / "log"
    for moment in sorted(draw.sample(range(LINES - 2), 10)):
        with program(folder, log) as process:
            wait_until(log, moment)
            time.sleep(draw.uniform(0, 0.03))
            process.kill()
    with program(folder, log) as process:
        said = process.communicate()[1].decode()
    assert process.returncode == 0, said
    assert contents(folder) == uninterrupted
    check_log(log, 10)


def test_killed_before_anything_is_answered(uninterrupted, tmp_path):
    """Folders with cell.json alone, and none."""
    folder = tmp_path / "run"
    run(bundled_grid(COUNT), folder)
    for path in sorted(folder.rglob("*"))[::-1]:
        if path.is_file() and path.name != results.CELL:
            path.unlink()
    for path in next(iter(sorted(folder.glob("cells/*")))).iterdir():
        path.unlink()
    run(bundled_grid(COUNT), folder)
    assert contents(folder) == uninterrupted
