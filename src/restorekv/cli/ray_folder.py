"""Compresses a folder's documents on a Ray cluster."""

from dataclasses import replace

from restorekv.cli.folder import Made, Maker, Recipe
from restorekv.evaluation.ray_pool import RayWorkers, WorkerProcess


class RayMaker(WorkerProcess, Maker):
    """The actor that runs in a worker's process."""

    def __init__(self, recipe: Recipe, device: str, threads: int, folder: str) -> None:
        super().__init__(replace(recipe, device=device))
        self.set_up(threads, folder)


class RayMakers(RayWorkers):
    """Workers that compress; a document over which one after another dies is one that failed."""

    def __init__(self, recipe: Recipe, workers: int, address: str) -> None:
        super().__init__(RayMaker, (recipe,), workers, address, recipe.device)

    def give_up(self, reason: str) -> Made:
        return Made("failed", reason=reason)
