"""`python -m benchmarks scorers`: what every method's scoring costs compared with the prefill, in
one run on this machine.

A model of random weights in the shape of Qwen3-0.6B prefills the same T tokens before every method.
The method's own prefill is measured too, because some methods observe the prefill. A method's cost
is everything that it adds,

    (its prefill + its scoring - plain prefill) / plain prefill,

with the plain prefill measured right before it. A learned scorer gets a gate of random weights,
because only shapes decide the time. AM-fast has no scores; its figure is its reference pass and one
fit at the ratio.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.compress_cost import LEARNED, WARM_UP, make_text, save_random_gate
from benchmarks.each import measure_each
from benchmarks.measure import Peak
from restorekv import pipeline
from restorekv.compression.budget import parse_ratio
from restorekv.compression.compressor import time_phase
from restorekv.context import format_bytes
from restorekv.errors import RestoreKVError
from restorekv.evictors import EVICTORS
from restorekv.model.prefill import prefill
from restorekv.model.prompt import make_context

SKIPPED = ("kvpress",)  # another library's scorers
AM = "am-fast"


@dataclass(frozen=True)
class Options:
    """The options of `scorers`.

    `shape` replaces fields of Qwen3-0.6B's config. `methods` are names of evictors, or am-fast; an
    empty list means all.
    """

    tokens: int = 4096
    methods: Sequence[str] = ()
    ratio: float = 0.05
    threads: int = 0
    seed: int = 0
    shape: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parse_ratio(self.ratio)
        if self.tokens < WARM_UP or self.threads < 0:
            raise RestoreKVError(
                f"Measure at least {WARM_UP} tokens with 0 or more threads, not {self.tokens} "
                "tokens."
            )
        strange = set(self.methods) - {*EVICTORS, AM}
        if strange:
            known = ", ".join([*EVICTORS, AM])
            raise RestoreKVError(
                f"There is no method {min(strange)!r} to measure; use some of {known}."
            )


def run_scorers(options: Options, progress: Callable[[str], None] = lambda phase: None) -> dict:
    """Measure every method.

    Returns:
        Rows {method, prefill, own_prefill, score, multiple, peak}, in seconds and in bytes above
        what was resident, the options, and facts of the model and the machine.
    """
    methods = options.methods or [name for name in (*EVICTORS, AM) if name not in SKIPPED]
    facts, rows = measure_each(
        methods,
        lambda model, tokenizer, method, folder: _measure_method(
            model, tokenizer, method, options, folder
        ),
        progress,
        kind="method",
        changed=options.shape,
        seed=options.seed,
        threads=options.threads,
    )
    return {
        **facts,
        "tokens": options.tokens,
        "ratio": options.ratio,
        "rows": rows,
    }


@torch.no_grad()
def _measure_method(
    model: PreTrainedModel, tokenizer: Tokenizer, method: str, options: Options, folder: Path
) -> dict:
    """Measure one method, after a warm-up on a short text and a plain prefill."""
    prepare = _make_preparer(model, tokenizer, method, options, folder)
    prepare(make_text(WARM_UP, options.seed))
    text = make_text(options.tokens, options.seed)
    seconds: dict[str, float] = {}
    with time_phase(seconds, "prefill"):
        full = prefill(model, make_context(tokenizer, text).ids)
    del full
    gc.collect()
    with Peak() as peak:
        own = prepare(text)
    added = own["prefill"] + own["score"] - seconds["prefill"]
    return {
        "prefill": seconds["prefill"],
        "own_prefill": own["prefill"],
        "score": own["score"],
        "multiple": added / seconds["prefill"],
        "peak": peak.bytes,
    }


def _make_preparer(
    model: PreTrainedModel, tokenizer: Tokenizer, method: str, options: Options, folder: Path
) -> Callable[[str], dict[str, float]]:
    """Return a function that prepares a text by the method, and returns the seconds of its prefill
    and scoring.
    """
    spec = (
        f"{method}:gate={save_random_gate(model, method, folder)}" if method in LEARNED else method
    )
    made = pipeline.make_compressor(spec)

    def prepare(text: str) -> dict[str, float]:
        prepared = made.prepare(model, tokenizer, text)
        seconds = dict(prepared.seconds)
        if method == AM:
            with time_phase(seconds, "fit"):
                prepared.evict(options.ratio)
            seconds["score"] += seconds["fit"]
        return seconds

    return prepare


def format_table(result: dict) -> str:
    """Return a table of the rows, cheapest first."""
    model = result["model"]
    machine = result["machine"]
    head = (
        f"T = {result['tokens']:,}, random weights, {model['parameters'] / 1e6:,.0f} million "
        "parameters "
        f"({model['num_hidden_layers']} layers), {model['dtype']}, {machine['threads']} threads on "
        f"{machine['processor']}.\n\n| method | plain prefill, s | prefill with it, s | scoring, s "
        "| adds, in prefills "
        "| peak above weights |\n|---|---|---|---|---|---|\n"
    )
    return head + "".join(
        f"| {row['method']} | {row['prefill']:.1f} | {row['own_prefill']:.1f} | {row['score']:.2f} "
        "|"
        f" {row['multiple']:.2f} | "
        f"{'unknown' if row['peak'] is None else format_bytes(row['peak'])} |\n"
        for row in sorted(result["rows"], key=lambda row: row["multiple"])
    )
