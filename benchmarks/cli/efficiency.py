"""`python -m benchmarks efficiency`: what the restore pass costs on a model, and what a compressed
cache saves.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from benchmarks.efficiency import SCORERS, CostOptions, measure_efficiency
from benchmarks.efficiency_page import write_efficiency_page
from restorekv.cli import options
from restorekv.cli.loading import silence_transformers
from restorekv.cli.terminal import notes, print_written, show_progress_bar
from restorekv.compression.config import CompressionConfig
from restorekv.compression.eviction import make_compressor
from restorekv.errors import RestoreKVError
from restorekv.evaluation import protocols
from restorekv.evaluation.worker import open_model

if TYPE_CHECKING:
    from restorekv.compression.budget import OnSmallBudget, PrefixPolicy

Scorers = Annotated[list[str], typer.Option(help="Evictor that scores; repeatable.")]
# typer wants lists as the defaults of repeatable options
DEFAULT_SCORERS = [*SCORERS]


def run(
    out: Annotated[
        Path, typer.Option(help="Folder of the run; figures and their page go to OUT/efficiency.")
    ],
    page: Annotated[
        bool, typer.Option("--page", help="Only make the page of the stored figures.")
    ] = False,
    model: options.Model = "tiny",
    scorer: Scorers = DEFAULT_SCORERS,
    tokens: Annotated[int, typer.Option(help="Length T of the context, in tokens.")] = 2048,
    ratio: Annotated[
        str, typer.Option(help="Ratio at which eviction is timed, above 0 and at most 1.")
    ] = "0.05",
    repeat: Annotated[
        int, typer.Option(min=1, help="Number of compressions for each measurement.")
    ] = 3,
    latency_context: Annotated[
        str,
        typer.Option(
            help="Cache whose attention is timed: prefill, or random (keys and values, for long "
            "contexts)."
        ),
    ] = "prefill",
    label: Annotated[
        str | None, typer.Option(help="Name of the file; model and device by default.")
    ] = None,
    protocol: Annotated[
        str, typer.Option(help=f"Rules of the measurement: {' or '.join(protocols.PROTOCOLS)}.")
    ] = "kvpress",
    prefix_policy: Annotated[
        str | None, typer.Option(help="Prefix policy: free or counted; by default the protocol's.")
    ] = None,
    on_small_budget: options.ScoredOnSmallBudget = "fewer",
    allocation: options.Allocation = "global",
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    paths = []
    if not page:
        rules = protocols.make_protocol(protocol)
        settings = CostOptions(
            tuple(scorer), tokens, ratio, repeat=repeat, latency_context=latency_context
        )
        conventions = CompressionConfig(
            cast("PrefixPolicy", prefix_policy or rules.prefix_policy),
            cast("OnSmallBudget", on_small_budget),
            allocation,
        )
        for name in scorer:
            if not make_compressor(name).restores:
                raise RestoreKVError(
                    f"{name} is not an evictor, so it has no scores to measure; name one."
                )
        silence_transformers()
        with notes.status(f"loading {model}"):
            loaded, tokenizer = open_model(model, dtype, device, rules.name)
        with show_progress_bar("measuring time and memory") as update:
            paths.append(
                measure_efficiency(loaded, tokenizer, out, settings, conventions, label, update)
            )
    for path in [*paths, write_efficiency_page(out)]:
        print_written(path)
