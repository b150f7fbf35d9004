"""The samples of a benchmark as another process makes them, with other hashes of strings."""

import os
import subprocess
import sys

from restorekv.model.names import tiny_path

TINY = str(tiny_path("model"))
CODE = """
import sys
from transformers import AutoTokenizer
from restorekv.tasks import make_benchmark
from restorekv.tasks.base import digest_samples
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(digest_samples(make_benchmark(sys.argv[2]).load_samples(tokenizer, "kvpress")))
"""


def digest_elsewhere(spec: str, hash_seed: int = 7) -> str:
    """Return the digest of a benchmark's samples for the tiny model, from a new process."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", CODE, TINY, spec]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout.strip()
