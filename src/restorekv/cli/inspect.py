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
    file: Annotated[Path, typer.Argument(help="A cache file made by compress.")],
    plot: Annotated[
        Path | None, options.make_output_option("Draw the same as a picture: .png, .pdf or .svg.")
    ] = None,
    json: Annotated[
        Path | None, options.make_json_option("Write the figures here, for programs.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Whose tokenizer shows the text; one that ships unless given."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="How many tokens of the text to show.")] = 400,
) -> None:
    if plot:
        check_plot_name(plot)
    check_outputs_apart((plot, json), (file, model))
    check_json_output(json)
    check_cache_files([file])

    from restorekv.cli.survivors_view import show_survivors  # which imports PyTorch

    show_survivors(file, plot, json, model, tokens)
