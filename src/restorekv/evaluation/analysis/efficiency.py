"""What restoring costs (the paper's Fig. efficiency): time and memory of compressing, and of attention afterwards.

(a) compression   prefill, scoring, restore pass and eviction, with and without the restore pass, for every base
                  scorer; each measurement in a process of its own (`compress_side`)
(b) attention     seconds of one layer's attention in one decode step, and bytes and pairs held, against r, base and
                  restored at the same budget B, one after the other in one process (`latency`)

OUT/efficiency/<label>.json
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.budget import exact_ratio
from restorekv.compression.compressor import Eviction
from restorekv.compression.prepared import CompressionConfig
from restorekv.errors import RestoreKVError
from restorekv.evaluation.analysis.compress_side import REFUSED, adapter_for, context_of, scorer_of
from restorekv.evaluation.analysis.latency import latencies, random_prepared
from restorekv.evaluation.analysis.run import label_of
from restorekv.evaluation.apart import measured
from restorekv.evaluation.machine import processor
from restorekv.evaluation.provenance import facts
from restorekv.evaluation.results import differences
from restorekv.files import write_json
from restorekv.model.load import model_name

FOLDER = "efficiency"
SCORERS = ("kvzip", "snapkv", "h2o", "fastkvzip")
RATIOS = ("1", "0.4", "0.2", "0.1", "0.05")
CONTEXTS = ("prefill", "random")
Progress = Callable[[int, int], None]
DEFINITIONS = {
    "seconds": "medians over the repetitions in one process, after a warm-up",
    "peak": "bytes at most held while compressing, above the loaded model, in a process of its own; with the restore "
    "pass the adapter's weights count too",
    "overhead": "seconds of the restore pass over all other seconds of the same process; difference of the peaks, also "
    "over the base's peak",
    "milliseconds": "one layer's attention for one new token of batch 1: the median over the steps of the mean over "
    "layers",
    "latency_ratio": "median over the steps of restored / base, measured in turn",
    "bytes": "everything that the compressed cache holds",
    "pairs": "KV pairs held, chat prefix included",
}


@dataclass(frozen=True)
class Options:
    """`tokens` is T. `latency_context`: "prefill", or "random" keys and values where a prefill would take too long."""

    scorers: Sequence[str] = SCORERS
    tokens: int = 2048
    ratio: str = "0.05"
    ratios: Sequence[str] = RATIOS
    repeat: int = 3
    steps: int = 200
    latency_context: str = "prefill"

    def __post_init__(self) -> None:
        for ratio in (self.ratio, *self.ratios):
            exact_ratio(ratio)
        if self.tokens < 64 or self.repeat < 1 or self.steps < 1:
            raise RestoreKVError("Measure at least 64 tokens, 1 repetition and 1 step.")
        if self.latency_context not in CONTEXTS:
            raise RestoreKVError(f"latency_context is {' or '.join(CONTEXTS)}, not {self.latency_context!r}.")


def measure(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    out: Path,
    options: Options,
    conventions: CompressionConfig = CompressionConfig(),
    label: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """The file written. Figures of the same settings on the same machine stay; other ones are in the way.

    `conventions` are for eviction with adapters: no offset, a restore pass over the full cache.
    """
    label = label or label_of(model_name(model), model.device.type)
    path = out / FOLDER / f"{label}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = settings_of(model, options, conventions)
    if path.exists():
        told = differences(json.loads(path.read_text(encoding="utf-8"))["conventions"], settings)
        if told:
            raise RestoreKVError(f"{path} was made with {told}; give another --out or --label, or remove it.")
        return path
    jobs = [(scorer, restored) for scorer in options.scorers for restored in (False, True)]
    rows = []
    for done, (scorer, restored) in enumerate(jobs):
        progress(done, len(jobs) + 1)
        rows.append({"evictor": scorer, "restored": restored, **apart(model, options, conventions, scorer, restored)})
    progress(len(jobs), len(jobs) + 1)
    steps = attention_rows(model, tokenizer, options, conventions)
    progress(len(jobs) + 1, len(jobs) + 1)
    write_json(path, {
        "analysis": "efficiency", "label": label, "conventions": settings, "definitions": DEFINITIONS,
        "compression": rows, "overhead": {scorer: overhead(rows, scorer) for scorer in options.scorers},
        "latency": steps,
        "latency_ratio": {f"{row['ratio']:g}": row.pop("to_base") for row in steps if row["restored"]},
    })  # fmt: skip
    return path


def settings_of(model: PreTrainedModel, options: Options, conventions: CompressionConfig) -> dict:
    """Model, conventions, machine and options."""
    machine = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else processor()
    return json.loads(json.dumps({**facts(model, conventions), "machine": machine, **asdict(options)}))


def apart(
    model: PreTrainedModel, options: Options, conventions: CompressionConfig, scorer: str, restored: bool
) -> dict:
    """One measurement of `compress_side` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="restorekv-efficiency-") as name:
        job = {
            "model": model_name(model), "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device),
            "threads": torch.get_num_threads(), "evictor": scorer, "restored": restored, "tokens": options.tokens,
            "ratio": options.ratio, "repeat": options.repeat, "conventions": conventions.described(),
            "folder": name,
        }  # fmt: skip
        command = [sys.executable, "-m", "restorekv.evaluation.analysis.compress_side"]
        found = measured(command, job, Path(name), f"Measuring {scorer} at T = {options.tokens:,}")
    if REFUSED in found:
        raise RestoreKVError(found[REFUSED])
    return found


def overhead(rows: Sequence[dict], scorer: str) -> dict:
    """What the restore pass adds to a scorer's compression."""
    base, restored = (
        next(row for row in rows if (row["evictor"], row["restored"]) == (scorer, wanted)) for wanted in (False, True)
    )
    seconds = restored["seconds"]
    told = {"seconds": seconds["restore"], "share": seconds["restore"] / (seconds["total"] - seconds["restore"])}
    told |= {"peak": None, "peak_share": None}
    if base["peak"] and restored["peak"] is not None:
        told["peak"] = restored["peak"] - base["peak"]
        told["peak_share"] = told["peak"] / base["peak"]
    return told


def attention_rows(
    model: PreTrainedModel, tokenizer: Tokenizer, options: Options, conventions: CompressionConfig
) -> list[dict]:
    """(b), with the first scorer's choice of pairs, or a random one."""
    scorer = options.scorers[0]
    adapter, _ = adapter_for(model, scorer)
    if options.latency_context == "random":
        prepared = random_prepared(model, tokenizer, options.tokens, adapter.restore_tokens, conventions)
    else:
        with tempfile.TemporaryDirectory(prefix="restorekv-efficiency-") as name:
            spec, _ = scorer_of(model, scorer, Path(name))
            eviction = replace(Eviction.make(spec, adapter), conventions=conventions)
            prepared = eviction.prepare(model, tokenizer, context_of(tokenizer, options.tokens))
    return latencies(prepared, options.ratios, options.steps)
