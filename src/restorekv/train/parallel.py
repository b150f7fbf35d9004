"""The processes of a run: one, or several that share every step, each with the whole backbone or a
part of it.

`accelerate launch` or `torchrun` start them and describe them in the environment (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Every process holds the whole adapter, which is small. A
backbone too large for one GPU is spread with FSDP2 (torch.distributed.fsdp.fully_shard): a process
holds its share of every decoder layer and gathers a layer while it runs.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.errors import RestoreKVError
from restorekv.model.cache_argument import find_cache
from restorekv.model.identity import remember_identity
from restorekv.model.load import parse_device
from restorekv.model.shape import (
    find_attention,
    find_pairless_layers,
    get_backbone,
    list_windows,
)

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
LAUNCH = "`accelerate launch -m restorekv train`"
# How long a process waits for one that is stuck; the longest step has to fit.
TIMEOUT = timedelta(minutes=30)


class ProcessGroup:
    """Processes that run the same steps on different contexts and average their gradients.

    `device` is this process's device in the default group of torch.distributed. Without a device,
    this process is alone, and no method changes anything.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.rank = 0
        self.size = 1
        # A single process needs no communication and no separate device.
        if device is not None:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the processes; a missing one counts as zero.

        Sums all at once, in float32. A gradient that no process has stays missing: AdamW skips it.
        """
        if self.size == 1:
            return
        parameters = list(parameters)
        # One vector: all gradients, then a flag for each that this process has.
        parts = []
        flags = []
        for parameter in parameters:
            gradient = parameter.grad
            flags.append(gradient is not None)
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            parts.append(gradient.float().flatten())
        # A process without a gradient sends zeros, and a flag that says so: AdamW skips a parameter
        # that no process has a gradient for.
        present = torch.tensor(flags, dtype=torch.float32, device=self.device)
        flat = torch.cat([*parts, present])
        dist.all_reduce(flat)
        *sums, present = flat.split([len(part) for part in [*parts, present]])
        for parameter, total, processes in zip(parameters, sums, present.tolist(), strict=True):
            if processes:
                parameter.grad = (total / self.size).view_as(parameter).to(parameter.dtype)

    def average_loss(self, loss: float) -> float:
        """Return the mean over the processes."""
        if self.size == 1:
            return loss
        total = torch.tensor([loss], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.size

    def check_same(self, text: str) -> None:
        """Raise RestoreKVError unless all processes have the same text, which says what they
        begin with.
        """
        if self.size == 1:
            return
        # The first process's text goes to all others, and each compares it with its own.
        first = [text]
        dist.broadcast_object_list(first, 0)
        same = torch.tensor([float(first[0] == text)], device=self.device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if not same.item():
            raise RestoreKVError(
                "The processes were started with different settings, models, adapters or data; "
                "give all of them the same, and one shared folder."
            )

    def wait(self) -> None:
        """Wait until all processes have reached this call."""
        if self.size > 1:
            dist.barrier()

    @contextmanager
    def allow_uneven_passes(self, model: PreTrainedModel) -> Iterator[None]:
        """Let processes run the backbone unequally often in the block; does nothing for whole
        backbones.

        With shards, a process announces every pass, and idle ones join it. Counting the passes and
        making up for them later would be too late: a pass waits for its shards at once.
        """
        backbone = get_backbone(model)
        if self.size == 1 or not is_sharded(backbone):
            yield
            return

        def announce_pass(*_: object) -> None:
            self._announce_passes(1)

        handle = backbone.register_forward_pre_hook(announce_pass)
        try:
            yield
        finally:
            handle.remove()
        # A pass of one token, only to take part in gathering the shards.
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with torch.no_grad():
            # Until no process announces a pass.
            while self._announce_passes(0).item():
                backbone(input_ids=ids, use_cache=False)

    def _announce_passes(self, passes: int) -> Tensor:
        """Return how many processes are about to run the backbone; only idle ones read it, so that
        no GPU waits.
        """
        running = torch.full((1,), passes, device=self.device)
        dist.all_reduce(running)
        return running


SINGLE_PROCESS = ProcessGroup()


def count_processes() -> int:
    """Return how many processes a launcher started for this run."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def select_own_device(device: str) -> torch.device:
    """Return the device of this process: each of several on a machine takes its own GPU, unless
    `device` has a number, which gives one GPU to all.
    """
    if count_processes() == 1:
        return parse_device(device)
    kind = device.partition(":")[0]
    if kind not in BACKENDS or (kind == "cpu" and device != kind):
        raise RestoreKVError(
            "Several processes train on --device cuda, each on its own GPU, on --device cuda:0, "
            f"all on that one, or cpu, not {device}."
        )
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    return parse_device(device)


