"""Make the restore adapters that ship for SmolLM2 in distributions/restorekv-smollm2, and their
data. Resumable.

    make smollm2
    python -m recipes.smollm2.build runs/smollm2 [--anew | --install-only | --per-head | --shared]
    python -m recipes.smollm2.build runs/smollm2 --leg more --seed SEED
    python -m recipes.smollm2.build runs/smollm2 --leg wide --seed SEED --device cuda
    python -m recipes.smollm2.build runs/smollm2 --leg both --seed SEED --dtype bfloat16
    python -m recipes.smollm2.build runs/smollm2 --corpus CORPUS [--shards 1 2 | --people]

The training data is in folders next to this file. --anew makes the passages of stories and novels
again; --corpus names the folder of the corpus of many genres and only makes that corpus' shards.
Two processes with one thread each take hours on two cores; --dtype bfloat16 halves that if the CPU
has instructions for it. What ships was trained in several legs; paper/log.md says how. gate.py
makes the gate.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from recipes.run import make_parser, run_recipe
from restorekv.data.corpus import TRAIN_SPLIT
from restorekv.data.files import iterate_rows
from restorekv.model.identity import describe_weights
from restorekv.model.load import load_model
from restorekv.model.names import SMOLLM2, SMOLLM2_ID, shipped_path
from restorekv.restore.adapter import RestoreAdapter

TEXTS = Path(__file__).parent / "texts"
READY = Path(__file__).parent / "data"
# After a blank line, this is the wording of the benchmarks (tasks/reading.py).
WORDING = "Question: {question}\nAnswer:"
ANSWERS = (
    "--answer-tokens",
    "40",
    "--question-tokens",
    "40",
    "--least-answer",
    "1",
    "--wording",
    WORDING,
)
# The two folders of passages, and how each is built.
DATA = {
    "stories": "--story-passages 109 --novel-passages 0 --section-passages 0 --invented 0.3",
    "novels": (
        "--story-passages 0 --novel-passages 84 --section-passages 12 --per-novel 6 "
        "--invented 0.8 --questions 3"
    ),
}
SHARDS = 8  # of the corpus, 320 passages each; a shard takes about 90 minutes of one core
CORPUS = (
    "--mixture",
    "corpus",
    "--corpus-passages",
    "320",
    "--passage-shortest",
    "300",
    "--passage-longest",
    "4000",
    "--longest",
    "4000",
    "--made",
    "0.15",
    "--questions",
    "4",
    "--answer-tokens",
    "96",
    "--short-answer-tokens",
    "40",
    "--question-tokens",
    "48",
    "--least-answer",
    "1",
    "--loop",
    "16",
    "--wording",
    WORDING,
)
# Passages that people asked questions about. More of those questions are used here; they are short
# and about facts.
PEOPLE = "people"
PEOPLE_PARTS = 2  # built at the same time, with one thread each
OF_PEOPLE = (
    *CORPUS,
    "--corpus-passages",
    "840",  # all of them
    "--made",
    "0",
    "--human-questions",
    "6",
    "--questions",
    "7",
    "--invented",
    "0.15",
    "--passage-longest",
    "1300",
    "--answer-tokens",
    "64",
    "--seed",
    "1",
)
SHAPE = ("--restore-tokens", "4", "--rank", "12", "--alpha", "24")
RATIOS = ("--ratio-law", "log-uniform", "--ratio-min", "0.03", "--ratio-max", "0.3")
# The evictor whose adapter ships and serves the others too (other_evictors.py), and the number of
# steps of its first training.
FIRST = "kvzip"
STEPS = "3000"
OTHERS = ("kvzip+", "fastkvzip", "snapkv", "h2o", "contrastkv")
SHARED = "shared"
# Steps from the adapter that ships to the one for budgets per head, with one length in all heads.
PER_HEAD = "700"
# One adapter for all evictors, on texts of many genres and for mild ratios too. A step draws one of
# the evictors and two ratios.
OF_SHARED = (
    "--evictor",
    ",".join((FIRST, *OTHERS)),
    "--draws",
    "2",
    "--ratio-law",
    "log-uniform",
    "--ratio-min",
    "0.025",
    "--ratio-max",
    "0.6",
    "--loss-power",
    "0.5",
    "--max-new-tokens",
    "96",
    "--lr",
    "5e-4",
    "--warmup",
    "20",
    "--steps",
    "330",
)

# Another leg of KVzip's adapter, from the one that ships: shorter contexts, and shorter answers in
# which the first tokens count most.
OF_MORE = (
    "--evictor",
    FIRST,
    "--longest-context",
    "1300",
    "--draws",
    "3",
    "--ratio-law",
    "log-uniform",
    "--ratio-min",
    "0.025",
    "--ratio-max",
    "0.6",
    "--loss-power",
    "0.5",
    "--max-new-tokens",
    "40",
    "--answer-decay",
    "16",
    "--lr",
    "5e-4",
    "--warmup",
    "20",
    "--steps",
    "110",
)

# A leg of seven contexts a step, also longer ones. On an H200 seven processes with a context each
# took four minutes (torchrun --nproc-per-node 7 -m restorekv train --device cuda:0, under MPS).
OF_WIDE = (
    *OF_MORE,  # if a flag occurs twice, the last one counts
    "--longest-context",
    "2000",
    "--max-new-tokens",
    "48",
    "--contexts",
    "7",
    "--steps",
    "154",
)

# A leg of eight contexts a step, each restored for KVzip or for KVzip+. In bfloat16, a context
# takes seven seconds of one core if the CPU has instructions for it; two cores share the work with
# torchrun --nproc-per-node 2 -m restorekv train and --contexts 4.
OF_BOTH = (
    *OF_MORE,
    "--evictor",
    f"{FIRST},{OTHERS[0]}",
    "--contexts",
    "8",
    "--warmup",
    "6",
    "--steps",
    "80",
)
LEGS = {"more": OF_MORE, "wide": OF_WIDE, "both": OF_BOTH}


def start_command(*arguments: str) -> subprocess.Popen:
    """Start a command of restorekv with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "restorekv", *arguments], env=environment)


