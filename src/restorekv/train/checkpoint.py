"""Checkpoints of a run, written under a temporary name first, so that a kill at any moment leaves
a complete one.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

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
from restorekv.files import parse_record, replace_file
from restorekv.restore.adapter import RestoreAdapter
from restorekv.seal import FileKind
from restorekv.train.config import TrainConfig
from restorekv.train.examples import TrainingContext, hash_examples
from restorekv.train.run_folder import (
    CHECKPOINT_FILE,
    HEADER,
    LOG_FILE,
    read_log_lines,
)
from restorekv.train.teacher_cache import describe_teacher

FIX = "start again in another folder"
KIND = FileKind("restorekv-checkpoint", "1", "a checkpoint of restorekv", FIX)
ROW = re.compile(r"([0-9]{1,9}),[^,]+,[^,]+,[^,]+")
# Settings that a resumed run may change: they decide no loss.
FREE_SETTINGS = ("keep", "checkpoint_every")


@dataclass(frozen=True)
class TrainingRun:
    """The settings of a run, what it updates, and what else it depends on."""

    config: TrainConfig
    adapter: RestoreAdapter
    optimizer: torch.optim.Optimizer
    origin: dict[str, object]


def describe_origin(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    examples: list[TrainingContext],
    config: TrainConfig,
    processes: int,
) -> dict[str, object]:
    """Return what a run depends on in addition to its settings; a gate is identified by its
    weights.
    """
    return {
        **describe_teacher(model, tokenizer),
        "data": hash_examples(examples),
        "scores": identify_scores(config, model),
        "code": [eviction.digest_code() for eviction in config.make_evictions()],
        "processes": processes,
    }


def identify_scores(config: TrainConfig, model: PreTrainedModel) -> str:
    """Return what decides the scores of a run's evictors."""
    return ",".join(eviction.identity(model) for eviction in config.make_evictions())


def identify_init_adapter(adapter: RestoreAdapter) -> str:
    """Return 16 hex digits that identify the adapter that training begins with: its weights, and
    the data and license that the trained adapter inherits from its card.
    """
    inherited = [adapter.card.data, adapter.card.license]
    text = adapter.to_stored().weights_hash() + json.dumps(inherited, sort_keys=True)
    return seal.short_hash(text)


def save_checkpoint(folder: Path, run: TrainingRun, step: int) -> None:
    """Write the adapter, the optimizer and the number of steps done."""
    # AdamW numbers its states by the order of the parameters, which is the adapter's.
    tensors = {}
    for name, value in run.adapter.trainable_state().items():
        tensors[f"adapter.{name}"] = value.cpu()
    for index, state in run.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            tensors[f"optimizer.{index}.{name}"] = value.cpu()
    metadata = {"config": run.config.to_json(), "origin": json.dumps(run.origin), "step": str(step)}
    seal.write_sealed(folder / CHECKPOINT_FILE, KIND, tensors, metadata, follow=False)


@contextmanager
def hold_signals() -> Iterator[None]:
    """Delay signals that Python handles, such as Ctrl-C, until the end of the block, so that they
    cannot interrupt it halfway.
    """
    held: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
    # Python delivers signals to the main thread alone.
    if threading.current_thread() is threading.main_thread():
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
    # In the block a signal is only noted; afterwards it is passed to its handler.
    try:
        for number in handlers:
            signal.signal(number, lambda number, frame: held.append((number, frame)))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in held:
        handlers[number](number, frame)


def load_checkpoint(folder: Path, run: TrainingRun) -> int:
    """Load the checkpoint and return the step to continue with; 0 if there is no checkpoint.

    No file is changed.
    """
    path = folder / CHECKPOINT_FILE
    # Path.exists is also False for a broken link or a circle of links, which is not a missing file.
    if not os.path.lexists(path):
        return 0
    what = f"The checkpoint {path}"
    metadata, tensors = seal.read_sealed(path, KIND, what, finite=True)
    try:
        saved = TrainConfig.from_json(metadata["config"])
        step = int(metadata["step"][:20])
        origin = parse_record(metadata["origin"], what)
        # Settings and origin in one mapping: a run is a different one if any of them differs.
        before = asdict(saved) | origin
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RestoreKVError(f"{what} is damaged ({summarize_error(error)}); {FIX}.") from error
    changes = []
    for name, value in (asdict(run.config) | run.origin).items():
        if name not in FREE_SETTINGS and value != before.get(name):
            changes.append(f"{name} is {value}, was {make_printable(before.get(name))}")
    if changes:
        further = ""
        same_model = run.origin["model"] == before.get("model")
        if same_model and (folder / "adapter").is_dir():
            further = f", where --init {folder / 'adapter'} continues its adapter's training"
        raise RestoreKVError(
            f"The run in {folder} is a different one ({'; '.join(changes)}); resume it as it was "
            f"or choose another folder{further}."
        )
    if not _is_run_state(run, tensors, step):
        raise RestoreKVError(f"{what} is damaged, it does not hold the state of this run; {FIX}.")
    # Nothing was changed until here, so a refused checkpoint leaves the run as it was.
    run.adapter.load_trainable_state(_strip_prefix(tensors, "adapter."))
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in _strip_prefix(tensors, "optimizer.").items():
        index, _, moment = name.partition(".")
        moments.setdefault(int(index), {})[moment] = value
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": moments})
    return step


def _is_run_state(run: TrainingRun, tensors: dict[str, torch.Tensor], step: int) -> bool:
    """Return whether the tensors are the adapter's and AdamW's moments of those parameters that
    had a gradient.
    """
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, value in run.adapter.trainable_state().items():
        sizes[f"adapter.{name}"] = (value.dtype, value.shape)
    for index, parameter in enumerate(run.optimizer.param_groups[0]["params"]):
        prefix = f"optimizer.{index}"
        # AdamW has no state for a parameter that never had a gradient.
        if f"{prefix}.step" in tensors:
            size = (torch.float32, tuple(parameter.shape))
            sizes[f"{prefix}.exp_avg"] = size
            sizes[f"{prefix}.exp_avg_sq"] = size
            sizes[f"{prefix}.step"] = (torch.float32, ())
    if not 1 <= step <= run.config.steps or not seal.has_sizes(tensors, sizes):
        return False
    # Counters of steps and squared gradients have ranges; other values would make steps of any
    # size.
    for name, value in tensors.items():
        if name.endswith(".step") and not 1 <= value <= step:
            return False
        if name.endswith(".exp_avg_sq") and not (value >= 0).all():
            return False
    return True


def start_log(folder: Path, step: int) -> None:
    """Prepare the log of a run that begins with `step`: keep the lines of the steps before it, and
    warn if any of these are missing.
    """
    path = folder / LOG_FILE
    lines = read_log_lines(path)
    if lines is None:
        raise RestoreKVError(
            f"{path} is not the log of a run; move it away, then continue with --resume."
        )
    # A run that was killed may have logged steps after its last checkpoint; they are taken again.
    kept = []
    for line in lines:
        row = ROW.fullmatch(line)
        if row and int(row[1]) < step:
            kept.append(f"{line}\n")
    if len(kept) < step:
        warn(
            f"The log {path} lacks {step - len(kept)} of the {step} steps done; the run continues "
            "without these lines."
        )
    with explain_write_errors(path), replace_file(path, follow=False) as temporary:
        temporary.write_text(HEADER + "".join(kept))


def _strip_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
