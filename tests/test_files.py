"""Files are written whole; what a killed process left of the same file goes with the next one."""

import fcntl
import os
import subprocess
import sys

import pytest

from restorekv.errors import RestoreKVError
from restorekv.files import HOST, alone, replacing, write_json

KILLED = """
import os, signal, sys
from pathlib import Path
from restorekv.files import replacing

with replacing(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    target, other = tmp_path / "a[1].json", tmp_path / "b.json"
    for path in (target, other):
        subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == 2 and left[0].startswith(".a[1].json.") and left[0].endswith(".tmp")
    dead = left[0].split(".")[-2]
    number = dead.removeprefix(f"{HOST}-")
    stay = [f".a[1].json.{HOST}-mine.tmp", f".a[1].json.{HOST}-{os.getppid()}.tmp", f".a1.json.{dead}.tmp",
            f"a[1].json.{dead}.tmp", f".a[1].json.other-{number}.tmp"]  # fmt: skip
    for name in stay:
        (tmp_path / name).write_text("stays")
    write_json(target, [1])
    assert {path.name for path in tmp_path.iterdir()} == {target.name, left[1], *stay}
    with replacing(other) as temporary:
        temporary.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {target.name, other.name, *stay}


def test_a_folder_has_one_worker_at_a_time(tmp_path):
    with alone(tmp_path / "new"):
        with pytest.raises(RestoreKVError, match="Another process is at work"), alone(tmp_path / "new"):
            pass
        assert list((tmp_path / "new").iterdir())
    assert not list((tmp_path / "new").iterdir())
    with alone(tmp_path / "new"):
        pass


def test_a_lock_that_its_holder_removes_meanwhile_is_not_acquired(tmp_path, monkeypatch):
    """A third process would lock the new file of that name, and two would be at work."""
    lock = fcntl.flock

    def after_the_holder(file, how):
        (tmp_path / ".lock").unlink()  # what the holder does last
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", after_the_holder)
    with pytest.raises(RestoreKVError, match="Another process is at work"), alone(tmp_path):
        pass
