"""`python -m benchmarks efficiency`: what restoring costs (the paper's Fig. efficiency), on any
model.

(a) compression   seconds of prefill, scoring, restore pass and eviction, with and without the
                  restore pass, for every scorer; each measurement runs in its own process
                  (`compress_cost`)
(b) latency       milliseconds of one layer's attention in one decode step, and bytes and pairs
                  held, against r; the base and the restored cache have the same budget B and take
                  turns in this process

The figures are written to OUT/efficiency/<label>.json.
"""

import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.compress_cost import (
    REFUSED,
    find_adapter,
    find_scorer,
    make_context_of,
    measure_apart,
)
from benchmarks.measure import name_processor
from benchmarks.workload import make_label
from restorekv import evictors
from restorekv.cache.ragged import RaggedCache
from restorekv.compression.budget import parse_ratio
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.compression.progress import OnStep
from restorekv.errors import RestoreKVError
from restorekv.evaluation.results import describe_changes, identify_setup
from restorekv.files import read_json, write_json
from restorekv.model import attention
from restorekv.model.identity import identify_model
from restorekv.model.names import get_model_name
from restorekv.model.shape import CacheShape, get_backbone

FOLDER = "efficiency"
SCORERS = ("kvzip", "snapkv", "h2o", "fastkvzip")
RATIOS = ("1", "0.4", "0.2", "0.1", "0.05")
CONTEXTS = ("prefill", "random")
WARM_UP = 3  # decode steps
DEFINITIONS = {
    "seconds": "medians over the repetitions in one process, after a warm-up",
    "peak": (
        "the most bytes held while compressing, above the loaded model, in a process of its own; "
        "with the restore pass the adapter's weights count too"
    ),
    "overhead": (
        "seconds of the restore pass over all other seconds of the same process; difference of the "
        "peaks, also over the base's peak"
    ),
    "milliseconds": (
        "one layer's attention for one new token of batch 1: the median over the steps of the mean "
        "over layers"
    ),
    "latency_ratio": "median over the steps of restored / base, measured in turn",
    "bytes": "everything that the compressed cache holds",
    "pairs": "KV pairs held, chat prefix included",
}


@dataclass(frozen=True)
class CostOptions:
    """The options of `efficiency`.

    `tokens` is T. `latency_context` says what attention is timed over: the cache of a "prefill", or
    "random" keys and values if a prefill would take too long.
    """

    scorers: Sequence[str] = SCORERS
    tokens: int = 2048
    ratio: str = "0.05"
    ratios: Sequence[str] = RATIOS
    repeat: int = 3
    steps: int = 200
    latency_context: str = "prefill"

    def __post_init__(self) -> None:
        for ratio in (self.ratio, *self.ratios):
            parse_ratio(ratio)
        if self.tokens < 64 or self.repeat < 1 or self.steps < 1:
            raise RestoreKVError("Measure at least 64 tokens, 1 repetition and 1 step.")
        if self.latency_context not in CONTEXTS:
            raise RestoreKVError(
                f"latency_context is {' or '.join(CONTEXTS)}, not {self.latency_context!r}."
            )


def measure_efficiency(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    out: Path,
    options: CostOptions,
    conventions: CompressionConfig = CompressionConfig(on_small_budget="error"),
    label: str | None = None,
    progress: OnStep = lambda done, total, what: None,
) -> Path:
    """Measure, unless the file exists already, and return the path of the file.

    Raises RestoreKVError if the file holds figures of other settings or of another machine.
    `conventions` are those of eviction with adapters: no offset, a restore pass over the full
    cache.
    """
    label = label or make_label(get_model_name(model), model.device.type)
    path = out / FOLDER / f"{label}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if model.device.type == "cuda":
        machine = torch.cuda.get_device_name(model.device)
    else:
        machine = name_processor()
    settings = {
        **identify_setup(model, identify_model(model), conventions),
        "machine": machine,
        **asdict(options),
    }
    if path.exists():
        if changes := describe_changes(read_json(path, str(path))["conventions"], settings):
            raise RestoreKVError(
                f"{path} was made with {changes}; pass another --out or --label, or remove it."
            )
        return path
    runs = list(product(options.scorers, (False, True)))
    rows = []
    for done, (scorer, restored) in enumerate(runs):
        progress(done, len(runs) + 1, "measurements")
        figures = measure_compression_apart(model, options, conventions, scorer, restored)
        rows.append({"evictor": scorer, "restored": restored, **figures})
    progress(len(runs), len(runs) + 1, "measurements")
    prepared = _prepare_context(model, tokenizer, options, conventions)
    steps = measure_latencies(prepared, options.ratios, options.steps)
    progress(len(runs) + 1, len(runs) + 1, "measurements")

    # Rows come in pairs: base, then restored.
    overhead = {}
    for base, restored in zip(rows[::2], rows[1::2], strict=True):
        overhead[base["evictor"]] = _compute_overhead(base, restored)
    latency_ratio = {}
    for row in steps:
        if row["restored"]:
            latency_ratio[f"{row['ratio']:g}"] = row.pop("to_base")
    result = {
        "analysis": "efficiency",
        "label": label,
        "conventions": settings,
        "definitions": DEFINITIONS,
        "compression": rows,
        "overhead": overhead,
        "latency": steps,
        "latency_ratio": latency_ratio,
    }
    write_json(path, result)
    return path


