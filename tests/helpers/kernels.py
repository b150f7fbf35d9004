"""What the tests of both files of Triton kernels run in separate processes."""

import json
import os
import subprocess
import sys
from pathlib import Path


def without_triton(code: str) -> None:
    """Run code in a process in which Triton cannot be imported; raise if the code fails."""
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['triton'] = None\n{code}"], check=True
    )


def compiled(script: str) -> list[dict]:
    """Return what tests/helpers/SCRIPT prints about compiled kernels; no GPU is needed."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", f"tests.helpers.{Path(script).stem}"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)