def is_shared(device: str) -> bool:
    """Return whether all processes train on one GPU, which a device with a number means."""
    return count_processes() > 1 and device.startswith("cuda:")


def wants_shards(asked: bool, shared: bool = False) -> bool:
    """Return whether --shard or `accelerate launch --use_fsdp` asks for a backbone in parts."""
    if asked and count_processes() == 1:
        raise RestoreKVError(
            f"Only several processes can share a backbone; start them with {LAUNCH}."
        )
    wanted = count_processes() > 1 and (asked or os.environ.get("ACCELERATE_USE_FSDP") == "true")
    if wanted and shared:
        raise RestoreKVError(
            "A backbone is spread over several GPUs; give --device cuda, without a number."
        )
    return wanted


@contextmanager
def open_process_group(device: torch.device, shared: bool = False) -> Iterator[ProcessGroup]:
    """Yield the group of this process; raise RestoreKVError if another process stops meanwhile.

    Args:
        device: The device of this process.
        shared: Whether the other processes use the same device.
    """
    if count_processes() == 1:
        yield SINGLE_PROCESS
        return
    # NCCL refuses two processes on one GPU; gloo brings what they exchange through the host.
    own_gpu = device.type == "cuda" and not shared
    backend = BACKENDS["cuda" if own_gpu else "cpu"]
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            timeout=TIMEOUT,
            device_id=device if own_gpu else None,
        )
    except (RuntimeError, ValueError) as error:
        raise RestoreKVError(
            f"The {count_processes()} processes do not find each other ({error}); start them with "
            f"{LAUNCH}."
        ) from error
    try:
        yield ProcessGroup(device)
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RestoreKVError(
            "Another process of this run has stopped; see its message, then continue with --resume."
        ) from error
    dist.destroy_process_group()


def shard_model(model: PreTrainedModel, device: torch.device) -> None:
    """Spread the decoder layers of `model`, which lies on the CPU, over all processes, and move the
    rest to `device`.

    Layer by layer, so that no GPU ever holds the whole backbone. Embeddings, last norm and LM head
    stay whole; so do LoRA layers, which are put into the model later.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Computed now, because a process that holds a shard cannot read all weights any more.
    remember_identity(model)
    backbone = get_backbone(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layers: Any = backbone.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    in_layers = set(layers.parameters())
    fully_shard(backbone, mesh=mesh, ignored_params=set(backbone.parameters()) - in_layers)
    # The hook names the layer itself, because the restore pass runs it for the layer's twin.
    # Layers after it share the pairs of others, or have none: a restore pass leaves nothing in
    # them.
    pairless = find_pairless_layers(model.config)
    own = [index for index in range(len(list_windows(model.config))) if index not in pairless]
    last = layers[own[-1]]
    last.register_forward_hook(lambda _, *rest: _gather_for_pairs(last, *rest), with_kwargs=True)
    nn.Module.to(model, device)


def is_sharded(backbone: nn.Module) -> bool:
    """Return whether `shard_model` was applied."""
    return hasattr(backbone, "unshard")


def _gather_for_pairs(layer: Any, args: tuple, kwargs: dict, output: object) -> None:
    """Gather the last layer with pairs of its own for the backward pass of the restore pass.

    FSDP does so when the gradient of a layer's output arrives. Nothing uses the last layer's output
    of a restore pass: gradients reach the layer only through its keys and values.
    """
    cache = find_cache(kwargs)
    if cache is None:
        return
    own = cache.layers[find_attention(layer).layer_idx]
    for pairs in (own.keys, own.values):
        # A read-only view of a cache holds none.
        if pairs is not None and pairs.requires_grad:
            pairs.register_hook(lambda gradient: layer.unshard())
