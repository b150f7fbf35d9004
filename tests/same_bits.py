"""Print a digest of what restorekv computes on the tiny model, to compare two states of the source
bit by bit.

    python tests/same_bits.py > before.txt
    python tests/same_bits.py > after.txt         # after a change that should change no number
    diff before.txt after.txt

It uses only the command line, so it runs before and after a redesign: compression by every evictor
with and without restore tokens, other settings, questions, 20 training steps, a gate, and a small
evaluation grid.
"""

import contextlib
import hashlib
import io
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from restorekv.cli import execute
from restorekv.evictors import EVICTORS

TEXT = Path(__file__).parent.parent / "examples" / "register.txt"
RESTORED = ("kvzip", "kvzip+", "fastkvzip", "snapkv", "h2o", "contrastkv")
VARIANTS = {
    "per-head": ("--allocation", "per-head"),
    "counted": ("--prefix-policy", "counted"),
    "streamed": ("--streaming-chunk", "256"),
    "offset": ("--offset", "100"),
    "int8": ("--kv-dtype", "int8"),
    "from evicted": ("--restore-from", "evicted"),
    "attention matching": ("--evictor", "am-fast", "--adapter", "none"),
}
QUESTIONS = ("Who lives in the red house?", "What is the code?")
GRID = (
    "--protocol",
    "kvzip",
    "--count",
    "2",
    "--ratio",
    "0.2",
    "--evictor",
    "kvzip",
    "--evictor",
    "snapkv",
    "--benchmark",
    "tiny",
)
TRAIN = ("--steps", "20", "--count", "6", "--restore-tokens", "3", "--rank", "4")
NEWER = {"contexts"}  # figures that earlier versions do not have
VOLATILE = {
    "seconds",
    "version",
    "versions",
    "date",
    "time",
    "machine",
    "python",
    "torch",
    "peak",
    "file",
} | NEWER


def run(*arguments: object) -> str:
    """One command in this process; its standard output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = execute([str(argument) for argument in arguments])
    return out.getvalue() if code == 0 else f"exit {code}: {err.getvalue().strip()}"


def digest(path: Path) -> str:
    """Of every tensor in a safetensors file, by name; a header's text is not part of it."""
    if not path.exists():
        return "no file"
    found = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        if "manifest" not in name:
            found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def scores(value: object) -> object:
    """Results without what differs from run to run."""
    if isinstance(value, dict):
        return {
            name: scores(part)
            for name, part in value.items()
            if not VOLATILE & set(name.lower().split("_"))
        }
    return [scores(part) for part in value] if isinstance(value, list) else value


def show(name: str, value: str) -> None:
    print(f"{name:40} {value}", flush=True)


def compressions(folder: Path) -> None:
    """Every evictor alone, those with an adapter restored, and each convention once."""
    work = {
        name: ("--evictor", name, "--adapter", "none") for name in EVICTORS if name != "kvpress"
    }
    work |= {f"{name} restored": ("--evictor", name) for name in RESTORED} | VARIANTS
    for number, (name, flags) in enumerate(work.items()):
        out = folder / f"{number}.rkv"
        problem = run("compress", TEXT, "--model", "tiny", "--output", out, *flags)
        show(f"compress {name}", digest(out) if out.exists() else problem)
        for question in QUESTIONS if out.exists() else ():
            told = run("ask", out, question).strip()  # answers began with a space once
            show(f"  ask {question}", hashlib.sha256(told.encode()).hexdigest()[:16])


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        compressions(folder)
        problem = run("train", "--model", "tiny", "--data", "tiny", "--out", folder / "run", *TRAIN)
        files = sorted((folder / "run" / "adapter").glob("*.safetensors"))
        show("train, 20 steps", " ".join(digest(path) for path in files) or problem)
        problem = run(
            "train-gate",
            "--model",
            "tiny",
            "--data",
            "tiny",
            "--out",
            folder / "gate",
            "--count",
            "4",
            "--steps",
            "20",
        )
        show(
            "train-gate, 20 steps",
            digest(folder / "gate") if (folder / "gate").exists() else problem,
        )
        run(
            "eval",
            "--model",
            "tiny",
            "--out",
            folder / "grid",
            "--json",
            folder / "grid.json",
            *GRID,
        )
        rows = scores(json.loads((folder / "grid.json").read_text())["rows"])
        show("eval", hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()[:16])


if __name__ == "__main__":
    main()
