"""Seven kinds of work for the campaign of sudden deaths, each made small, and the parts of their
output that must be the same.
"""

import csv
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet
import safetensors.torch
import torch

from paper.__main__ import execute as paper
from restorekv import compress, load_model
from restorekv.cli import execute
from restorekv.errors import RestoreKVError
from restorekv.restore import adapter_file
from restorekv.restore.adapter import RestoreAdapter

TEXT = "The red house belongs to Ada. The code of the blue house is 482. " * 12
OTHER_TEXT = "Leon sells the salt of the harbor. The mill of Agnes has 31 steps. " * 12
NOTHING = "nothing"
Result = tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """A kind of work: what runs in a folder, and the result there, part by part.

    `old` are outputs that exist before it begins.
    """

    run: Callable[[Path], int | None]
    result: Callable[[Path], Result]
    old: tuple[str, ...] = ()


def digest(content: bytes | str) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()[
        :16
    ]


def tensors(path: Path) -> str:
    """Return a digest of the tensors of a file, or NOTHING if there is no file."""
    if not path.exists():
        return NOTHING
    found = hashlib.sha256()
    for name, value in sorted(safetensors.torch.load_file(path).items()):
        found.update(
            name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return found.hexdigest()[:16]


def adapter(folder: Path) -> str:
    if not any(folder.glob("*")) or not any(
        adapter_file.locate_file(folder, file).exists() for file in adapter_file.FILES
    ):
        return NOTHING
    return adapter_file.read_adapter(folder).weights_hash()


def losses(path: Path) -> str:
    """Return a digest of a training's log without its seconds, or NOTHING if there is none."""
    return (
        digest(repr([line[:3] for line in csv.reader(path.open())])) if path.exists() else NOTHING
    )


def trained(folder: Path) -> Result:
    own = adapter(folder / "run" / "adapter")
    return own, NOTHING if own == NOTHING else losses(folder / "run" / "loss.csv")


def table(path: Path, key: str) -> str:
    """Return a digest of a part of a JSON file without times, or NOTHING if there is no file."""
    if not path.exists():
        return NOTHING
    found = json.loads(path.read_text())[key]
    kept = (
        [{k: v for k, v in row.items() if "seconds" not in k} for row in found]
        if key == "rows"
        else found
    )
    return digest(json.dumps(kept, sort_keys=True))


def answers(folder: Path) -> str:
    """Return a digest of all answers of a grid, or NOTHING unless every cell is done."""
    cells = sorted((folder / "cells").glob("*"))
    if not cells or not all((cell / "summary.json").exists() for cell in cells):
        return NOTHING
    return digest(
        b"".join(
            (cell / name).read_bytes() for cell in cells for name in ("cell.json", "answers.jsonl")
        )
    )


def evaluated(folder: Path) -> Result:
    rows = table(folder / "rows.json", "rows")
    return rows, NOTHING if rows == NOTHING else answers(folder / "grid")


def measured(folder: Path) -> Result:
    """Return digests of the paper's figures, and of their answers once all are there."""
    page = table(folder / "paper" / "report" / "paper.json", "experiments")
    return page, NOTHING if page == NOTHING else answers(folder / "paper")


def built(folder: Path) -> Result:
    """Return a digest of every row of the built data and of its manifest."""
    if not (folder / "data" / "manifest.json").exists():
        return (NOTHING,)
    rows = [
        pyarrow.parquet.read_table(path).to_pylist()
        for path in sorted((folder / "data").glob("*.parquet"))
    ]
    return (
        digest(
            json.dumps(rows, sort_keys=True, default=str)
            + (folder / "data" / "manifest.json").read_text()
        ),
    )


def small(folder: Path, ratio: float = 0.1) -> object:
    model, tokenizer = load_model("tiny")
    return compress(model, tokenizer, TEXT, ratio=ratio, evictor="knorm", adapter=None)


def random_adapter(seed: int) -> RestoreAdapter:
    return RestoreAdapter.create(load_model("tiny")[0], 2, rank=2, seed=seed)


def save(folder: Path) -> None:
    """Save two contents alternately to one cache file and one adapter."""
    caches, adapters = (
        [small(folder, ratio) for ratio in (0.1, 0.2)],
        [random_adapter(seed) for seed in (1, 2)],
    )
    try:
        for _ in range(2):
            for cache, each in zip(caches, adapters, strict=True):
                cache.save(folder / "out.rkv")
                each.save_pretrained(folder / "saved")
    except RestoreKVError as error:
        print(f"error: {error}")
        raise SystemExit(1) from error


def saved(folder: Path) -> Result:
    return tensors(folder / "out.rkv"), adapter(folder / "saved")


def command(
    *arguments: object, program: Callable[[list[str]], int] = execute
) -> Callable[[Path], int]:
    """Return a function that runs a command in a folder.

    OUT/ in it is replaced by the folder, and IN/ by the folder of inputs next to it.
    """

    def run(folder: Path) -> int:
        places = {"OUT/": f"{folder}/", "IN/": f"{folder.parent / 'inputs'}/"}
        words = [str(each) for each in arguments]
        for short, long in places.items():
            words = [
                long + word.removeprefix(short) if word.startswith(short) else word
                for word in words
            ]
        return program(words)

    return run


WORKS = {
    "compress": Work(
        command("compress", "IN/text", "-o", "OUT/out.rkv", "--model", "tiny", "--ratio", "0.2"),
        lambda f: (tensors(f / "out.rkv"),),
        ("out.rkv",),
    ),
    "save": Work(save, saved, ("out.rkv", "saved")),
    "train": Work(
        command(
            "train",
            "--model",
            "tiny",
            "--data",
            "IN/train.jsonl",
            "--out",
            "OUT/run",
            "--steps",
            "3",
            "--resume",
            "--checkpoint-every",
            "1",
            "--restore-tokens",
            "2",
            "--rank",
            "2",
            "--questions",
            "1",
            "--evictor",
            "snapkv",
            "--keep",
            "2",
            "--max-new-tokens",
            "4",
        ),
        trained,
    ),
    "gate": Work(
        command(
            "train-gate",
            "--model",
            "tiny",
            "--data",
            "IN/train.jsonl",
            "--out",
            "OUT/gate",
            "--steps",
            "3",
            "--tokens",
            "20",
            "--resume",
        ),
        lambda f: (tensors(f / "gate"),),
    ),
    "data": Work(
        command(
            "data",
            "build",
            "--mixture",
            "passages",
            "--model",
            "tiny",
            "--stories",
            "IN/stories.jsonl",
            "--novels",
            "IN/novels",
            "--story-passages",
            "2",
            "--novel-passages",
            "0",
            "--section-passages",
            "0",
            "--resume",
            "--out",
            "OUT/data",
            "--answer-tokens",
            "6",
            "--question-tokens",
            "6",
            "--questions",
            "1",
            "--passage-shortest",
            "64",
        ),
        built,
    ),
    "eval": Work(
        command(
            "eval",
            "--model",
            "tiny",
            "--out",
            "OUT/grid",
            "--json",
            "OUT/rows.json",
            "--ratio",
            "0.2",
            "--evictor",
            "knorm",
            "--benchmark",
            "tiny:count=2,low=60,high=90",
        ),
        evaluated,
    ),
    "paper": Work(
        command("OUT/paper", "--only", "fast-kvzip", "--count", "1", program=paper),
        measured,
    ),
}


def inputs(place: Path) -> None:
    """Make what the works read, and the old outputs."""
    folder = place / "inputs"
    (folder / "novels").mkdir(parents=True)
    (folder / "text").write_text(TEXT)
    asked = [{"question": "Who owns it?", "answers": ["Ada"]}]
    stories = [
        {"id": f"s{number}", "context": f"{number} {TEXT}", "questions": asked}
        for number in range(3)
    ]
    # Two different texts: a gate is not checked on near copies of what it learns from.
    examples = [
        {"context": text[:400], "questions": ["Who owns it?"]} for text in (TEXT, OTHER_TEXT)
    ]
    for name, rows in (("stories", stories), ("train", examples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small(folder, 0.3).save(folder / "out.rkv")
    random_adapter(3).save_pretrained(folder / "saved")


def prepare(folder: Path, work: Work) -> None:
    """Put the old outputs into a folder."""
    folder.mkdir(exist_ok=True)
    for name in work.old:
        source = folder.parent / "inputs" / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(
            source, folder / name
        )
