"""Compressing a context with one scorer, with or without a restore pass, in a process: ... compress_side JOB.

A process of its own for every measurement, so that no memory that another one freed is used again, uncounted.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.budget import from_file
from restorekv.compression.compressor import Eviction, shipped_adapter
from restorekv.compression.prepared import timed
from restorekv.errors import RestoreKVError
from restorekv.evaluation.meter import Peak, serve
from restorekv.evaluation.workload import LEARNED, WARM_UP, random_gate, text_of
from restorekv.model.load import BUNDLED, load_model, model_name
from restorekv.model.prompt import Context, make_context
from restorekv.restore.adapter import RestoreAdapter

PHASES = ("prefill", "score", "restore", "evict")
REFUSED = "refused"  # a user's mistake, handed back to the process that told the job
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
SMALL, LARGE = 1 << 16, 1 << 25  # bytes; LARGE is where glibc's own, which adapts itself, ends
RESTORE_TOKENS, RANK = 8, 8  # of an adapter of random weights, as in the paper


def measure(job: dict) -> dict:
    """{"adapter", "gate", "seconds": by phase and "total", "peak"}, or {"refused": what is wrong}."""
    try:
        return measured(job)
    except RestoreKVError as error:
        return {REFUSED: str(error)}


def measured(job: dict) -> dict:
    """Warm up without an adapter, load it and compress for the memory, then compress `repeat` times for the seconds."""
    model, tokenizer = load_model(job["model"], job["dtype"], job["device"])
    spec, gate = scorer_of(model, job["evictor"], Path(job["folder"]))
    base = Eviction.make(spec, None, **from_file(job["conventions"]))
    context = context_of(tokenizer, job["tokens"])
    compressed(base, model, tokenizer, context_of(tokenizer, WARM_UP), 1.0)
    peak: dict[str, int | None] = {}
    with memory(model.device, peak):
        adapter, source = adapter_for(model, job["evictor"]) if job["restored"] else (None, None)
        eviction = replace(base, adapter=adapter)
        compressed(eviction, model, tokenizer, context, job["ratio"])
    found = [compressed(eviction, model, tokenizer, context, job["ratio"]) for _ in range(job["repeat"])]
    seconds = {phase: median(each.get(phase, 0.0) for each in found) for phase in PHASES}
    total = median(sum(each.values()) for each in found)
    return {"adapter": source, "gate": gate, "seconds": {**seconds, "total": total}, **peak}


def compressed(
    eviction: Eviction, model: PreTrainedModel, tokenizer: Tokenizer, context: Context, ratio: float | str
) -> dict[str, float]:
    """Seconds by phase."""
    prepared = eviction.prepare(model, tokenizer, context)
    seconds = dict(prepared.seconds)
    with torch.no_grad(), timed(seconds, "evict"):
        prepared.evict(ratio)
    return seconds


@contextmanager
def memory(device: torch.device, found: dict[str, int | None]) -> Iterator[None]:
    """found["peak"]: bytes held at most inside the block above those before it, on the GPU or of this process."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        torch.cuda.synchronize(device)
        found["peak"] = torch.cuda.max_memory_allocated(device) - before
        return
    map_from(SMALL)
    with Peak() as peak:
        yield
    map_from(LARGE)
    found["peak"] = peak.bytes


def map_from(size: int) -> None:
    """Tells glibc to ask the system for every block of so many bytes or more, and to give it back when it is free.

    With SMALL the peak of a process is what it holds, to 0.1 MB; with LARGE allocation is as fast as ever.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, size)


def scorer_of(model: PreTrainedModel, evictor: str, folder: Path) -> tuple[str, str | None]:
    """A spec, and where a learned scorer's gate comes from: random where none is named or ships with the model."""
    if evictor not in LEARNED or model_name(model) == BUNDLED:
        return evictor, None
    return f"{evictor}:gate={random_gate(model, evictor, folder)}", "random"


def adapter_for(model: PreTrainedModel, evictor: str) -> tuple[RestoreAdapter, str]:
    """The one that ships for this scorer, or one of random weights: shapes decide time and memory."""
    shipped = shipped_adapter(model_name(model), evictor)
    if shipped:
        return RestoreAdapter.from_pretrained(model, shipped), "shipped"
    return RestoreAdapter.create(model, RESTORE_TOKENS, rank=RANK), "random"


def context_of(tokenizer: Tokenizer, tokens: int) -> Context:
    """Words of random letters, cut to exactly T tokens."""
    context = make_context(tokenizer, text_of(8 * tokens, seed=0))
    if context.tokens < tokens:
        raise RestoreKVError(f"The tokenizer makes {context.tokens} tokens of the text to measure, not {tokens}.")
    return replace(context, ids=context.ids[:, : context.prefix + tokens])


if __name__ == "__main__":
    serve(sys.argv[1], measure)
