"""Figure 5: how much attention eviction takes from the context and restoring gives back, layer by
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.workload import make_label
from paper.analysis.attention_mass import compute_profile_divergence
from paper.analysis.case import DocumentFigures
from paper.analysis.page import shade_gain
from paper.analysis.run import FOLDER, analyze
from paper.scores import MISSING, TOO_FEW, JudgedClaim, decide_verdict
from paper.setting import Setting
from paper.study import Study, load_figures
from restorekv import evictors, tasks
from restorekv.compression.adapters import load_adapter
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction
from restorekv.compression.progress import OnStep
from restorekv.evaluation import protocols
from restorekv.evaluation.charts import (
    BLUE,
    INK,
    NARROW,
    SKY,
    Chart,
    Mark,
    make_figure,
    plot_line,
    set_ticks,
    with_style,
)
from restorekv.evaluation.report import Block
from restorekv.evaluation.stats import MIN_FOR_INTERVAL
from restorekv.evaluation.tables import Table, format_number
from restorekv.files import load_lines
from restorekv.model.load import load_model
from restorekv.tasks import Benchmark

EVICTOR = "kvzip"
RATIO = "0.05"
WHAT = ("attention", "divergence")
DOCUMENTS = 52
LABELS = {"full": "full cache", "base": "KVzip", "restored": "RestoreKV"}
LOOKS = {
    "full": Mark("full cache", INK, dashed=True),
    "base": Mark("KVzip", BLUE, "o", dashed=True, hollow=True),
    "restored": Mark("RestoreKV", BLUE, "o"),
}
# The paper's mass on the context in percent, layers below 0.1 %, and divergences of the layer
# profile and of predictions in nats.
PAPER = {
    "full": ("2.73", "", "", ""),
    "base": ("0.56", "7 of 36", "0.198", "7.3"),
    "restored": ("1.30", "0 of 36", "0.167", "3.8"),
}


def make_experiment(setting: Setting) -> Study:
    return Study(
        name="mechanism",
        number="Figure 5",
        label="fig:mechanism",
        title="Layer-wise context-attention recovery at r = 0.05",
        backbone="Qwen3-4B",
        show=_show,
        measure=_measure,
        note="Where the last token of a question looks, on documents of the benchmark that "
        "stands for RULER-4K (of the "
        "tiny suite all families). The paper does not define its divergences. Here that of the "
        "layer profile is "
        "KL(cache || full), defined also where a layer looks at no context at all, and that of "
        "predictions is "
        "KL(full || cache) at the first answer token.",
        minutes=3,
    )


def _measure(setting: Setting, out: Path, progress: OnStep) -> None:
    """Run both analyses on the same documents."""
    setup = setting.setup
    bench = setting.benches["ruler"]
    protocol = protocols.make_protocol(bench.protocol)
    model, tokenizer = load_model(setup.model, setup.dtype, setup.device)
    conventions = CompressionConfig(
        **{"prefix_policy": protocol.prefix_policy, **setting.conventions}
    )
    eviction = Eviction(evictors.make_evictor(EVICTOR), config=conventions)
    adapter = load_adapter(model, setting.find_adapter(EVICTOR, EVICTOR), eviction)
    restoring = replace(eviction, adapter=adapter)
    few = _choose_documents(setting)
    analyze(
        model, tokenizer, restoring, protocol, few, [RATIO], out, WHAT, label_run(setting), progress
    )


def _choose_documents(setting: Setting) -> Benchmark:
    """Return the benchmark that replaces RULER, with at most DOCUMENTS documents."""
    asked = tasks.make_benchmark(setting.benches["ruler"].spec)
    return replace(asked, count=min(asked.count or DOCUMENTS, DOCUMENTS))


def label_run(setting: Setting) -> str:
    """Return the label of the analyses' files.

    Without an adapter it is a different one, so that a later run with an adapter has its own files.
    """
    alone = () if setting.find_adapter(EVICTOR, EVICTOR) else ("alone",)
    return make_label(setting.model, EVICTOR, str(_choose_documents(setting).count), *alone)


def _show(setting: Setting, out: Path) -> tuple[list[Block], list[JudgedClaim]]:
    """Return the chart, the table and the claims, or only a sentence if nothing is measured yet."""
    attention, predictions = (
        load_figures(out / FOLDER / f"{kind}-{label_run(setting)}.json") for kind in WHAT
    )
    if attention is None or predictions is None:
        return ["Not measured yet."], []
    caches, told = (found["figures"][RATIO]["caches"] for found in (attention, predictions))
    blocks = [
        _plot_profile(setting, attention, caches),
        _make_averages_table(attention, caches, told),
    ]
    if "restored" not in caches:
        return [*blocks, "There is no adapter for KVzip: the restored cache is not measured."], []
    return blocks, list_claims(
        _pool_documents(out, attention["label"], "attention"),
        _pool_documents(out, attention["label"], "divergence"),
    )


@with_style
def _plot_profile(setting: Setting, found: dict, caches: dict) -> Chart:
    """Return a chart of the attention on the context by layer; what restoring brings back
    is shaded.
    """
    layers = range(1, len(caches["full"]["context"]) + 1)
    shares = {name: [100 * mass for mass in cache["context"]] for name, cache in caches.items()}
    figure, (axes,) = make_figure([("", NARROW, 3.0)])
    for name, values in shares.items():
        plot_line(axes, LOOKS[name], layers, values)
    if "restored" in shares:
        shade_gain(axes, layers, shares["base"], shares["restored"], "brought back", SKY)
    axes.set(xlabel="layer", ylabel="attention on the context (%)")
    set_ticks(axes, layers if len(layers) < 13 else range(4, len(layers) + 1, 4))
    return Chart(
        name="mechanism-chart",
        title=f"Attention on the context by layer ({setting.model})",
        figure=figure,
        alt=(
            "Attention of the last question token on non-sink context by layer: full, evicted and "
            "restored cache"
        ),
        note=(
            f"{found['documents']} documents, {found['questions']} questions. Shaded: what comes "
            "back."
        ),
        figures=[
            {"layer": layer, **{name: values[layer - 1] for name, values in shares.items()}}
            for layer in layers
        ],
    )


def _make_averages_table(found: dict, caches: dict, told: dict) -> Table:
    lines = []
    for name, cache in caches.items():
        here = [
            format_number(100 * cache["average"]["context"], 2),
            f"{cache['layers_below']} of {len(cache['context'])}",
            format_number(cache.get("kl_profile_backward"), 3) if name != "full" else "",
            format_number(told[name]["first"]["forward"], 2) if name != "full" else "",
        ]
        paired = [text for pair in zip(here, PAPER[name], strict=True) for text in pair]
        lines.append([LABELS[name], *paired, format_number(100 * cache["average"]["restore"], 2)])
    note = (
        "Context mass: attention on context pairs beyond the sinks; restore mass: on the restore "
        "states. Both of "
    )
    note += found["definitions"]["query"] + "."
    titles = [
        "context mass, %",
        "layers below 0.1 %",
        "KL of the layer profile, nats",
        "KL of predictions, nats",
    ]
    head = [
        "cache",
        *(f"{title}, {whose}" for title in titles for whose in ("here", "paper")),
        "restore mass, %, here",
    ]
    return Table("mechanism-averages", "Averages over layers", head, lines, note)


def _pool_documents(out: Path, label: str, kind: str) -> DocumentFigures:
    """Load every document's figures from an analysis's journal."""
    lines = list(load_lines(out / FOLDER / f"{kind}-{label}.jsonl"))[1:]
    return DocumentFigures(
        [line["figures"][RATIO] for line in lines], [line["questions"] for line in lines]
    )


def list_claims(attention: DocumentFigures, predictions: DocumentFigures) -> list[JudgedClaim]:
    """Judge the claims by differences between caches, paired by document."""

    def mass(x: np.ndarray) -> np.ndarray:
        return 100 * x[..., 0].mean(-1)

    def apart(of: Callable) -> Callable:
        return lambda x: of(x[:, 0]) - of(x[:, 1])

    def recovered(x: np.ndarray) -> np.ndarray:
        full, base, restored = (x[:, index, :, 0] for index in range(3))
        return compute_profile_divergence(base, full) - compute_profile_divergence(restored, full)

    mass_difference = apart(mass)
    kl_difference = apart(lambda x: x[..., 0])
    return [
        _judge_claim(
            "eviction takes attention from the context (percent points)",
            2.17,
            attention,
            ("full", "base"),
            mass_difference,
        ),
        _judge_claim(
            "restoring gives some back (percent points)",
            0.74,
            attention,
            ("restored", "base"),
            mass_difference,
        ),
        _judge_claim(
            "the layer profile comes closer to the full cache's (nats)",
            0.031,
            attention,
            ("full", "base", "restored"),
            recovered,
        ),
        _judge_claim(
            "predictions come closer to the full cache's (nats)",
            3.5,
            predictions,
            ("base", "restored"),
            kl_difference,
            "first",
        ),
    ]


def _judge_claim(
    text: str,
    paper: float,
    found: DocumentFigures,
    caches: Sequence[str],
    of: Callable,
    field: str = "masses",
) -> JudgedClaim:
    """Judge the claim that a statistic of several caches' mean figures is above zero.

    Args:
        text: The claim.
        paper: The statistic in the paper.
        found: The documents' figures.
        caches: The caches that the statistic compares.
        of: Maps the means of R resamples (R, caches, ...) to the statistic (R,).
        field: The figure that it is computed from.
    """
    both = DocumentFigures(
        [{"all": [each[name][field] for name in caches]} for each in found.documents],
        found.questions,
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(of(both.mean("all", by_question=True)[None])[0])
        low, high = both.interval(of, "all", by_question=True)
    if len(found.documents) < MIN_FOR_INTERVAL and np.isfinite(value):
        return JudgedClaim(text, TOO_FEW, (paper,), value)
    if None in (low, high) or not np.isfinite([value, low, high]).all():
        return JudgedClaim(text, MISSING, (paper,))
    return JudgedClaim(text, decide_verdict(low, high), (paper,), value, low, high)
