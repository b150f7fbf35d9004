"""Compress a folder's documents on a Ray cluster."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from restorekv.cli.document_compressor import CompressionRecipe, DocumentCompressor, DocumentResult
from restorekv.errors import RestoreKVError
from restorekv.evaluation.ray_pool import RayWorkers, WorkerProcess
from restorekv.files import HOST


class RayDocumentCompressor(WorkerProcess, DocumentCompressor):
    """The actor that runs in a worker's process."""

    def __init__(self, recipe: CompressionRecipe, device: str, threads: int, folder: str) -> None:
        super().__init__(replace(recipe, device=device))
        self.set_up(threads, folder)

    def identify(self) -> str:
        """Open the model; return what decides every cache file."""
        self.open()
        return self.recipe_identity

    def call_alike(self, identity: str, method: str, arguments: tuple) -> Any:
        """Call a method; raise RestoreKVError where other cache files would be made here.

        Nodes find model and adapter by their names, which may stand for something else on each.

        Args:
            identity: What decides the cache files of the worker that opened the model first.
            method: Its name.
            arguments: What it is given.
        """
        if self.identify() != identity:
            raise RestoreKVError(
                f"The worker on {HOST} has another model, adapter or version of restorekv than the "
                "first one; give every node of the Ray cluster the same."
            )
        return getattr(self, method)(*arguments)


class RayCompressorPool(RayWorkers):
    """Workers that compress; a document over which worker after worker dies has failed."""

    def __init__(self, recipe: CompressionRecipe, workers: int, address: str) -> None:
        super().__init__(RayDocumentCompressor, (recipe,), workers, address, recipe.device)
        self.identity = ""  # of the worker that opened the model first

    def open(self) -> None:
        """Open the model on a worker: one that cannot be opened ends all."""
        identity = next(self.run_calls([("identify", ())]))
        if isinstance(identity, DocumentResult):  # what `give_up` returned
            raise RestoreKVError(identity.reason)
        self.identity = identity

    def call_each(self, method: str, given: Iterable[tuple]) -> Iterator[Any]:
        """Yield the results of a method for each tuple of arguments, in their order."""
        return self.run_calls([("call_alike", (self.identity, method, each)) for each in given])

    def give_up(self, reason: str) -> DocumentResult:
        return DocumentResult("failed", reason=reason)
