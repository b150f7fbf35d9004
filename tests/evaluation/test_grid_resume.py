"""A run that is killed at any write and resumed ends as one that was never killed, and nothing is
done twice.
"""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from restorekv.evaluation import results
from restorekv.evaluation.run import run_grid
from restorekv.evaluation.worker import OPEN_MODELS
from tests.helpers.grid_world import contents, resume, tiny_grid

CONTEXTS, CELLS, PROGRAM, ROOT = 4, 5, "tests.helpers.grid_world", Path(__file__).parents[2]
# The writes at which one start after the other is killed; a whole run has 50, from cell.json to
# summary.json.
KILLS = [
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9),
    (12, 9, 5, 0, 1, 3, 2, 6, 0, 4),
    (11, 6, 2),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The model stays open in this process, for its children."""
    folder = tmp_path_factory.mktemp("whole")
    OPEN_MODELS.clear()
    run_grid(tiny_grid(CONTEXTS), folder)
    return contents(folder)


def child(folder: Path, log: Path, kill_at: int = -1) -> int:
    """Resume the run in a process forked from this one and returns its exit code."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            resume(folder, log, CONTEXTS, kill_at)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def program(folder: Path, log: Path, kill_at: int = -1) -> int:
    """Resume the run as a program of its own and returns its exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", PROGRAM, folder, log, str(CONTEXTS), str(kill_at)]
    return subprocess.run(command, env=environment, cwd=ROOT, stderr=subprocess.DEVNULL).returncode


def check_log(log: Path, kills: int) -> None:
    """Every context was asked of every cell; a kill costs at most the context under way."""
    asked = Counter(log.read_text().splitlines())
    assert len(asked) == CELLS * CONTEXTS
    assert asked.total() - len(asked) <= kills * CELLS


@pytest.mark.parametrize(
    ("start", "kills"),
    [
        (child, KILLS[0]),
        pytest.param(child, KILLS[1], marks=pytest.mark.slow),
        pytest.param(program, KILLS[2], marks=pytest.mark.slow),
    ],
)
def test_killed_again_and_again_and_resumed(uninterrupted, tmp_path, start, kills):
    folder, log = tmp_path / "run", tmp_path / "log"
    assert [start(folder, log, write) for write in kills] == [-signal.SIGKILL] * len(kills)
    assert start(folder, log) == 0
    assert contents(folder) == uninterrupted
    check_log(log, len(kills))


@pytest.mark.slow
def test_killed_before_anything_is_answered(uninterrupted, tmp_path):
    """Folders with cell.json alone, and none."""
    folder = tmp_path / "run"
    run_grid(tiny_grid(CONTEXTS), folder)
    for path in sorted(folder.rglob("*"))[::-1]:
        if path.is_file() and path.name != results.CELL:
            path.unlink()
    for path in next(iter(sorted(folder.glob("cells/*")))).iterdir():
        path.unlink()
    run_grid(tiny_grid(CONTEXTS), folder)
    assert contents(folder) == uninterrupted


def test_answers_that_were_lost_are_asked_again_with_their_summary(uninterrupted, tmp_path):
    """A finished cell whose file was cut is filled again, and its summary is of all answers."""
    run_grid(tiny_grid(CONTEXTS), tmp_path)
    path = next(path for path in sorted(tmp_path.glob("cells/*/answers.jsonl")))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    summary = path.with_name("summary.json")
    summary.write_text(summary.read_text().replace('"score": ', '"score": 1'))
    run_grid(tiny_grid(CONTEXTS), tmp_path)
    assert contents(tmp_path) == uninterrupted
