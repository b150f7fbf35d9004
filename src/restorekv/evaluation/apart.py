"""A measurement in a process of its own, whose other half is `meter.serve`: its memory and its warm-up are its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from restorekv.errors import RestoreKVError


def measured(command: Sequence[str], job: dict, folder: Path, what: str, without: Collection[str] = ()) -> dict:
    """What `command JOB` finds, with the job's `threads`, offline, in this environment `without` some variables.

    Raises RestoreKVError where it fails: `what` failed, with the last line that it says.
    """
    job, place = {**job, "result": str(folder / "result.json")}, folder / "job.json"
    place.write_text(json.dumps(job))
    environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in environment.items() if name not in without}
    done = subprocess.run([*command, str(place)], capture_output=True, text=True, env=environment)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RestoreKVError(f"{what} failed ({reason}).")
    return json.loads(Path(job["result"]).read_text())
