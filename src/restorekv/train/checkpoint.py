"""Checkpoints of a run: written under another name first, so that a kill at any moment leaves a
whole one.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv import seal
from restorekv.errors import (
    RestoreKVError,
    explain_write_errors,
    make_printable,
    summarize_error,
    warn,
)
from restorekv.files import check_target, parse_record, read_bytes, replace_file
from restorekv.restore.adapter import RestoreAdapter
from restorekv.seal import FileKind
from restorekv.train.config import TrainConfig
from restorekv.train.examples import Example, hash_examples
from restorekv.train.teacher_cache import describe_teacher

CHECKPOINT_FILE = "checkpoint.safetensors"
LOG_FILE = "loss.csv"
FIX = "start again in another folder"
KIND = FileKind("restorekv-checkpoint", "1", "a checkpoint of restorekv", FIX)
HEADER = "step,loss,lr,seconds\n"
ROW = re.compile(r"([0-9]{1,9}),[^,]+,[^,]+,[^,]+")


@dataclass(frozen=True)
class TrainingRun:
    """The settings of a run, what it updates, and what it depends on besides its settings."""

    config: TrainConfig
    adapter: RestoreAdapter
    optimizer: torch.optim.Optimizer
    origin: dict[str, object]


def check_folders(folder: Path, resume: bool = False, store: Path | None = None) -> None:
    """Refuse places that no run can use, and a folder of other files or of another run; make and
    changes nothing.
    """
    for place in (folder, store):
        if place is not None:
            _check_folder(place)
    if folder.exists():
        check_target(folder / CHECKPOINT_FILE)
    if os.path.lexists(folder / CHECKPOINT_FILE):
        if not resume:
            raise RestoreKVError(
                f"{folder} already holds a run; continue it with --resume or choose another folder."
            )
        return
    names = {path.name for path in folder.iterdir()} - {".lock"} if folder.exists() else set()
    if names and (LOG_FILE not in names or _read_log_lines(folder / LOG_FILE) is None):
        raise RestoreKVError(
            f"{folder} holds other files and no run; choose an empty or a new folder."
        )


def _check_folder(folder: Path) -> None:
    """Refuse what is no folder and what cannot become one."""
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir():
        raise RestoreKVError(f"{there} is a file; give the name of a folder.")
    if there != folder:
        check_target(there / folder.absolute().relative_to(there.absolute()).parts[0])


def begin_log(folder: Path) -> None:
    """Start the log of a new run."""
    check_folders(folder)
    with (
        explain_write_errors(folder / LOG_FILE),
        replace_file(folder / LOG_FILE, follow=False) as temporary,
    ):
        temporary.write_text(HEADER)


def describe_origin(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    examples: list[Example],
    config: TrainConfig,
    processes: int,
) -> dict[str, object]:
    """Return what a run depends on besides its settings; a gate is identified by its weights."""
    own = {
        "data": hash_examples(examples),
        "scores": identify_scores(config, model),
        "processes": processes,
    }
    return {**describe_teacher(model, tokenizer), **own}


def identify_scores(config: TrainConfig, model: PreTrainedModel) -> str:
    """Return what decides the scores of a run's evictors."""
    return ",".join(eviction.identity(model) for eviction in config.make_evictions())


