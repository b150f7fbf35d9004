"""`python -m benchmarks memory`: memory of every phase of a compression, compared with the full
cache, and how memory and time grow with the text.

A model of random weights in the shape of Qwen3-0.6B, usually with fewer layers, compresses T tokens
with a random restore adapter (n = 8, rank 8). Each T and mode has its own process, with a warm-up
on a short text. Memory is resident memory above what was there before (the weights). A phase's
figure is its high-water mark, which is reset before the phase.

    plain      the full cache in memory          bound: full cache + one layer + scores + workspace
    offload    all but one layer in a file       bound: one layer, twice + scores + what is kept
                                                        + workspace
    streaming  evicts while it prefills          bound: what is kept + one part + scores + workspace

`filled` fills the cache with random numbers instead of a prefill. A prefill takes most of the time,
and its memory, apart from the cache, does not depend on the number of layers. Scoring is not
replaced and takes as long as ever.
"""

from __future__ import annotations

import contextlib
import gc
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from benchmarks.compress_cost import make_text, measure_apart
from benchmarks.measure import REFERENCES, read_memory, serve_job
from benchmarks.memory_on_paper import PART, SCORES
from benchmarks.workload import SHAPE, describe_machine, save_model, save_tokenizer
from restorekv import evictors
from restorekv.compression.budget import parse_ratio
from restorekv.compression.config import CompressionConfig
from restorekv.compression.full_cache import ScoredContext
from restorekv.errors import RestoreKVError
from restorekv.model.load import load_model
from restorekv.model.offload import make_offloaded_cache, trim_heap
from restorekv.model.prompt import make_context
from restorekv.model.shape import CacheShape
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter

WARM_UP = 256  # tokens
MODES = ("plain", "offload", "streaming")


