"""Checkpoints of a run: written under another name first, so that a kill at any moment leaves a whole one."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError
from restorekv.files import replacing
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.config import TrainConfig
from restorekv.train.examples import Example, examples_hash
from restorekv.train.teacher_cache import facts

FILE, LOG = "checkpoint.safetensors", "loss.csv"
HEADER = "step,loss,lr,seconds\n"


@dataclass(frozen=True)
class Run:
    """The settings of a run, what it updates, and what it depends on besides its settings."""

    config: TrainConfig
    adapter: RestoreAdapter
    optimizer: torch.optim.Optimizer
    origin: dict[str, object]


def begin(folder: Path) -> None:
    """Starts the log of a new run; refuses a folder that holds another run or other files."""
    if (folder / FILE).exists():
        raise RestoreKVError(f"{folder} already holds a run; continue it with --resume or choose another folder.")
    if any(folder.iterdir()) and not (folder / LOG).exists():
        raise RestoreKVError(f"{folder} holds other files and no run; choose an empty or a new folder.")
    (folder / LOG).write_text(HEADER)


def origin(
    model: PreTrainedModel, tokenizer: Tokenizer, examples: list[Example], config: TrainConfig, processes: int
) -> dict[str, object]:
    """Returns what a run depends on besides its settings; a gate is identified by its weights."""
    own = {"data": examples_hash(examples), "scores": config.eviction().identity(model), "processes": processes}
    return {**facts(model, tokenizer), **own}


def save(folder: Path, run: Run, step: int) -> None:
    """Writes the adapter, the optimizer and the number of steps done."""
    tensors = {f"adapter.{name}": value.cpu() for name, value in run.adapter.trainable_state().items()}
    for index, state in run.optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value.cpu() for name, value in state.items()}
    with replacing(folder / FILE) as path:
        metadata = {"config": run.config.text(), "origin": json.dumps(run.origin), "step": str(step)}
        save_file(tensors, path, metadata=metadata)


def restart(folder: Path, run: Run) -> int:
    """Loads the checkpoint and returns the step to continue with; 0 where there is none. Changes no file."""
    path = folder / FILE
    if not path.exists():
        return 0
    try:
        with safe_open(path, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        saved, step = TrainConfig.parse(metadata["config"]), int(metadata["step"])
        source = json.loads(metadata["origin"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RestoreKVError(f"The checkpoint {path} is damaged; start again in another folder.") from error
    saved = replace(saved, keep=run.config.keep, checkpoint_every=run.config.checkpoint_every)
    before, now = asdict(saved) | source, asdict(run.config) | run.origin
    changes = [f"{name} is {now[name]}, was {before.get(name)}" for name in now if now[name] != before.get(name)]
    if changes:
        raise RestoreKVError(
            f"The run in {folder} is another one ({'; '.join(changes)}); resume it as it was or choose another folder."
        )
    run.adapter.load_trainable_state(with_prefix(tensors, "adapter."))
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in with_prefix(tensors, "optimizer.").items():
        index, _, what = name.partition(".")
        moments.setdefault(int(index), {})[what] = value
    run.optimizer.load_state_dict({**run.optimizer.state_dict(), "state": moments})
    return step


def trim(folder: Path, step: int) -> None:
    """Drops the log lines of steps that the checkpoint does not hold."""
    lines = (folder / LOG).read_text().splitlines()
    with replacing(folder / LOG) as path:
        path.write_text("\n".join(lines[: step + 1]) + "\n")


def with_prefix(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Returns the tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
