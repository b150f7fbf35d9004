"""`restorekv analyze`: attention, predictions, survivors, where restore tokens look, and what it all costs."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from transformers import PreTrainedModel

from restorekv import tasks
from restorekv.cli import options
from restorekv.cli.session import bar, notes, output, phase, quiet
from restorekv.compression.budget import exact_ratio
from restorekv.compression.compressor import Eviction, load_adapter, make_compressor
from restorekv.compression.prepared import CompressionConfig
from restorekv.errors import RestoreKVError
from restorekv.evaluation import protocols
from restorekv.evaluation.analysis import efficiency
from restorekv.evaluation.analysis.run import ANALYSES, analyze
from restorekv.evaluation.expand import SHIPPED, named
from restorekv.evaluation.worker import opened_model

EFFICIENCY = "efficiency"
WHAT = (*ANALYSES, EFFICIENCY)
Scorers = Annotated[list[str], typer.Option(help="efficiency: a base scorer; repeatable.")]


def run(
    out: Annotated[Path, typer.Option(help="The run folder; figures go to OUT/analysis and OUT/efficiency.")],
    evictor: Annotated[
        str, typer.Option(help="SPEC or SPEC@ADAPTER (a folder, a hub id, published, auto, none).")
    ] = "kvzip",
    ratio: Annotated[list[str], typer.Option(help="A ratio in (0, 1]; repeatable.")] = ("0.05",),
    benchmark: Annotated[str, typer.Option(help="Whose documents and questions.")] = "bundled:count=26",
    what: Annotated[str, typer.Option(help=f"Some of {','.join(WHAT)}.")] = ",".join(WHAT),
    label: Annotated[str | None, typer.Option(help="The files' name; model and evictor unless given.")] = None,
    protocol: Annotated[str, typer.Option(help=f"{' or '.join(protocols.PROTOCOLS)}.")] = "kvpress",
    model: options.Model = "bundled",
    restore_tokens: options.RestoreTokens = None,
    prefix_policy: Annotated[str | None, typer.Option(help="free or counted; else the protocol's.")] = None,
    on_small_budget: options.OnSmallBudget = "fewer",
    allocation: options.Allocation = "global",
    restore_from: options.RestoreFrom = "full",
    offset: options.Offset = 0,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    scorer: Scorers = efficiency.SCORERS,
    tokens: Annotated[int, typer.Option(help="efficiency: the context's length T.")] = 2048,
    repeat: Annotated[int, typer.Option(min=1, help="efficiency: compressions per measurement.")] = 3,
    latency_context: Annotated[
        str, typer.Option(help="efficiency: prefill, or random keys and values for attention over a long context.")
    ] = "prefill",
) -> None:
    chosen, way, asked = choose(what), protocols.make(protocol), tasks.make(benchmark)
    ratios = sorted(map(str, ratio), key=exact_ratio, reverse=True)
    measured = efficiency.Options(tuple(scorer), tokens, ratios[-1], repeat=repeat, latency_context=latency_context)
    policy = prefix_policy or way.prefix_policy
    conventions = CompressionConfig(policy, on_small_budget, allocation, restore_from, offset)
    uncontrolled = CompressionConfig(policy, on_small_budget, allocation)
    name, source = named(evictor)
    for each in (name, *scorer):
        check(each)
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; give a folder.")
    quiet()
    with phase(f"loading {model}"):
        loaded, tokenizer = opened_model(model, dtype, device, way.name)
    if wanted := [each for each in chosen if each != EFFICIENCY]:
        eviction = restoring(loaded, name, source, conventions, restore_tokens)
        if "gaze" in wanted and not eviction.adapter:
            notes.print("gaze is left out: there is no adapter, hence no restore tokens.")
        with bar("analysing documents", lines=True) as tell:
            wrote(analyze(loaded, tokenizer, eviction, way, asked, ratios, out, wanted, label, tell))
    if EFFICIENCY in chosen:
        with bar("measuring time and memory", lines=True) as tell:
            wrote([efficiency.measure(loaded, tokenizer, out, measured, uncontrolled, label, tell)])


def choose(what: str) -> list[str]:
    """The analyses asked for, in the order of WHAT."""
    names = [name.strip() for name in what.split(",") if name.strip()]
    strange = [name for name in names if name not in WHAT]
    if strange or not names:
        told = f"there is no analysis {strange[0]!r}" if strange else "no analysis is named"
        raise RestoreKVError(f"In --what {told}; give some of {','.join(WHAT)}.")
    return [name for name in WHAT if name in names]


def check(name: str) -> None:
    """Refuses, before a model is loaded, what is no evictor."""
    if not make_compressor(name).restores:
        raise RestoreKVError(f"{name} is no evictor, so no pair of the context survives in it; name an evictor.")


def restoring(
    model: PreTrainedModel, name: str, source: str | None, conventions: CompressionConfig, restore_tokens: int | None
) -> Eviction:
    """The evictor with its adapter, if it has one."""
    base = replace(Eviction.make(name), conventions=conventions)
    adapter = load_adapter(model, "auto" if source == SHIPPED else source, base, restore_tokens)
    return replace(base, adapter=adapter) if adapter else base


def wrote(paths: list[Path]) -> None:
    for path in paths:
        output.print(f"Wrote {escape(str(path))}", soft_wrap=True)
