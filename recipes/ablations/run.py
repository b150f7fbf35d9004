"""The paper's ablations on the bundled model, or another: train what is missing, ask the suite, write the tables.

    python recipes/ablations/run.py runs/ablations [SWEEP ...]       (all unless named; resumes at any moment)

Writes FOLDER/<run>.json with every answer, and docs/ablations.md and docs/results/ablations.json from those that are
there. With `--model`, or other settings, both tables go to FOLDER instead.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from ablations import beyond, components, mismatch, offset, prune_first, ratio_range, report, seeds, tokens
from ablations.sweep import Sweep
from ablations.trials import Setup, Trial, carry_out, read, trials
from bundled.adapters import CONTEXTS
from bundled.adapters import SETTINGS as RECIPE

from restorekv.errors import RestoreKVError
from restorekv.models import BUNDLED
from restorekv.train.config import TrainConfig

DOCS = Path(__file__).parents[2] / "docs"
SETTINGS = replace(RECIPE, contexts=4)  # a step: half of what the shipped adapters were trained with, for time
SEEDS = [0, 1, 2]
SWEEPS: dict[str, Callable[[TrainConfig], Sweep]] = {
    "components": components.sweep,
    "prune_first": prune_first.sweep,
    "tokens": tokens.sweep,
    "ratio_range": ratio_range.sweep,
    "mismatch": mismatch.sweep,
    "seeds": seeds.sweep,
    "offset": offset.sweep,
    "beyond": beyond.sweep,
}


def main(arguments: list[str] | None = None) -> None:
    """Run, list or only write."""
    options = parsed(arguments)
    setup = setup_of(options)
    sweeps = {name: make(setup.settings) for name, make in SWEEPS.items()}
    unknown = [name for name in options.sweeps if name not in sweeps]
    if unknown:
        raise RestoreKVError(f"There is no sweep {unknown[0]}; choose from {', '.join(sweeps)}.")
    chosen = trials(setup, [sweeps[name] for name in options.sweeps or sweeps], options.seeds)
    if options.list:
        for name, trial in chosen.items():
            print(f"{trial.state():>16}  {name}")
        return
    setup.folder.mkdir(parents=True, exist_ok=True)
    carried_out(chosen, options.workers, options.threads)
    every = trials(setup, list(sweeps.values()), options.seeds)
    report.write(setup, sweeps, every, options.seeds, options.out or default_out(setup, options.seeds))
    missing = [name for name, trial in chosen.items() if not trial.path.exists()]
    if missing:
        raise RestoreKVError(f"{len(missing)} runs are not done ({missing[0]}, ...); start the command again.")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; without sweeps all are meant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=", ".join(SWEEPS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--workers", type=int, default=1, help="processes at once")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--model", default=BUNDLED, help="bundled, a model folder or a hub id")
    parser.add_argument("--data", type=Path, help="what another model is trained on; without it the bundled documents")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--evictor", help="another base than KVzip")
    parser.add_argument("--documents", type=int, default=104)
    parser.add_argument("--out", type=Path, help="folder of ablations.md and results/ablations.json")
    parser.add_argument("--list", action="store_true", help="the runs and their state, and nothing else")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--contexts", type=int, default=CONTEXTS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def setup_of(options: argparse.Namespace) -> Setup:
    """The recipe's settings for the bundled model, the paper's for any other."""
    settings = SETTINGS if options.model == BUNDLED else TrainConfig()
    changed = {key: value for key in ("evictor", "steps") if (value := getattr(options, key)) is not None}
    settings = replace(settings, **changed)
    common = {key: getattr(options, key) for key in ("folder", "model", "data", "contexts", "documents", "device")}
    return Setup(settings=settings, **common)


def default_out(setup: Setup, seeds: list[int]) -> Path:
    """docs/ for what this repository publishes, the runs' folder for all else."""
    published = Setup(setup.folder, SETTINGS, contexts=CONTEXTS)
    return DOCS if setup == published and seeds == SEEDS else setup.folder


def carried_out(chosen: dict[str, Trial], workers: int, threads: int) -> None:
    """All trials, by as many processes; what one holds the others leave."""
    for trial in chosen.values():
        if trial.path.exists():
            read(trial)
    if workers == 1:
        return work(chosen, 1, threads)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(chosen, workers, threads)) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return None


def work(chosen: dict[str, Trial], workers: int, threads: int) -> None:
    """One process: whatever is neither done nor held by another."""
    torch.set_num_threads(threads)
    for name, trial in chosen.items():
        with claimed(trial) as mine:
            if mine and not trial.path.exists():
                carry_out(trial, lambda text, name=name: print(f"{name}: {text}", flush=True))
                print(f"{name}: done; {remaining(chosen, workers)}", flush=True)


@contextmanager
def claimed(trial: Trial) -> Iterator[bool]:
    """Whether this process may work on the trial; the system frees the lock of a process that was killed."""
    folder = trial.setup.folder / "locks"
    folder.mkdir(exist_ok=True)
    with (folder / (trial.training if trial.config else trial.name)).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False


def remaining(chosen: dict[str, Trial], workers: int) -> str:
    """How many trials are left and about how long they take."""
    trained = [trial for trial in chosen.values() if trial.config]
    took = [json.loads(trial.path.read_text())["seconds"] for trial in trained if trial.path.exists()]
    left = len(trained) - len(took)
    told = f"{left} trainings left"
    return f"{told}, {left * sum(took) / len(took) / workers / 3600:.1f} h to go" if took and left else told


if __name__ == "__main__":
    try:
        main()
    except RestoreKVError as error:
        sys.exit(str(error))
