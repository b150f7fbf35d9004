"""The campaign of sudden deaths: `python -m tests.hostile.kill --moments 50 --seed 0 [--work train ...]`.

Each kind of work runs once undisturbed; then it is started, killed with SIGKILL at a random moment and looked at: its
output must be the old or the new content. Started again it must end, with the result of the undisturbed run, and leave
nothing else behind.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

ROOT = Path(__file__).parents[2]
TEXT = "The red house belongs to Ada. The code of the blue house is 482. " * 30
PYTHON = (sys.executable, "-m", "restorekv")
SAVE = """
import sys
from restorekv import compress, load_model
model, tokenizer = load_model("tiny")
text = open(sys.argv[1]).read()
made = [compress(model, tokenizer, text, ratio=ratio) for ratio in (0.1, 0.2)]
for _ in range(40):
    for each in made:
        each.save(sys.argv[2])
"""


@dataclass(frozen=True)
class Work:
    """A command, its output in a folder, and what of it must be the same; `old`: a file that stands there before."""

    command: Callable[[Path], Sequence[str]]
    result: Callable[[Path], str]
    old: str = ""


def tensors(path: Path) -> str:
    """A digest of the tensors of a file, or that there is none."""
    if not path.exists():
        return "nothing"
    found = hashlib.sha256()
    for name, value in sorted(safetensors.torch.load_file(path).items()):
        found.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def adapter(folder: Path) -> str:
    return " ".join(tensors(path) for path in sorted((folder / "run" / "adapter").glob("*.safetensors"))) or "nothing"


def grid(folder: Path) -> str:
    """The rows that eval writes, without times."""
    path = folder / "rows.json"
    if not path.exists():
        return "nothing"
    kept = [{k: v for k, v in row.items() if "seconds" not in k} for row in json.loads(path.read_text())["rows"]]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def parquet(folder: Path) -> str:
    """Every row of the data that was built."""
    if not (folder / "data" / "manifest.json").exists():
        return "nothing"
    import pyarrow.parquet

    rows = [pyarrow.parquet.read_table(path).to_pylist() for path in sorted((folder / "data").glob("*.parquet"))]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=str).encode()).hexdigest()[:16]


def page(folder: Path) -> str:
    """The figures of the paper's page, without times and dates."""
    path = folder / "paper" / "report" / "paper.json"
    if not path.exists():
        return "nothing"
    return hashlib.sha256(
        json.dumps(json.loads(path.read_text()).get("experiments"), sort_keys=True).encode()
    ).hexdigest()[:16]


WORKS = {
    "compress": Work(
        lambda f: (*PYTHON, "compress", f / "text", "-o", f / "out.rkv", "--model", "tiny"),
        lambda f: tensors(f / "out.rkv"), "out.rkv",
    ),
    "save": Work(
        lambda f: (sys.executable, "-c", SAVE, f / "text", f / "out.rkv"), lambda f: tensors(f / "out.rkv"), "out.rkv",
    ),
    "train": Work(
        lambda f: (*PYTHON, "train", "--model", "tiny", "--out", f / "run", "--steps", "8", "--count", "3", "--resume",
                   "--checkpoint-every", "2", "--restore-tokens", "2", "--rank", "2"),
        adapter,
    ),
    "gate": Work(
        lambda f: (*PYTHON, "train-gate", "--model", "tiny", "--out", f / "gate", "--count", "3", "--steps", "10",
                   "--resume"),
        lambda f: tensors(f / "gate"),
    ),
    "data": Work(
        lambda f: (*PYTHON, "data", "build", "--mixture", "passages", "--model", "tiny",
                   "--stories", f / "stories.jsonl", "--novels", f / "novels", "--story-passages", "4",
                   "--novel-passages", "0", "--section-passages", "0", "--resume", "--out", f / "data"),
        parquet,
    ),
    "eval": Work(
        lambda f: (*PYTHON, "eval", "--model", "tiny", "--out", f / "grid", "--json", f / "rows.json", "--count", "4",
                   "--ratio", "0.2", "--evictor", "kvzip"),
        grid,
    ),
    "paper": Work(
        lambda f: (sys.executable, "-m", "paper", f / "paper", "--only", "tradeoff", "--count", "2"), page,
    ),
}  # fmt: skip


def prepare(folder: Path, work: Work, old: Path) -> None:
    """The inputs, and the content that stood there before."""
    folder.mkdir()
    (folder / "text").write_text(TEXT)
    (folder / "novels").mkdir()
    asked = [{"question": "Who owns it?", "answers": ["Ada"]}]
    stories = [{"id": f"s{number}", "context": f"{number} {TEXT}", "questions": asked} for number in range(6)]
    (folder / "stories.jsonl").write_text("".join(json.dumps(story) + "\n" for story in stories))
    if work.old:
        shutil.copy(old, folder / work.old)


def start(work: Work, folder: Path) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [str(part) for part in work.command(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(work: Work, folder: Path) -> tuple[float, str]:
    """Seconds and result of a run to the end."""
    begun, process = time.monotonic(), start(work, folder)
    _, errors = process.communicate()
    if process.returncode:
        return 0.0, f"failed: {errors.decode(errors='replace').strip()[-300:]}"
    return time.monotonic() - begun, work.result(folder)


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith(".tmp")]


def moment(
    name: str, work: Work, number: int, seed: int, seconds: float, results: set[str], old: Path, place: Path
) -> str:
    """What was wrong after a death at one moment, or nothing."""
    folder = place / f"{name}{number}"
    prepare(folder, work, old)
    process = start(work, folder)
    time.sleep(random.Random(f"{seed}/{name}/{number}").uniform(0, seconds))
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    try:
        between = work.result(folder)
    except Exception as error:
        return f"unreadable after the death: {type(error).__name__}: {error}"
    if between not in results | {"nothing", tensors(old)}:
        return f"neither old nor new content: {between}"
    _, after = finish(work, folder)
    if after not in results:
        return f"started again it gave {after}, undisturbed {sorted(results)}"
    left = leftovers(folder)
    shutil.rmtree(folder)
    return f"left {left[0]} behind" if left else ""


def run(names: Sequence[str], moments: int, seed: int) -> list[str]:
    """The failures of all kinds of work."""
    failures = []
    with tempfile.TemporaryDirectory(prefix="restorekv-kill-") as name:
        place = Path(name)
        old = place / "old"
        safetensors.torch.save_file({"old": torch.ones(3)}, old)
        for kind in names:
            work = WORKS[kind]
            prepare(place / kind, work, old)
            seconds, result = finish(work, place / kind)
            results = {result}
            if kind == "save":  # it ends with the second of two contents
                results.add(first_saved(place / kind))
            found = [f"undisturbed: {result}"] if not seconds else [
                problem for number in range(moments)
                if (problem := moment(kind, work, number, seed, seconds, results, old, place))
            ]  # fmt: skip
            print(f"{kind:10} {moments} moments of {seconds:.0f} s, {len(found)} failures", flush=True)
            for problem in found:
                print(f"  {problem}", flush=True)
            failures += found
    return failures


def first_saved(folder: Path) -> str:
    """The first of the two contents that the work `save` writes in turn."""
    from restorekv import compress, load_model

    model, tokenizer = load_model("tiny")
    compress(model, tokenizer, TEXT, ratio=0.1).save(folder / "first.rkv")
    return tensors(folder / "first.rkv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", nargs="*", choices=list(WORKS), default=list(WORKS))
    options = parser.parse_args()
    failures = run(options.work, options.moments, options.seed)
    sys.exit(f"{len(failures)} failures" if failures else 0)


if __name__ == "__main__":
    main()