def save_checkpoint(folder: Path, run: TrainingRun, step: int) -> None:
    """Write the adapter, the optimizer and the number of steps done."""
    tensors = {
        f"adapter.{name}": value.cpu() for name, value in run.adapter.trainable_state().items()
    }
    for index, state in run.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value.cpu() for name, value in state.items()}
    metadata = {"config": run.config.to_json(), "origin": json.dumps(run.origin), "step": str(step)}
    seal.write_sealed(folder / CHECKPOINT_FILE, KIND, tensors, metadata, follow=False)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Let signals that Python handles, such as Ctrl-C, wait for the end of the block, which they
    would cut in two.
    """
    held: list[tuple[int, FrameType | None]] = []
    # Others get none.
    numbers = (
        signal.valid_signals() if threading.current_thread() is threading.main_thread() else ()
    )
    handlers = {
        number: handler for number in numbers if callable(handler := signal.getsignal(number))
    }
    try:
        for number in handlers:
            signal.signal(number, lambda *what: held.append(what))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in held:
        handlers[number](number, frame)


def load_checkpoint(folder: Path, run: TrainingRun) -> int:
    """Load the checkpoint and return the step to continue with; 0 where there is none. Changes no
    file.
    """
    path = folder / CHECKPOINT_FILE
    if not os.path.lexists(path):  # a circle of links is no missing file
        return 0
    what = f"The checkpoint {path}"
    metadata, tensors = seal.read_sealed(path, KIND, what, finite=True)
    try:
        saved = TrainConfig.from_json(metadata["config"])
        step = int(metadata["step"][:20])
        source = parse_record(metadata["origin"], what)
        asdict(saved) | source
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RestoreKVError(f"{what} is damaged ({summarize_error(error)}); {FIX}.") from error
    saved = replace(saved, keep=run.config.keep, checkpoint_every=run.config.checkpoint_every)
    before = asdict(saved) | source
    now = asdict(run.config) | run.origin
    changes = [
        f"{name} is {now[name]}, was {make_printable(before.get(name))}"
        for name in now
        if now[name] != before.get(name)
    ]
    if changes:
        raise RestoreKVError(
            f"The run in {folder} is another one ({'; '.join(changes)}); resume it as it was or choose another folder."
        )
    if not _is_run_state(run, tensors, step):
        raise RestoreKVError(f"{what} is damaged, it does not hold the state of this run; {FIX}.")
    run.adapter.load_trainable_state(_select_prefix(tensors, "adapter."))
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in _select_prefix(tensors, "optimizer.").items():
        index, _, what = name.partition(".")
        moments.setdefault(int(index), {})[what] = value
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": moments})
    return step


def _is_run_state(run: TrainingRun, tensors: dict[str, torch.Tensor], step: int) -> bool:
    """Return whether the tensors are the adapter's and AdamW's moments of those parameters that
    had a gradient.
    """
    sizes = {
        f"adapter.{name}": (value.dtype, value.shape)
        for name, value in run.adapter.trainable_state().items()
    }
    kind = torch.float32
    for index, parameter in enumerate(run.optimizer.param_groups[0]["params"]):
        name = f"optimizer.{index}."
        size = (kind, tuple(parameter.shape))
        if f"{name}step" in tensors:
            sizes |= {f"{name}exp_avg": size, f"{name}exp_avg_sq": size, f"{name}step": (kind, ())}
    return (
        1 <= step <= run.config.steps
        and seal.has_sizes(tensors, sizes)
        and all(1 <= value <= step for name, value in tensors.items() if name.endswith(".step"))
        and all(
            (value >= 0).all() for name, value in tensors.items() if name.endswith(".exp_avg_sq")
        )
    )


def trim_log(folder: Path, step: int) -> None:
    """Drop the log's lines of steps that the checkpoint does not hold; warn of those that the log
    lacks.
    """
    path = folder / LOG_FILE
    lines = _read_log_lines(path)
    if lines is None:
        raise RestoreKVError(
            f"{path} is not the log of a run; move it away, then continue with --resume."
        )
    rows = [line for line in lines if (row := ROW.fullmatch(line)) and int(row[1]) < step]
    if len(rows) < step:
        warn(
            f"The log {path} lacks {step - len(rows)} of the {step} steps done; the run goes on without these lines."
        )
    with replace_file(path, follow=False) as temporary:
        temporary.write_text("".join([HEADER, *(f"{row}\n" for row in rows)]))


def _read_log_lines(path: Path) -> list[str] | None:
    """Return the lines of a run's log, none where there is no file yet, or None for a file of
    something else.
    """
    if not os.path.lexists(path):
        return []
    text = read_bytes(path, f"The log {path}").decode(errors="replace")
    return text.splitlines()[1:] if HEADER.startswith(text[: len(HEADER)]) else None


def _select_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