def wait_for(*running: subprocess.Popen) -> None:
    """Wait for commands; stop with the first failure's exit status."""
    for process in running:
        if process.wait():
            raise SystemExit(process.returncode)


def build_passages(folder: Path) -> None:
    """Build both mixtures of passages at the same time."""
    sources = (
        "--stories",
        str(TEXTS / "stories.jsonl.gz"),
        "--novels",
        str(TEXTS / "novels"),
        "--sections",
        str(TEXTS / "sections.jsonl.gz"),
    )
    commands = []
    for name, options in DATA.items():
        out = folder / "data" / name
        if (out / "manifest.json").exists():
            continue
        command = ("data", "build", "--mixture", "passages", "--model", SMOLLM2, *sources)
        command += (*ANSWERS, *options.split(), "--resume", "--out", str(out))
        commands.append(command)
    wait_for(*[start_command(*command) for command in commands])


def write_held_out(folder: Path, source: Path) -> Path:
    """Write the corpus' passages of other splits, so that texts with the same words can be kept out
    of training too.
    """
    path = folder / "development.jsonl"
    lines = []
    for row in iterate_rows(str(source), {}):
        if row.get("split") not in (None, TRAIN_SPLIT):
            lines.append(json.dumps({"text": row["text"]}) + "\n")
    path.write_text("".join(lines), "utf-8")
    return path


def start_build(
    settings: Sequence[str],
    source: Path,
    held_out: Path,
    part: str,
    out: Path,
    model_flags: Sequence[str],
) -> subprocess.Popen:
    """Start or resume the build of a part of a corpus.

    Args:
        settings: Flags of `data build`.
        source: The corpus.
        held_out: A file of texts; passages that share their words are left out.
        part: The part to build, as K/N.
        out: The part's folder.
        model_flags: The flags of device and dtype.
    """
    command = ("data", "build", *settings, "--model", SMOLLM2, "--corpus", str(source))
    command += ("--exclude", str(held_out), "--part", part, "--resume", *model_flags)
    return start_command(*command, "--out", str(out))


def build_shards(folder: Path, source: Path, shards: list[int], model_flags: Sequence[str]) -> None:
    """Build shards of the corpus, two at a time.

    Passages that share their words with development passages are left out too.
    """
    held_out = write_held_out(folder, source)
    missing = []
    for shard in shards:
        begun = READY / f"corpus-{shard}"
        out = folder / "data" / f"corpus-{shard}"
        # Continue from the shard in the repository, which may be complete or only begun.
        if begun.exists() and not out.exists():
            shutil.copytree(begun, out)
            write_corpus_path(out / "build.json", source)
        if not (out / "manifest.json").exists():
            missing.append(shard)
    for first in range(0, len(missing), 2):
        running = []
        for shard in missing[first : first + 2]:
            out = folder / "data" / f"corpus-{shard}"
            part = f"{shard}/{SHARDS}"
            running.append(start_build(CORPUS, source, held_out, part, out, model_flags))
        wait_for(*running)


