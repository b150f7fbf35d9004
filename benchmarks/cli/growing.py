"""`python -m benchmarks growing`: texts that are appended or composed, compared with the same texts
compressed at once.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from benchmarks.cli.session import print_all, run_benchmark
from benchmarks.growing import Options, make_tables
from benchmarks.growing import run_growing as measure
from restorekv.cli import options as flags
from restorekv.compression.growing import RESTORE_CHOICES
from restorekv.files import check_target

if TYPE_CHECKING:
    from restorekv.compression.growing import RestoreParts

# typer wants lists as the defaults of repeatable options
RESTORE: list[str] = [*RESTORE_CHOICES]


def run(
    model: flags.Model = "smollm2",
    asked: Annotated[
        str, typer.Option("--benchmark", help="Benchmark whose texts and questions are used.")
    ] = "fairytaleqa:length=1024,questions=4,count=8",
    evictor: Annotated[str, typer.Option(help=flags.EVICTOR_HELP)] = "kvzip",
    ratio: Annotated[str, typer.Option(help="Share of the KV pairs to keep.")] = "0.1",
    parts: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Number of parts that a text is read in; repeatable. By default 2, 4, 8 and 16, "
            "and none with --together.",
        ),
    ] = None,
    restore: Annotated[
        list[str],
        typer.Option(help=f"Restore tokens of earlier parts: {', '.join(RESTORE)}; repeatable."),
    ] = RESTORE,
    together: Annotated[
        int, typer.Option(min=0, help="Number of texts to compose; not with --parts.")
    ] = 0,
    turns: Annotated[
        int,
        typer.Option(
            min=0, help="Also hold a conversation about a novel of this many tokens; 0 does not."
        ),
    ] = 0,
    json: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    if json:
        check_target(json)
    default_parts = () if together else (2, 4, 8, 16)
    options = Options(
        model,
        asked,
        evictor,
        ratio,
        tuple(parts) if parts else default_parts,
        tuple(cast("RestoreParts", each) for each in restore),
        together,
        turns,
    )
    run_benchmark(
        lambda tell: measure(options, tell), lambda result: print_all(make_tables(result)), json
    )
