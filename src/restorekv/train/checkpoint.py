"""Checkpoints of a run: written under another name first, so that a kill at any moment leaves a whole one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from restorekv.atomic import replacing
from restorekv.errors import RestoreKVError
from restorekv.restore import RestoreAdapter
from restorekv.train.config import TrainConfig

FILE, LOG = "checkpoint.safetensors", "loss.csv"
HEADER = "step,loss,lr,seconds\n"


def begin(folder: Path) -> int:
    """A fresh run; an older one in the same folder is never overwritten."""
    if (folder / FILE).exists():
        raise RestoreKVError(f"{folder} already holds a run; continue it with --resume or choose another folder.")
    (folder / LOG).write_text(HEADER)
    return 0


def save(
    folder: Path, config: TrainConfig, adapter: RestoreAdapter, optimizer: torch.optim.Optimizer, step: int, size: int
) -> None:
    """Adapter, optimizer and the number of steps done by a team of `size` processes."""
    tensors = {f"adapter.{name}": value.cpu() for name, value in adapter.trainable_state().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value.cpu() for name, value in state.items()}
    with replacing(folder / FILE) as path:
        save_file(tensors, path, metadata={"config": config.text(), "step": str(step), "processes": str(size)})


def restart(
    folder: Path, config: TrainConfig, adapter: RestoreAdapter, optimizer: torch.optim.Optimizer, size: int
) -> int:
    """Loads the checkpoint and returns the step to go on with; 0 where there is none. Touches no file."""
    path = folder / FILE
    if not path.exists():
        return 0
    try:
        with safe_open(path, "pt") as file:
            facts, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        saved, step, processes = TrainConfig.parse(facts["config"]), int(facts["step"]), int(facts["processes"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RestoreKVError(f"The checkpoint {path} is damaged; start again in another folder.") from error
    same = replace(saved, keep=config.keep, checkpoint_every=config.checkpoint_every) == config
    if not same or processes != size:
        raise RestoreKVError(
            f"The run in {folder} has other settings or another number of processes; resume it with the same ones or "
            "choose another folder."
        )
    adapter.load_trainable_state(part(tensors, "adapter."))
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in part(tensors, "optimizer.").items():
        index, _, what = name.partition(".")
        moments.setdefault(int(index), {})[what] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return step


def trim(folder: Path, step: int) -> None:
    """Drops log lines of steps that the checkpoint does not hold."""
    lines = (folder / LOG).read_text().splitlines()
    with replacing(folder / LOG) as path:
        path.write_text("\n".join(lines[: step + 1]) + "\n")


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
