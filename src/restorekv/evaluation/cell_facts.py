"""What a cell was made with: everything a reader needs to compare its figures with others."""

from __future__ import annotations

from restorekv.compression.compressor import make_compressor
from restorekv.evaluation import provenance as common
from restorekv.evaluation.cell import FULL, Cell
from restorekv.evaluation.worker import Worker
from restorekv.tasks.base import digest


def facts(worker: Worker, cell: Cell) -> dict:
    """Two cells with equal facts and equal `Cell`s have equal answers on one machine."""
    adapter = worker.adapters[cell]
    return {
        **common.facts(worker.model, worker.conventions(cell)),
        "method": identity(worker, cell),
        "adapter": adapter.identity() if adapter else None,
        "benchmark": {
            **worker.benchmark.described(), "title": worker.benchmark.title, "spec": worker.benchmark.spec,
            "samples": len(worker.samples), "digest": digest(worker.samples),
            "questions": sum(len(sample.questions) for sample in worker.samples),
        },
        "protocol": worker.protocol.described(cell.model, worker.tokenizer),
        "score": f"mean over tasks of the mean over {averaged(worker)} x 100",
        "interval": "95 %, bootstrap over contexts",
    }  # fmt: skip


def averaged(worker: Worker) -> str:
    return "contexts" if worker.benchmark.by_context(worker.protocol.name) else "questions"


def identity(worker: Worker, cell: Cell) -> str:
    """The method under the protocol, with files told by what is in them."""
    if cell.evictor == FULL:
        return FULL
    context, _ = worker.protocol.context(cell.model, worker.tokenizer, "any text")
    made = worker.protocol.adapted(make_compressor(cell.evictor, worker.conventions(cell)), context.prefix)
    return made.identity(worker.model)
