"""Who trains: one process, or several that share every step, each with the whole backbone or with a part of it.

The processes are those that `accelerate launch` or `torchrun` starts; both describe them in the environment (RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). The adapter is small and whole in every process. A backbone too
large for one GPU is spread with FSDP2 (torch.distributed.fsdp.fully_shard): a process holds its share of every decoder
layer and gathers a layer while it runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.errors import RestoreKVError
from restorekv.model import base_weights
from restorekv.model.load import usable_device
from restorekv.model.shape import decoder

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
LAUNCH = "`accelerate launch -m restorekv train`"
TIMEOUT = timedelta(minutes=30)  # how long a process waits for one that is stuck; the longest step has to fit


class ProcessGroup(Protocol):
    """Processes that run the same steps on different contexts and average their gradients."""

    rank: int
    size: int

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Every gradient becomes its mean over the processes; one that is missing counts as zero."""

    def mean(self, loss: float) -> float:
        """The mean over the processes."""

    def agree(self, text: str) -> None:
        """All processes have the same text, or a RestoreKVError: settings and data must be one."""

    def wait(self) -> None:
        """Until all are here."""

    def level(self, model: PreTrainedModel) -> Iterator[None]:
        """A block in which processes may run the backbone unequally often; afterwards all have run it equally often."""


class Alone:
    """A team of one."""

    rank, size = 0, 1

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Its gradients are the mean."""

    def mean(self, loss: float) -> float:
        return loss

    def agree(self, text: str) -> None:
        """Nobody disagrees."""

    def wait(self) -> None:
        """Nobody else is awaited."""

    @contextmanager
    def level(self, model: PreTrainedModel) -> Iterator[None]:
        yield


SINGLE_PROCESS = Alone()


class Together:
    """All processes of the default group of torch.distributed; `device` is this one's."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.compared = False

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """One sum over all gradients, float32. A gradient that no process has stays missing, as AdamW would skip it."""
        chosen = list(parameters)
        if not self.compared:
            self.compare(chosen)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
        found = torch.tensor([p.grad is not None for p in chosen], dtype=torch.float32, device=self.device)
        flat = torch.cat([*(part.float().flatten() for part in parts), found])
        dist.all_reduce(flat)
        *sums, found = flat.split([*(p.numel() for p in chosen), len(chosen)])
        for parameter, total, processes in zip(chosen, sums, found.tolist(), strict=True):
            if processes:
                parameter.grad = (total / self.size).view_as(parameter).to(parameter.dtype)

    def compare(self, parameters: list[nn.Parameter]) -> None:
        """Before the first step: the adapter must be the same everywhere, or averaged gradients mean nothing."""
        own = torch.cat([p.detach().float().flatten() for p in parameters])
        first = own.clone()
        dist.broadcast(first, 0)
        same = torch.tensor([float(torch.equal(own, first))], device=self.device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if not same.item():
            raise RestoreKVError(
                "The processes start from different adapters; give all of them one model and one shared folder."
            )
        self.compared = True

    def mean(self, loss: float) -> float:
        total = torch.tensor([loss], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.size

    def agree(self, text: str) -> None:
        told = [text if self.rank == 0 else None]
        dist.broadcast_object_list(told, 0)
        same = torch.tensor([float(told[0] == text)], device=self.device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if not same.item():
            raise RestoreKVError(
                "The processes were started with different settings, models or data; give all of them the same."
            )

    def wait(self) -> None:
        dist.barrier()

    @contextmanager
    def level(self, model: PreTrainedModel) -> Iterator[None]:
        """Nothing for whole backbones. With shards, every pass is announced, and who is done joins those of the others.

        To count the passes and make up for them later would be too late: a pass waits for its shards at once.
        """
        backbone = decoder(model)
        if not is_spread(backbone):
            yield
            return

        def join(*_: object) -> None:
            self.announce(1)

        handle = backbone.register_forward_pre_hook(join)
        try:
            yield
        finally:
            handle.remove()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            while self.announce(0).item():
                backbone(input_ids=ids, use_cache=False)

    def announce(self, passes: int) -> Tensor:
        """How many processes are about to run the backbone; whoever is need not read it, so that no GPU waits."""
        running = torch.full((1,), passes, device=self.device)
        dist.all_reduce(running)
        return running


def processes() -> int:
    """How many were started together."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def own_device(device: str) -> torch.device:
    """Of several processes on a machine each takes a GPU of its own."""
    if processes() == 1:
        return usable_device(device)
    kind = device.partition(":")[0]
    if kind not in BACKENDS or device != kind:
        raise RestoreKVError(f"Several processes train on --device cuda, each on its own GPU, or cpu, not {device}.")
    return usable_device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if kind == "cuda" else kind)


def wants_shards(asked: bool) -> bool:
    """By --shard, or by `accelerate launch --use_fsdp`."""
    if asked and processes() == 1:
        raise RestoreKVError(f"Only several processes can share a backbone; start them with {LAUNCH}.")
    return processes() > 1 and (asked or os.environ.get("ACCELERATE_USE_FSDP") == "true")


@contextmanager
def assembled(device: torch.device) -> Iterator[ProcessGroup]:
    """The team of this process, for the block; raises RestoreKVError if another process stops meanwhile."""
    if processes() == 1:
        yield SINGLE_PROCESS
        return
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        own = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(BACKENDS[device.type], timeout=TIMEOUT, **own)
    except (RuntimeError, ValueError) as error:
        raise RestoreKVError(
            f"The {processes()} processes do not find each other ({error}); start them with {LAUNCH}."
        ) from error
    try:
        yield Together(device)
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RestoreKVError(
            "Another process of this run has stopped; see what it said, then go on with --resume."
        ) from error
    dist.destroy_process_group()


def spread(model: PreTrainedModel, device: torch.device) -> None:
    """Spreads the decoder layers of `model`, which lies on the CPU, over all processes and moves the rest to `device`.

    Layer by layer, so that no GPU ever holds the whole backbone. Embeddings, last norm and LM head stay whole; so do
    LoRA layers, which are put into the model later.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    base_weights.remember(model)
    backbone, mesh = decoder(model), init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in backbone.layers:
        fully_shard(layer, mesh=mesh)
    layers = set(backbone.layers.parameters())
    fully_shard(backbone, mesh=mesh, ignored_params=set(backbone.parameters()) - layers)
    backbone.layers[-1].register_forward_hook(gather_for_pairs, with_kwargs=True)
    model.to(device)


def is_spread(backbone: nn.Module) -> bool:
    """Whether `spread` has been here."""
    return hasattr(backbone, "unshard")


def gather_for_pairs(layer: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
    """Gathers the last layer for the backward pass of the restore pass.

    FSDP does so when the gradient of a layer's output arrives. Of a restore pass the last layer's output goes nowhere:
    gradients reach it through its keys and values alone.
    """
    cache = kwargs.get("past_key_values")
    own = None if cache is None else cache.layers[layer.self_attn.layer_idx]
    for pairs in () if own is None else (own.keys, own.values):
        if pairs is not None and pairs.requires_grad:  # a cache that is read in passing holds none
            pairs.register_hook(lambda gradient: layer.unshard())