def write_asked(folder: Path, source: Path) -> Path:
    """Write the corpus' training passages that people asked about."""
    path = folder / "people.jsonl"
    lines = []
    for row in iterate_rows(str(source), {}):
        if row.get("split") in (None, TRAIN_SPLIT) and row.get("questions"):
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    path.write_text("".join(lines), "utf-8")
    return path


def build_people(folder: Path, source: Path, model_flags: Sequence[str]) -> None:
    """Build the passages that people asked about, in two parts at the same time."""
    held_out = write_held_out(folder, source)
    asked = write_asked(folder, source)
    running = []
    for part in range(1, PEOPLE_PARTS + 1):
        out = folder / "data" / f"{PEOPLE}-{part}"
        if (out / "manifest.json").exists():
            continue
        of_all = f"{part}/{PEOPLE_PARTS}"
        running.append(start_build(OF_PEOPLE, asked, held_out, of_all, out, model_flags))
    wait_for(*running)


def write_corpus_path(record: Path, source: Path) -> None:
    """Write the corpus' current path into the record of an unfinished build.

    A build is only continued with the settings that it was begun with, and the path is one of them.
    """
    if record.exists():
        entries = json.loads(record.read_text("utf-8"))
        entries["config"]["corpus"] = str(source)
        record.write_text(json.dumps(entries, indent=1) + "\n", "utf-8")


def list_data_flags(folder: Path) -> list[str]:
    """Return flags for all complete data, both built in `folder` and stored next to this file."""
    places = [*READY.glob("*/manifest.json"), *(folder / "data").glob("*/manifest.json")]
    # Data built in `folder` replaces stored data of the same name.
    complete = {path.parent.name: path.parent for path in places}
    flags = []
    for name in sorted(complete):
        flags += ["--data", str(complete[name])]
    return flags


def start_training(
    folder: Path, evictor: str, *more: str, kind: str = ""
) -> subprocess.Popen | None:
    """Start or resume the training of one adapter; None if it is done."""
    out = folder / f"restore-{evictor}{kind}"
    if (out / "adapter").exists():
        return None
    return start_command(
        "train",
        "--model",
        SMOLLM2,
        *list_data_flags(folder),
        "--evictor",
        evictor,
        *SHAPE,
        *RATIOS,
        "--store",
        str(folder / "store"),
        "--store-prefill",
        "--resume",
        "--out",
        str(out),
        *more,
    )


def train_adapters(folder: Path) -> None:
    """Train KVzip's adapter from scratch."""
    first = start_training(folder, FIRST, "--lr", "1e-3", "--warmup", "30", "--steps", STEPS)
    if first is not None:
        wait_for(first)


def train_per_head(folder: Path) -> Path:
    """Train KVzip's adapter for budgets per head, from the one that ships; return the run's folder.

    All heads then keep the same number of pairs.
    """
    shipped = shipped_path(SMOLLM2, "adapters", FIRST)
    options = ("--allocation", "per-head", "--lr", "1e-3", "--warmup", "30", "--seed", "13")
    options += ("--init", str(shipped), "--knows-ratio", "--steps", PER_HEAD)
    process = start_training(folder, FIRST, *options, kind=".per-head")
    if process is not None:
        wait_for(process)
    return folder / f"restore-{FIRST}.per-head"


def train_shared(folder: Path) -> None:
    """Train an adapter for all evictors, from KVzip's that ships; 80 minutes of one core.

    The result does not ship. KVzip's later training started from it, and that adapter serves all
    evictors.
    """
    train_on(folder, SHARED, *OF_SHARED)


def train_leg(folder: Path, leg: str, seed: int, *model_flags: str) -> Path:
    """Continue the training of KVzip's adapter from the one that ships, with the settings of a leg.

    Args:
        folder: The folder of all runs.
        leg: A key of LEGS.
        seed: A seed that no other leg has, so that this one draws its contexts in another order.
        model_flags: The flags of device and dtype.

    Returns:
        The folder of this leg's run.
    """
    settings = (*LEGS[leg], "--seed", str(seed), *model_flags)
    return train_on(folder, f"{FIRST}.{leg}-{seed}", *settings)


