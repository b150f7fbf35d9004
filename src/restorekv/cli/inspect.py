"""`restorekv inspect doc.rkv`: what a cache file holds, and which tokens survived."""

from pathlib import Path
from typing import Annotated

import typer

from restorekv.cli import options
from restorekv.cli.inputs import (
    check_cache_files,
    check_json_output,
    check_outputs_apart,
    check_plot_name,
)


def run(
    file: Annotated[Path, typer.Argument(help="Cache file made by compress.")],
    plot: Annotated[
        Path | None, options.make_output_option("Also draw it, into a .png, .pdf or .svg file.")
    ] = None,
    json: Annotated[Path | None, options.make_json_option("JSON file for the figures.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model whose tokenizer shows the text; not needed for smollm2, gemma3-270m and "
            "tiny."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Number of tokens of the text to show.")] = 400,
) -> None:
    if plot:
        check_plot_name(plot)
    check_outputs_apart((plot, json), (file, model))
    check_json_output(json)
    check_cache_files([file])

    from restorekv.cli.survivors_view import show_survivors  # which imports PyTorch

    show_survivors(file, plot, json, model, tokens)
