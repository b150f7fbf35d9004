"""Where an evaluation runs: in this process or on a Ray cluster."""

from contextlib import AbstractContextManager, nullcontext

from restorekv.evaluation.ray_pool import RayPool
from restorekv.evaluation.run import LocalPool, WorkerPool


def open_pool(ray: str | None, workers: int, device: str) -> AbstractContextManager[WorkerPool]:
    """Return this process, or a Ray cluster that ends with the block."""
    return nullcontext(LocalPool(device)) if ray is None else RayPool(workers, ray, device)