def train_on(folder: Path, name: str, *settings: str) -> Path:
    """Train the adapter `name`, starting from KVzip's that ships, unless it is done; return the
    run's folder.
    """
    shipped = shipped_path(SMOLLM2, "adapters", FIRST)
    out = folder / f"restore-{name}"
    if (out / "adapter").exists():
        return out
    command = ("train", "--model", SMOLLM2, *list_data_flags(folder), *SHAPE, *settings)
    # The adapter that ships knows the ratio, so one that starts from it must as well.
    command += ("--init", str(shipped), "--knows-ratio", "--checkpoint-every", "20", "--resume")
    wait_for(start_command(*command, "--out", str(out)))
    return out


def name_start(settings: dict) -> dict:
    """Return an adapter's settings with the name of the shipped adapter that it started from.

    It replaces that adapter's path on the machine of the training.
    """
    start = settings.get("init")
    if not start or not Path(start).is_absolute():
        return settings
    return settings | {"init": f"{SMOLLM2}:{Path(start).name}"}


def install_adapters(folder: Path) -> None:
    """Copy the adapters that are done into the package: that of the first training, and the one for
    budgets per head.
    """
    for evictor in (FIRST, f"{FIRST}.per-head"):
        trained = folder / f"restore-{evictor}"
        if (trained / "adapter").exists():
            install_adapter(trained, evictor)


def install_adapter(trained: Path, evictor: str) -> None:
    """Copy the adapter of a training into the package as the evictor's, LoRA in bfloat16."""
    model, _ = load_model(SMOLLM2)
    adapter = RestoreAdapter.from_pretrained(model, trained / "adapter")
    adapter.card = replace(
        adapter.card,
        model=SMOLLM2,
        local=False,
        weights=describe_weights(model),
        settings=name_start(adapter.card.settings or {}),
    )
    adapter.lora_config.base_model_name_or_path = SMOLLM2_ID
    adapter.save_pretrained(shipped_path(SMOLLM2, "adapters", evictor), dtype=torch.bfloat16)


def main(args: Sequence[str] | None = None) -> None:
    """Run what is missing, then install it."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--anew", action="store_true", help="Make the training data again.")
    parser.add_argument(
        "--install-only", action="store_true", help="Copy what there is; train nothing."
    )
    parser.add_argument(
        "--per-head", action="store_true", help="Train for one length in all heads instead."
    )
    parser.add_argument(
        "--shared", action="store_true", help="Train an adapter for all evictors instead."
    )
    parser.add_argument(
        "--leg", choices=LEGS, help="Train KVzip's adapter on from the one that ships instead."
    )
    parser.add_argument("--seed", type=int, help="Seed of --leg; give every leg its own.")
    parser.add_argument("--device", default="cpu", help="Device for --leg and --corpus.")
    parser.add_argument(
        "--dtype", default="float32", help="Dtype of the model for --leg and --corpus."
    )
    parser.add_argument("--corpus", type=Path, help="Make the data of this corpus instead.")
    parser.add_argument(
        "--people", action="store_true", help="Of the corpus, what people asked about alone."
    )
    shards = range(1, SHARDS + 1)
    parser.add_argument(
        "--shards", type=int, nargs="+", default=[*shards], choices=shards, help="Of the corpus."
    )
    options = parser.parse_args(args)
    if (options.leg is None) != (options.seed is None):
        parser.error("--leg and --seed go together.")
    model_flags = ("--device", options.device, "--dtype", options.dtype)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.corpus:
        if options.people:
            build_people(options.folder, options.corpus, model_flags)
        else:
            build_shards(options.folder, options.corpus, options.shards, model_flags)
        return
    if options.shared:
        train_shared(options.folder)
    elif options.per_head:
        install_adapter(train_per_head(options.folder), f"{FIRST}.per-head")
    elif options.leg is not None:
        # A leg continues from the adapter that ships, and its result replaces that adapter.
        leg = train_leg(options.folder, options.leg, options.seed, *model_flags)
        install_adapter(leg, FIRST)
    else:
        if not options.install_only:
            if options.anew:
                build_passages(options.folder)
            train_adapters(options.folder)
        install_adapters(options.folder)


if __name__ == "__main__":
    run_recipe(main)