def measure_compression_apart(
    model: PreTrainedModel,
    options: CostOptions,
    conventions: CompressionConfig,
    scorer: str,
    restored: bool,
) -> dict:
    """Run one measurement of `compress_cost` in its own process."""
    with tempfile.TemporaryDirectory(prefix="restorekv-efficiency-") as name:
        job = {
            "model": get_model_name(model),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "threads": torch.get_num_threads(),
            "evictor": scorer,
            "restored": restored,
            "tokens": options.tokens,
            "ratio": options.ratio,
            "repeat": options.repeat,
            "conventions": conventions.to_json(),
            "folder": name,
        }
        command = [sys.executable, "-m", "benchmarks.compress_cost"]
        figures = measure_apart(
            command, job, Path(name), f"Measuring {scorer} at T = {options.tokens:,}"
        )
    if REFUSED in figures:
        raise RestoreKVError(figures[REFUSED])
    return figures


def _compute_overhead(base: dict, restored: dict) -> dict:
    took = restored["seconds"]["restore"]
    peak = None
    if base["peak"] and restored["peak"] is not None:
        peak = restored["peak"] - base["peak"]
    return {
        "seconds": took,
        "share": took / (restored["seconds"]["total"] - took),
        "peak": peak,
        "peak_share": None if peak is None else peak / base["peak"],
    }


def _prepare_context(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    options: CostOptions,
    conventions: CompressionConfig,
) -> ScoredContext:
    """Return the context for timing attention, prefilled and scored by the first scorer or filled
    at random.
    """
    scorer = options.scorers[0]
    adapter, _ = find_adapter(model, scorer)
    if options.latency_context == "random":
        return make_random_context(
            model, tokenizer, options.tokens, adapter.restore_tokens, conventions
        )
    with tempfile.TemporaryDirectory(prefix="restorekv-efficiency-") as name:
        spec, _ = find_scorer(model, scorer, Path(name))
        eviction = Eviction(evictors.make_evictor(spec), adapter, conventions)
        context = make_context_of(tokenizer, options.tokens)
        prepared = eviction.prepare(model, tokenizer, context)
        assert isinstance(prepared, ScoredContext), "the benchmark does not stream"
        return prepared


def make_random_context(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    tokens: int,
    restore_tokens: int,
    conventions: CompressionConfig,
) -> ScoredContext:
    """Return a context of T tokens with random keys, values and scores, for a T that would take
    too long to prefill.
    """
    context = make_context_of(tokenizer, tokens)
    shape = CacheShape.from_model(model)

    def draw_states(length: int) -> Tensor:
        size = (1, shape.heads, length, shape.head_dim)
        return torch.randn(size, device=model.device, dtype=model.dtype)

    full = DynamicCache()
    for index in range(shape.layers):
        keys = draw_states(context.num_tokens)
        values = draw_states(context.num_tokens)
        full.update(keys, values, index)
    scores = torch.rand(shape.layers, shape.heads, tokens, device=model.device)
    restore_cache = []
    for _ in range(shape.layers):
        restore_cache.append((draw_states(restore_tokens), draw_states(restore_tokens)))
    prepared = ScoredContext(
        model, context, full, scores, config=replace(conventions, restore_from="full")
    )
    return replace(prepared, restore_tokens=restore_tokens, restore_cache=tuple(restore_cache))


@torch.no_grad()
def measure_latencies(prepared: ScoredContext, ratios: Sequence[str], steps: int) -> list[dict]:
    """Return two rows for each ratio, base and restored, which hold the same number of pairs.

    `prepared` must have a restore cache. The two caches take turns, step by step; `to_base`, in
    the restored row, is the median of restored / base over the steps.
    """
    rows = []
    for ratio in ratios:
        both = [prepared.evict(ratio, 0), prepared.evict(ratio)]
        assert both[0].pairs_held == both[1].pairs_held
        caches = [cache.fork() for cache in both]
        for cache in caches:
            _add_token(prepared.model, cache)
        seconds = []
        for _ in range(WARM_UP + steps):
            seconds.append([_time_attention(prepared.model, cache) for cache in caches])
        seconds = seconds[WARM_UP:]
        for index, cache in enumerate(both):
            times = [1000 * each[index] for each in seconds]
            rows.append(
                {
                    "ratio": float(prepared.make_budget(ratio).ratio),
                    "restored": bool(index),
                    "milliseconds": median(times),
                    "least": min(times),
                    "most": max(times),
                    "bytes": cache.nbytes,
                    "pairs": cache.pairs_held,
                    "restore_tokens": cache.restore_length,
                }
            )
        rows[-1]["to_base"] = median(restored / base for base, restored in seconds)
    return rows


def _add_token(model: PreTrainedModel, cache: RaggedCache) -> None:
    """Add a new token's pair to every layer, as a decode step does before attention runs."""
    for layer in cache.layers:
        size = (1, layer.heads, 1, layer.keys.shape[-1])
        keys = torch.randn(size, dtype=model.dtype, device=model.device)
        values = torch.randn(size, dtype=model.dtype, device=model.device)
        layer.update(keys, values)


def _time_attention(model: PreTrainedModel, cache: RaggedCache) -> float:
    """Return the seconds of a random query's attention in one layer, averaged over the layers."""
    shape = CacheShape.from_model(model)
    size = (1, shape.heads * shape.groups, 1, shape.head_dim)
    query = torch.randn(size, dtype=model.dtype, device=model.device)
    layers: Any = get_backbone(model).layers
    modules = [layer.self_attn for layer in layers]
    start = _read_clock(model)
    for module, layer in zip(modules, cache.layers, strict=True):
        attention.attend_layer(module, query, layer, layer, None)
    return (_read_clock(model) - start) / len(modules)


def _read_clock(model: PreTrainedModel) -> float:
    """Return the time after the device has finished its work."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
