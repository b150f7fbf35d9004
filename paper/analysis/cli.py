"""The command `python -m paper.analysis`: it measures attention, predictions, surviving pairs and
what restore tokens attend to.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from paper.analysis.page import write_analyses
from paper.analysis.run import ANALYSES, analyze
from restorekv import tasks
from restorekv.cli import options
from restorekv.cli.loading import silence_transformers
from restorekv.cli.terminal import notes, print_written, show_progress_bar
from restorekv.compression.adapters import load_adapter
from restorekv.compression.budget import parse_ratio
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import Eviction, make_compressor
from restorekv.errors import RestoreKVError
from restorekv.evaluation import protocols
from restorekv.evaluation.grid import SHIPPED, parse_method
from restorekv.evaluation.worker import open_model

if TYPE_CHECKING:
    from restorekv.compression.budget import OnSmallBudget, PrefixPolicy
    from restorekv.restore.choices import RestoreFrom

ALL = ",".join(ANALYSES)
# typer wants lists as the defaults of repeatable options
RATIOS = ["0.05"]


def run(
    out: Annotated[Path, typer.Option(help="The run folder; figures go to OUT/analysis.")],
    evictor: Annotated[
        str, typer.Option(help="SPEC or SPEC@ADAPTER (a folder, a hub id, published, auto, none).")
    ] = "kvzip",
    ratio: Annotated[list[str], typer.Option(help="A ratio in (0, 1]; repeatable.")] = RATIOS,
    benchmark: Annotated[
        str, typer.Option(help="Documents and questions to analyze.")
    ] = "tiny:count=26",
    what: Annotated[str, typer.Option(help=f"Comma-separated analyses out of {ALL}.")] = ALL,
    label: Annotated[
        str | None, typer.Option(help="The name of the files; model and evictor unless given.")
    ] = None,
    protocol: Annotated[str, typer.Option(help=f"{' or '.join(protocols.PROTOCOLS)}.")] = "kvpress",
    model: options.Model = "tiny",
    restore_tokens: options.RestoreTokens = None,
    prefix_policy: options.ScoredPrefixPolicy = "free",
    on_small_budget: options.ScoredOnSmallBudget = "fewer",
    allocation: options.Allocation = "global",
    restore_from: options.RestoreFrom = "full",
    offset: options.Offset = 0,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    chosen = choose_analyses(what)
    rules = protocols.make_protocol(protocol)
    documents = tasks.make_benchmark(benchmark)
    ratios = sorted(map(str, ratio), key=parse_ratio, reverse=True)
    policy = rules.prefix_policy if prefix_policy == "protocol" else prefix_policy
    conventions = CompressionConfig(
        cast("PrefixPolicy", policy),
        cast("OnSmallBudget", on_small_budget),
        allocation,
        cast("RestoreFrom", restore_from),
        offset,
    )
    name, source = parse_method(evictor)
    method = make_compressor(name)
    if not isinstance(method, Eviction):
        raise RestoreKVError(
            f"{name} is not an evictor, so no pair of the context survives in it; name one."
        )
    if out.exists() and not out.is_dir():
        raise RestoreKVError(f"{out} is a file; give a folder.")
    silence_transformers()
    with notes.status(f"loading {model}"):
        loaded, tokenizer = open_model(model, dtype, device, rules.name)
    eviction = method.with_config(conventions)
    adapter = load_adapter(
        loaded, "auto" if source == SHIPPED else source, eviction, restore_tokens
    )
    if "restore_attention" in chosen and not adapter:
        notes.print(
            "restore_attention is left out: without an adapter there are no restore tokens."
        )
    eviction = replace(eviction, adapter=adapter)
    with show_progress_bar("analyzing documents") as update:
        paths = analyze(
            loaded, tokenizer, eviction, rules, documents, ratios, out, chosen, label, update
        )
    for path in [*paths, write_analyses(out)]:
        print_written(path)


def choose_analyses(what: str) -> list[str]:
    """Return the analyses that `what` names, in the order of ANALYSES."""
    names = [name.strip() for name in what.split(",") if name.strip()]
    unknown = [name for name in names if name not in ANALYSES]
    if unknown or not names:
        problem = f"there is no analysis {unknown[0]!r}" if unknown else "no analysis is named"
        raise RestoreKVError(f"In --what {problem}; give some of {ALL}.")
    return [name for name in ANALYSES if name in names]
