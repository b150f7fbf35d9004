"""A folder with everything that commands need: tiny models, adapters, a text, a cache file and
training data.
"""

import contextlib
import io
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

import benchmarks.__main__
import paper.__main__
import paper.analysis.__main__
from restorekv.cli import execute
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.models import build_model

TEXT = "the code of the red house is seven; who lives in the blue house? " * 6
QUESTION = "who lives in the red house?"
PROGRAMS = {
    "paper": paper.__main__.execute,
    "paper.analysis": paper.analysis.__main__.execute,
    "benchmarks": benchmarks.__main__.execute,
}


@dataclass(frozen=True)
class World:
    """Paths as text, ready for the command line."""

    root: Path

    def __getattr__(self, name: str) -> str:
        return str(self.root / name)


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def build_world(root: Path, tokenizer: PreTrainedTokenizerFast) -> World:
    """Make the folder's files and return their paths.

    Of the models, `other` has the shape of `model` and other weights, `wide` another shape, and
    `turned` another RoPE.
    """
    world = World(root)
    models = {
        "model": build_model("qwen3"),
        "other": build_model("qwen3", seed=1),
        "wide": build_model("qwen3", hidden_size=64),
        "turned": build_model(
            "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 500.0}
        ),
    }
    for name, model in models.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for name, of in {
        "adapter": "model",
        "adapter_of_other": "other",
        "adapter_of_wide": "wide",
    }.items():
        adapter = RestoreAdapter.create(models[of], 8, rank=2)
        adapter.record_training(evictor="kvzip", prefix_policy="free", ratio_range=(0.1, 0.4))
        adapter.save_pretrained(root / name)
    (root / "text").write_text(TEXT)
    rows = [{"context": TEXT, "questions": [QUESTION], "answers": [" seven"]}] * 2
    (root / "data").write_text("".join(json.dumps(row) + "\n" for row in rows))
    compress(models["model"], tokenizer, TEXT, ratio=0.3, adapter=root / "adapter").save(
        root / "cache"
    )
    return world


def cli(*args: object, stdin: bytes = b"") -> Result:
    """Run a command of restorekv, or `paper` or `benchmarks` of a checkout, in this process."""
    words = [str(argument) for argument in args]
    of = PROGRAMS.get(words[0]) if words else None
    out, err, before = io.StringIO(), io.StringIO(), sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = of(words[1:]) if of else execute(words)
    finally:
        sys.stdin = before
    return Result(code, out.getvalue(), err.getvalue())
