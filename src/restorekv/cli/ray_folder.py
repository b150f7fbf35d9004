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
        """Open the model and return `recipe_identity`: all that decides a cache file, as JSON."""
        self.open()
        return self.recipe_identity

    def call_alike(self, identity: str, method: str, arguments: tuple) -> Any:
        """Call a method; raise RestoreKVError if this worker would make different cache files.

        Every node finds the model and the adapter by name, and a name can mean something different
        on each node.

        Args:
            identity: The `recipe_identity` of the worker that opened the model first.
            method: The name of the method.
            arguments: Its arguments.
        """
        if self.identify() != identity:
            raise RestoreKVError(
                f"The worker on {HOST} has another model, adapter or version of restorekv than the "
                "first one; give every node of the Ray cluster the same."
            )
        return getattr(self, method)(*arguments)


class RayCompressorPool(RayWorkers):
    """Ray workers that compress documents; a document that kills one worker after another fails."""

    def __init__(self, recipe: CompressionRecipe, workers: int, address: str) -> None:
        super().__init__(RayDocumentCompressor, (recipe,), workers, address, recipe.device)
        self.identity = ""  # of the worker that opened the model first

    def open(self) -> None:
        """Open the model on one worker; raise RestoreKVError if it cannot be opened."""
        identity = next(self.run_calls([("identify", ())]))
        if isinstance(identity, DocumentResult):  # what `give_up` returned
            raise RestoreKVError(identity.reason)
        self.identity = identity

    def call_each(self, method: str, given: Iterable[tuple]) -> Iterator[Any]:
        """Yield the results of a method for each tuple of arguments, in their order."""
        return self.run_calls([("call_alike", (self.identity, method, each)) for each in given])

    def give_up(self, reason: str) -> DocumentResult:
        return DocumentResult("failed", reason=reason)
