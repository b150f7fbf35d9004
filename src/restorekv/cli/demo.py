"""`restorekv demo`: questions about facts to a full cache, a small one and a restored one.

With `--full`, a benchmark is scored instead.
"""

from pathlib import Path
from typing import Annotated

import typer

from restorekv.cli import options
from restorekv.cli.inputs import check_json_output
from restorekv.compression.budget import parse_ratio
from restorekv.errors import RestoreKVError

RATIO = "0.3"


def run(
    model: options.Model = "smollm2",
    ratio: Annotated[
        str | None,
        typer.Option(help=f"Share of the KV pairs that the small caches keep; {RATIO} by default."),
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Score a benchmark instead, which takes minutes.")
    ] = False,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Number of documents for --full; by default 52 for tiny, else 7."),
    ] = None,
    json: Annotated[
        Path | None, options.make_json_option("JSON file for questions, answers and figures.")
    ] = None,
) -> None:
    if count is not None and not full:
        raise RestoreKVError("--count is the number of documents of --full; add --full.")
    if ratio is not None and full:
        raise RestoreKVError("--full scores at its own ratios; leave out --ratio.")
    ratio = RATIO if ratio is None else ratio
    parse_ratio(ratio)
    check_json_output(json)

    # From here on PyTorch is imported.
    if full:
        from restorekv.cli.scored_demo import run_scored_demo

        run_scored_demo(model, count, json)
    else:
        from restorekv.cli.facts_demo import run_facts_demo

        run_facts_demo(model, ratio, json)
