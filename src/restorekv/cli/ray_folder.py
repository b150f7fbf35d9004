"""Compresses a folder's documents on a Ray cluster."""

from dataclasses import replace

from restorekv.cli.folder import Made, Maker, Recipe
from restorekv.evaluation.ray_pool import Process, Workers


class RayMaker(Process, Maker):
    """The actor that runs in a worker's process."""

    def __init__(self, recipe: Recipe, device: str, threads: int, folder: str) -> None:
        super().__init__(replace(recipe, device=device))
        self.settle(threads, folder)


class RayMakers(Workers):
    """Workers that compress; a document over which one after another dies is one that failed."""

    def __init__(self, recipe: Recipe, workers: int, address: str) -> None:
        super().__init__(RayMaker, (recipe,), workers, address, recipe.device)

    def given_up(self, reason: str) -> Made:
        return Made("failed", reason=reason)
