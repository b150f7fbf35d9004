"""`restorekv train-gate` and `convert-gate`: learned scorers for the evictors fastkvzip and kvzap.

GateConfig's fields are options of `train-gate`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from restorekv.cli import options
from restorekv.cli.errors import explain_interrupt
from restorekv.cli.inputs import check_output_kind, check_outputs_apart
from restorekv.cli.terminal import print_figures, show_progress_bar
from restorekv.cli.train import LongestTinyText, ShortestTinyText, check_data, choose_lengths
from restorekv.errors import GateError, RestoreKVError
from restorekv.model.gate_kinds import FAST_KVZIP
from restorekv.train.gate_config import GateConfig


@options.add_options_of(GateConfig)
def train(
    out: Annotated[Path, options.make_output_option("Gate file to write.")],
    data: Annotated[
        list[str],
        typer.Option(
            help="Training texts: tiny (the tiny model's world), a folder of `restorekv data "
            'build`, or JSON lines with "context" and "questions"; repeatable.'
        ),
    ],
    count: Annotated[
        int,
        typer.Option(
            min=2,
            help="Number of texts of the tiny world; of other data the maximum, evenly spaced.",
        ),
    ] = 200,
    shortest: ShortestTinyText = None,
    longest: LongestTinyText = None,
    features: Annotated[
        Path | None,
        options.make_folder_option(
            "Folder for attention inputs and scores, which --resume uses; OUT.features by default."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Use what the folder of --features has already.")
    ] = False,
    model: options.Model = options.DEFAULT_MODEL,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    **settings: Any,
) -> None:
    config = GateConfig(**settings)
    check_outputs_apart([out], (*data, model))
    check_output_kind(out, "restorekv-gate")
    shortest, longest = choose_lengths(data, shortest, longest)
    folder = features or out.with_name(f"{out.name}.features")
    if folder.exists() and not folder.is_dir():
        raise RestoreKVError(f"{folder} is a file; name a folder with --features.")
    check_data(data)

    # From here on PyTorch is imported.
    from restorekv.cli.loading import open_model
    from restorekv.tasks.reading import choose_spread
    from restorekv.train.examples import make_tiny_examples, read_contexts
    from restorekv.train.gate import train_gate

    read = choose_spread(read_contexts([Path(name) for name in data if name != "tiny"]), count)
    loaded, tokenizer = open_model(model, dtype, device)
    made = (
        make_tiny_examples(tokenizer, count, config.seed, shortest, longest)
        if "tiny" in data
        else []
    )
    texts = [*(example.context for example in made), *read]
    with (
        explain_interrupt(f"continue with --resume and the features in {folder}"),
        show_progress_bar("training a gate") as progress,
    ):
        gate = train_gate(loaded, tokenizer, texts, config, out, folder, resume, progress)
    rows = {name.replace("_", " "): f"{value:.4f}" for name, value in gate.card.figures.items()}
    print_figures(f"Wrote {out}", {"kind": config.kind, "predicts": gate.card.target, **rows})


def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A .pt file of Fast KVzip, a folder or hub id of KVzap, or the hub id "
            f"{FAST_KVZIP}."
        ),
    ],
    out: Annotated[Path, options.make_output_option("Gate file to write.", "--output", "-o")],
    model: options.Model = options.DEFAULT_MODEL,
    dtype: options.Dtype = "auto",
) -> None:
    check_outputs_apart([out], (source, model))
    check_output_kind(out, "restorekv-gate")
    check_published_gate(source)

    # From here on PyTorch is imported.
    from restorekv.cli.loading import open_model
    from restorekv.evictors import gate_file
    from restorekv.evictors.published_gate import convert_gate

    loaded, _ = open_model(model, dtype)
    gate = convert_gate(source, loaded)
    gate_file.write_gate(out, gate)
    rows = {"kind": gate.card.kind, "predicts": gate.card.target, "model": gate.card.model}
    print_figures(f"Wrote {out}", rows)


def check_published_gate(source: str) -> None:
    """Refuse a source that can only be a path if nothing is there."""
    path = Path(source)
    # A hub id has one slash and never begins with a dot or a slash.
    is_only_path = path.suffix in (".pt", ".safetensors") or source[:1] in ("/", ".", "~")
    if is_only_path and not path.exists():
        raise GateError(f"There is no gate file {source}; check the path.")