@dataclass(frozen=True)
class Options:
    """The options of `memory`.

    `shape` replaces fields of Qwen3-0.6B's config. `modes` are some of MODES. `part` is the number
    of tokens streamed at a time; 0 means PART or, if that is less, half of the shortest text, so
    that every text is streamed.
    """

    tokens: Sequence[int] = (2048, 4096, 8192, 16384, 32768)
    modes: Sequence[str] = MODES
    evictor: str = "kvzip"
    ratio: float | str = "0.05"
    filled: bool = False
    part: int = 0
    threads: int = 0
    seed: int = 0
    shape: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Growth is computed from one T to the next of a mode, so no T may occur twice.
        object.__setattr__(self, "tokens", tuple(dict.fromkeys(self.tokens)))
        object.__setattr__(self, "modes", tuple(dict.fromkeys(self.modes)))
        parse_ratio(self.ratio)
        evictors.make_evictor(self.evictor)
        if not self.tokens or min(self.tokens) < WARM_UP:
            raise RestoreKVError(
                f"Every number of tokens is at least {WARM_UP}, not {list(self.tokens)}."
            )
        if self.threads < 0 or self.part < 0:
            raise RestoreKVError(
                f"threads and part are at least 0, not {self.threads} and {self.part}."
            )
        if not self.modes or set(self.modes) - set(MODES):
            raise RestoreKVError(
                f"The modes are some of {', '.join(MODES)}, not {', '.join(self.modes)}."
            )
        if self.filled and "streaming" in self.modes:
            raise RestoreKVError(
                "Streaming has no full cache to fill; leave out streaming or filled."
            )

    @property
    def streamed(self) -> int:
        """Tokens streamed at a time."""
        return self.part or min(PART, min(self.tokens) // 2)


def run_memory(options: Options, progress: Callable[[str], None] = lambda phase: None) -> dict:
    """Measure every T in every mode.

    Returns:
        Rows {tokens, mode, full, layer, phases: {name: {seconds, peak}}, peak, ...}, in bytes and
        seconds, how they grow with T, the options, and facts of the model and the machine.
    """
    shape = {**SHAPE, **options.shape}
    rows = []
    threads = options.threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory(prefix="restorekv-bench-") as name:
        progress("making the model")
        save_tokenizer(Path(name))
        parameters = save_model(Path(name), shape, options.seed)
        for tokens in options.tokens:
            for mode in options.modes:
                progress(f"T = {tokens:,}, {mode}")
                job = {
                    "model": name,
                    "threads": threads,
                    "tokens": tokens,
                    "mode": mode,
                    "seed": options.seed,
                    "evictor": options.evictor,
                    "ratio": str(options.ratio),
                    "filled": options.filled,
                    "part": options.streamed,
                }
                command = [sys.executable, "-m", "benchmarks.memory"]
                what = f"The measurement of {mode} at T = {tokens:,}"
                figures = measure_apart(command, job, Path(name), what)
                rows.append({"tokens": tokens, "mode": mode, **figures})
    return {
        "model": {"parameters": parameters, "dtype": "bfloat16", **shape},
        "machine": describe_machine(threads),
        "evictor": options.evictor,
        "ratio": float(parse_ratio(options.ratio)),
        "filled": options.filled,
        "part": options.streamed,
        "rows": rows,
        "growth": compute_growth(rows),
    }


class Phases:
    """Seconds and peak memory of phases. Call it with the name of every phase that begins, and with
    None at the end.
    """

    def __init__(self) -> None:
        self.found: dict[str, dict] = {}
        self.now: str | None = None
        release_memory()
        self.before = read_memory("VmRSS")

    def __call__(self, name: str | None) -> None:
        if self.now is not None:
            phase = self.found.setdefault(self.now, {"seconds": 0.0, "peak": 0})
            phase["seconds"] += time.perf_counter() - self.start
            phase["peak"] = max(phase["peak"], read_memory("VmHWM") - self.before)
        self.now = name and name.partition(" ")[0]
        release_memory()
        with contextlib.suppress(OSError):
            REFERENCES.write_text("5")  # the high-water mark starts from the present
        self.start = time.perf_counter()


def release_memory() -> None:
    """Return free memory to the system, so that no phase is charged for what an earlier
    one freed.
    """
    gc.collect()
    trim_heap()


def measure(job: dict) -> dict:
    """Measure one compression, phase by phase."""
    model, tokenizer = load_model(job["model"])
    adapter = RestoreAdapter.create(model, 8, rank=8, seed=job["seed"])
    shape = CacheShape.from_model(model)
    text = make_text(job["tokens"], job["seed"])
    mode = {
        "offload": job["mode"] == "offload",
        "streaming_chunk": job["part"] if job["mode"] == "streaming" else None,
    }
    make = _compress_filled if job["filled"] else _compress_text

    make(model, tokenizer, text[:WARM_UP], job, mode, adapter, lambda phase: None)
    phases = Phases()
    kept, columns = make(model, tokenizer, text, job, mode, adapter, phases)
    phases(None)
    pair = 2 * shape.head_dim * model.dtype.itemsize
    return {
        "before": phases.before,
        "full": columns * shape.layers * shape.heads * pair,
        "layer": columns * shape.heads * pair,
        "part": min(job["part"], columns) * shape.layers * shape.heads * pair,
        "scores": SCORES[job["mode"]] * columns * shape.layers * shape.heads,
        "kept": kept,
        "phases": phases.found,
        "peak": max(phase["peak"] for phase in phases.found.values()),
    }


def _compress_text(model, tokenizer, text, job, mode, adapter, phases) -> tuple[int, int]:
    """Compress a text; return the bytes of what is kept, and S + T."""
    current = ""

    def note_phase(phase: str, _: float) -> None:
        nonlocal current
        if phase != current:
            current = phase
            phases(phase)

    made = compress(
        model,
        tokenizer,
        text,
        evictor=job["evictor"],
        ratio=job["ratio"],
        adapter=adapter,
        progress=note_phase,
        config=CompressionConfig(on_small_budget="fewer", **mode),
    )
    return made.manifest.bytes_held, made.context.num_tokens


def _compress_filled(model, tokenizer, text, job, mode, adapter, phases) -> tuple[int, int]:
    """Compress a cache of random numbers; return the bytes of what is kept, and S + T."""
    context = make_context(tokenizer, text)
    evictor = evictors.make_evictor(job["evictor"])
    if evictor.make_observer(model, context) is not None:
        raise RestoreKVError(f"{evictor.name} observes the prefill; measure it without filled.")
    phases("fill")
    full = _fill_cache(model, context.num_tokens, mode["offload"])
    phases("score")
    scores = evictor.score(model, tokenizer, context, full)
    prepared = ScoredContext(
        model, context, full, scores, config=CompressionConfig(on_small_budget="fewer")
    )
    phases("restore")
    prepared = prepared.with_restore_cache(adapter)
    phases("evict")
    return prepared.evict(job["ratio"], consume=True).nbytes, context.num_tokens


def _fill_cache(model: PreTrainedModel, columns: int, offload: bool) -> Cache:
    """Return a full cache of standard normal keys and values."""
    shape = CacheShape.from_model(model)
    full = make_offloaded_cache(model, columns) if offload else DynamicCache()
    for layer in range(shape.layers):
        keys = torch.randn(1, shape.heads, columns, shape.head_dim, dtype=model.dtype)
        values = torch.randn(1, shape.heads, columns, shape.head_dim, dtype=model.dtype)
        full.update(keys, values, layer)
    return full


def compute_growth(rows: Sequence[dict]) -> dict[str, dict[str, list[float]]]:
    """Return the exponents with which the seconds of each mode and phase grow from one T to the
    next: 1 is linear, 2 quadratic.
    """
    growth: dict[str, dict[str, list[float]]] = {}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        growth[mode] = {name: [] for name in _list_phases(of_mode)}
        for early, late in pairwise(of_mode):
            for name, exponents in growth[mode].items():
                # A text that fits into one part is not streamed, so it has other phases.
                if name in early["phases"] and name in late["phases"]:
                    exponents.append(_compute_exponent(early, late, name))
    return growth


def _compute_exponent(early: dict, late: dict, name: str) -> float:
    """Return the log of the ratio of a phase's seconds over that of the tokens."""
    more = late["phases"][name]["seconds"] / early["phases"][name]["seconds"]
    return math.log(more) / math.log(late["tokens"] / early["tokens"])


def _list_phases(rows: Sequence[dict]) -> list[str]:
    """Return all phases that occur in the rows, in the order of their first occurrence."""
    phases: dict[str, None] = {}  # an ordered set
    for row in rows:
        phases |= dict.fromkeys(row["phases"])
    return list(phases)


if __name__ == "__main__":
    serve_job(sys.argv[1], measure)
