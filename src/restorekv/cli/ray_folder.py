"""Compress a folder's documents on a Ray cluster."""

from dataclasses import replace

from restorekv.cli.document_compressor import CompressionRecipe, DocumentCompressor, DocumentResult
from restorekv.evaluation.ray_pool import RayWorkers, WorkerProcess


class RayDocumentCompressor(WorkerProcess, DocumentCompressor):
    """The actor that runs in a worker's process."""

    def __init__(self, recipe: CompressionRecipe, device: str, threads: int, folder: str) -> None:
        super().__init__(replace(recipe, device=device))
        self.set_up(threads, folder)


class RayCompressorPool(RayWorkers):
    """Workers that compress; a document over which one after another dies is one that failed."""

    def __init__(self, recipe: CompressionRecipe, workers: int, address: str) -> None:
        super().__init__(RayDocumentCompressor, (recipe,), workers, address, recipe.device)

    def give_up(self, reason: str) -> DocumentResult:
        return DocumentResult("failed", reason=reason)
