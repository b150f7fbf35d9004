"""Measures compression with one scorer, with or without a restore pass: python -m
benchmarks.compress_cost JOB.

Every measurement runs in its own process. Otherwise it could reuse memory that an earlier one had
freed, and that memory would not be counted.
"""

import ctypes
import json
import os
import random
import subprocess
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.measure import Peak, serve_job
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evictors import gate_file
from restorekv.evictors.gate_file import Gate, GateCard
from restorekv.model.load import load_model
from restorekv.model.names import TINY, get_model_name
from restorekv.model.prompt import Context, make_context
from restorekv.model.shape import CacheShape
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.shipped import find_shipped_adapter

PHASES = ("prefill", "score", "restore", "evict")
WARM_UP = 64  # tokens
# Evictors with a gate, and the kind of that gate.
LEARNED = {"fastkvzip": "fastkvzip", "kvzap": "kvzap-mlp"}
REFUSED = "refused"  # a user's error, returned to the process that wrote the job
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
# In bytes. glibc adapts its own threshold, up to LARGE.
SMALL = 1 << 16
LARGE = 1 << 25
# The sizes of an adapter of random weights, as in the paper.
RESTORE_TOKENS = 8
RANK = 8


def measure(job: dict) -> dict:
    """Return {"adapter", "gate", "seconds": by phase and "total", "peak"}, or {"refused": the
    error}.
    """
    try:
        return measure_compression(job)
    except RestoreKVError as error:
        return {REFUSED: str(error)}


def measure_compression(job: dict) -> dict:
    """Measure peak memory in one compression and seconds in `repeat` more, after a warm-up without
    an adapter.
    """
    model, tokenizer = load_model(job["model"], job["dtype"], job["device"])
    spec, gate = find_scorer(model, job["evictor"], Path(job["folder"]))
    base = Eviction.make(spec, None, **job["conventions"])
    context = make_context_of(tokenizer, job["tokens"])
    _compress(base, model, tokenizer, make_context_of(tokenizer, WARM_UP), 1.0)
    peak: dict[str, int | None] = {}
    with measure_peak(model.device, peak):
        adapter, source = None, None
        if job["restored"]:
            # Loaded here, so that its weights count as memory of the restore pass.
            adapter, source = find_adapter(model, job["evictor"])
        eviction = replace(base, adapter=adapter)
        _compress(eviction, model, tokenizer, context, job["ratio"])
    runs = []
    for _ in range(job["repeat"]):
        runs.append(_compress(eviction, model, tokenizer, context, job["ratio"]))
    seconds = {}
    for phase in PHASES:
        seconds[phase] = median(each.get(phase, 0.0) for each in runs)
    total = median(sum(each.values()) for each in runs)
    return {"adapter": source, "gate": gate, "seconds": {**seconds, "total": total}, **peak}


def _compress(
    eviction: Eviction,
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    context: Context,
    ratio: float | str,
) -> dict[str, float]:
    prepared = eviction.prepare(model, tokenizer, context)
    # An adapter that knows the ratio runs its restore pass here, and its seconds are apart.
    with torch.no_grad():
        _, seconds = prepared.evict_timed(ratio)
    return prepared.seconds | seconds


@contextmanager
def measure_peak(device: torch.device, figures: dict[str, int | None]) -> Iterator[None]:
    """Write the block's peak memory to figures["peak"], in bytes above what was held before it.

    Memory is the GPU's for a CUDA device, else this process's.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        torch.cuda.synchronize(device)
        figures["peak"] = torch.cuda.max_memory_allocated(device) - before
        return
    _map_blocks_from(SMALL)
    with Peak() as peak:
        yield
    _map_blocks_from(LARGE)
    figures["peak"] = peak.bytes


def _map_blocks_from(size: int) -> None:
    """Make glibc map every block of at least `size` bytes, and so return it to the system when it
    is freed.

    With SMALL the process's peak is what it really holds, to 0.1 MB. With LARGE allocation has its
    usual speed.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, size)


def find_scorer(model: PreTrainedModel, evictor: str, folder: Path) -> tuple[str, str | None]:
    """Return a spec and the source of its gate, None if the scorer brings its own or needs none.

    A learned scorer that names no gate gets a random one, saved in `folder`, unless one ships for
    the model.
    """
    if evictor not in LEARNED or get_model_name(model) == TINY:
        return evictor, None
    return f"{evictor}:gate={save_random_gate(model, evictor, folder)}", "random"


def find_adapter(model: PreTrainedModel, evictor: str) -> tuple[RestoreAdapter, str]:
    """Return the adapter that ships for this scorer, or a random one, and which of the two it is.

    A random one will do, because only shapes decide time and memory.
    """
    shipped = find_shipped_adapter(get_model_name(model), evictor)
    if shipped:
        return RestoreAdapter.from_pretrained(model, shipped), "shipped"
    return RestoreAdapter.create(model, RESTORE_TOKENS, rank=RANK), "random"


def make_context_of(tokenizer: Tokenizer, tokens: int) -> Context:
    """Return words of random letters, cut to exactly `tokens` tokens."""
    context = make_context(tokenizer, make_text(8 * tokens, seed=0))
    if context.text_tokens < tokens:
        raise RestoreKVError(
            f"The tokenizer makes {context.text_tokens} tokens of the text to measure, not "
            f"{tokens}."
        )
    return replace(context, ids=context.ids[:, : context.prefix_length + tokens])


def make_text(tokens: int, seed: int) -> str:
    """Return words of random letters, `tokens` bytes in all; one byte is one token."""
    letters = random.Random(seed)
    words = []
    for _ in range(tokens):
        length = letters.randint(2, 9)
        words.append("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=length)))
    return " ".join(words)[: tokens - 1] + "."


def save_random_gate(model: PreTrainedModel, method: str, folder: Path) -> Path:
    """Save a gate of random weights in the published sizes: 16 dimensions and 16 sinks, or an MLP
    of an eighth of the hidden width.
    """
    shape = CacheShape.from_model(model)
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "q_norm.weight": torch.empty(16),
        "k_base": torch.empty(1, 1, 16, 1),
        "0.weight": torch.empty(shape.hidden // 8, 1),
    }
    kind = LEARNED[method]
    path = folder / f"{method}.safetensors"
    sizes = gate_file.compute_shapes(kind, shape, sizes).items()
    layers = []
    for _ in range(shape.layers):
        layers.append({name: torch.randn(size, generator=generator) / 32 for name, size in sizes})
    gate_file.write_gate(path, Gate(layers, GateCard.for_model(model, kind, "none")))
    return path


def measure_apart(
    command: Sequence[str], job: dict, folder: Path, what: str, without: Collection[str] = ()
) -> dict:
    """Run `command JOB` offline with the job's `threads`, and return the figures that it writes
    through `measure.serve_job`.

    `without` names environment variables that the process must not see. If the process fails,
    raises RestoreKVError with the last line of its stderr.
    """
    job = {**job, "result": str(folder / "result.json")}
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(job))
    environment = os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in environment.items() if name not in without}
    process = subprocess.run(
        [*command, str(job_file)], capture_output=True, text=True, env=environment
    )
    if process.returncode:
        messages = process.stderr.strip().splitlines()
        reason = messages[-1] if messages else f"exit status {process.returncode}"
        raise RestoreKVError(f"{what} failed ({reason}).")
    return json.loads(Path(job["result"]).read_text())


if __name__ == "__main__":
    serve_job(sys.argv[1], measure)
