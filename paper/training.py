"""Trainings of the paper's ablations. A training and its folder are named after what differs from
the settings.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paper.recipe import LONGEST, SHORTEST
from restorekv.errors import RestoreKVError
from restorekv.files import file_lock, replace_file
from restorekv.model.load import load_model
from restorekv.model.names import TINY
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.config import TrainConfig
from restorekv.train.examples import TrainingContext, make_tiny_examples, read_examples
from restorekv.train.loop import train_adapter

CARD = "restorekv.json"


@dataclass(frozen=True)
class Setup:
    """What all trainings in a folder have in common.

    `contexts` is the number of training documents of the tiny world, used if there is no `data`.
    """

    folder: Path
    settings: TrainConfig
    model: str = TINY
    data: Path | None = None
    contexts: int = 500
    device: str = "cpu"
    dtype: str = "auto"

    @property
    def store(self) -> tuple[Path, bool]:
        """The folder that stores scores and teachers, and whether it stores full caches too.

        Only the tiny model's full caches are stored; they take 2 GB in all.
        """
        return self.folder / "lessons", self.model == TINY

    def examples(self, model, tokenizer) -> list[TrainingContext]:
        """Return the training examples, which are the same for every seed.

        Seeds differ only in initial weights, order and ratios, as in the paper.
        """
        if self.data is not None:
            return read_examples(self.data, model, tokenizer)
        return make_tiny_examples(tokenizer, self.contexts, 0, SHORTEST, LONGEST)

    def made_with(self, config: TrainConfig) -> dict:
        """Return what an adapter depends on, except the model's weights, which its card
        identifies.
        """
        told = json.loads(replace(config, keep=0, checkpoint_every=1).to_json())
        return {"train": told, "model": self.model, "data": self.described_data()}

    def described_data(self) -> str:
        """Return a description of the training data: the tiny world, or a digest of the files."""
        if self.data is None:
            return f"tiny: {self.contexts} documents of {SHORTEST} to {LONGEST} tokens"
        files = (
            sorted(path for path in self.data.rglob("*") if path.is_file())
            if self.data.is_dir()
            else [self.data]
        )
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.name.encode() + path.read_bytes())
        return f"{self.data.name}: sha256 {digest.hexdigest()[:16]}"


@dataclass(frozen=True)
class Training:
    """One training: the common settings, what is changed in them, and a seed."""

    setup: Setup
    changed: Mapping[str, object]
    seed: int

    @property
    def config(self) -> TrainConfig:
        return replace(self.setup.settings, **self.changed, seed=self.seed)

    @property
    def name(self) -> str:
        return _name_training(self.changed, self.setup.settings, self.seed)

    @property
    def folder(self) -> Path:
        return self.setup.folder / self.name

    @property
    def adapter(self) -> Path:
        return self.folder / "adapter"

    @property
    def done(self) -> bool:
        return (self.adapter / CARD).exists()

    def state(self) -> str:
        """Return "done", or how far the training is."""
        if self.done:
            return "done"
        log = self.folder / "loss.csv"
        steps = len(log.read_text().splitlines()) - 1 if log.exists() else 0
        return f"step {steps} of {self.config.steps}" if steps > 0 else "not trained"


def _name_training(changed: Mapping[str, object], settings: TrainConfig, seed: int) -> str:
    """Return a name with what differs from the settings, then the seed, such as
    "restorekv,restore_tokens=1,seed=0".
    """
    told = [
        f"{key}={_word_value(value)}"
        for key, value in sorted(changed.items())
        if getattr(settings, key) != value
    ]
    return ",".join(["restorekv", *told, f"seed={seed}"])


def _word_value(value: object) -> str:
    """Return the value of a setting as it appears in a folder's name."""
    if isinstance(value, tuple):
        return "+".join(str(part).removesuffix("_proj") for part in value) or "none"
    return f"{value:g}" if isinstance(value, float) else re.sub(r"[/:]", "-", str(value))


def train_ablation(training: Training, show: Callable[[str], None]) -> RestoreAdapter:
    """Train, from the last checkpoint if there is one; afterwards the folder holds the adapter."""
    setup = training.setup
    config = training.config
    begun = time.perf_counter()
    first = []
    model, tokenizer = load_model(setup.model, setup.dtype, setup.device)

    def progress(step: int, steps: int, loss: str) -> None:
        first.append(step)
        if step % 25 == 0 or step == steps:
            left = (time.perf_counter() - begun) / len(first) * (steps - step) / 60
            show(f"step {step} of {steps}, {loss}, {left:.0f} min to go")

    examples, (store, prefills) = setup.examples(model, tokenizer), setup.store
    return train_adapter(
        model,
        tokenizer,
        examples,
        config,
        training.folder,
        resume=True,
        progress=progress,
        store=store,
        store_prefill=prefills,
    )


def train_all(trainings: Sequence[Training], workers: int, threads: int) -> None:
    """Run all trainings in `workers` processes; each training is run by the process that claims it
    first.
    """
    if not trainings:
        return
    trainings[0].setup.folder.mkdir(parents=True, exist_ok=True)
    check_settings(trainings[0].setup)
    if workers == 1:
        return train_in_turn(trainings, threads)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_hand_over, args=(trainings, threads)) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    missing = [training.name for training in trainings if not training.done]
    if missing:
        raise RestoreKVError(
            f"{len(missing)} trainings are not done ({missing[0]}, ...); start the command again."
        )
    return None


def _hand_over(trainings: Sequence[Training], threads: int) -> None:
    """Run trainings as a separate process, which exits with a one-sentence message on errors."""
    try:
        train_in_turn(trainings, threads)
    except (RestoreKVError, KeyboardInterrupt) as error:
        sys.exit(str(error) or "interrupted")


def check_settings(setup: Setup) -> None:
    """Refuse a folder whose adapters were trained with other settings, model or data."""
    path = setup.folder / "settings.json"
    now = json.dumps(setup.made_with(setup.settings), sort_keys=True)
    if not path.exists():
        with replace_file(path) as temporary:
            temporary.write_text(now, encoding="utf-8")
    elif path.read_text(encoding="utf-8") != now:
        raise RestoreKVError(f"{setup.folder} was made with other settings; choose another folder.")


def train_in_turn(trainings: Sequence[Training], threads: int) -> None:
    """Run the trainings that are neither done nor claimed by another process, one after
    the other.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    for training in trainings:
        with claim_training(training) as mine:
            if mine and not training.done:
                train_ablation(
                    training, lambda text, name=training.name: print(f"{name}: {text}", flush=True)
                )
                left = sum(not each.done for each in trainings)
                print(f"{training.name}: done; {left} trainings left", flush=True)
    torch.set_num_threads(before)


def claim_training(training: Training) -> AbstractContextManager[bool]:
    """Return a context manager that yields whether this process may run a training, and
    claims it.
    """
    folder = training.setup.folder / "locks"
    folder.mkdir(exist_ok=True)
    return file_lock(folder / training.name)
