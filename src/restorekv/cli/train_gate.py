"""`restorekv train-gate --kind fastkvzip --data bundled --out gate.safetensors`: learned scorers from an evictor's."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from restorekv.cli import options
from restorekv.cli.session import bar, figures_table, open_model, output
from restorekv.errors import RestoreKVError
from restorekv.evictors.gate_file import KINDS
from restorekv.files import check_target
from restorekv.tiny.suite import LONGEST, SHORTEST
from restorekv.train.data import bundled_examples, read_contexts
from restorekv.train.gate import train_gate
from restorekv.train.gate_fits import GateConfig

DEFAULT = GateConfig()


def run(
    out: Annotated[Path, typer.Option(help="The gate file to write.")],
    kind: Annotated[str, typer.Option(help=f"{', '.join(KINDS)}.")] = DEFAULT.kind,
    data: Annotated[
        list[str], typer.Option(help='bundled, a mixture, or JSON lines {"context", "questions"}; repeatable.')
    ] = ("bundled",),
    count: Annotated[
        int, typer.Option(min=2, help="Contexts of the bundled world; of other data at most, evenly spread.")
    ] = 200,
    shortest: Annotated[int, typer.Option(min=64, help="Fewest tokens of a bundled context.")] = SHORTEST,
    longest: Annotated[int, typer.Option(min=64, help="Most tokens of a bundled context.")] = LONGEST,
    features: Annotated[
        Path | None, typer.Option(help="Folder for attention inputs and scores; kept; OUT.features unless given.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Use the features that are there already.")] = False,
    tokens: Annotated[int, typer.Option(help="Tokens of a context, drawn at random.")] = DEFAULT.tokens,
    held_out: Annotated[float, typer.Option(help="Share of the contexts to check on.")] = DEFAULT.held_out,
    seed: Annotated[int, typer.Option(help="Seed of draws and weights.")] = DEFAULT.seed,
    lr: Annotated[float | None, typer.Option(help="0.2 for fastkvzip, 0.005 for kvzap-mlp.")] = None,
    batch: Annotated[int | None, typer.Option(help="Tokens a step: 1000, for kvzap-mlp 512.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of fastkvzip.")] = DEFAULT.steps,
    rank: Annotated[int, typer.Option(help="Dimensions of fastkvzip's queries and keys.")] = DEFAULT.rank,
    sinks: Annotated[int, typer.Option(help="Sink keys of fastkvzip.")] = DEFAULT.sinks,
    epochs: Annotated[int, typer.Option(help="Epochs of kvzap-mlp.")] = DEFAULT.epochs,
    width: Annotated[int | None, typer.Option(help="Hidden units of kvzap-mlp: d / 8, at least 64.")] = None,
    alpha: Annotated[float, typer.Option(help="Penalty of kvzap-linear.")] = DEFAULT.alpha,
    floor: Annotated[float, typer.Option(help="Lowest score whose logarithm kvzap learns.")] = DEFAULT.floor,
    model: options.Model = "bundled",
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
) -> None:
    config = GateConfig(kind, tokens, held_out, seed, lr, batch, steps, rank, sinks, epochs, width, alpha, floor)
    if shortest > longest:
        raise RestoreKVError(f"--shortest {shortest} is more than --longest {longest}; swap them.")
    check_target(out)
    folder = features or out.with_name(f"{out.name}.features")
    if folder.exists() and not folder.is_dir():
        raise RestoreKVError(f"{folder} is a file; name a folder with --features.")
    named = evenly([text for name in data if name != "bundled" for text in read_contexts(Path(name))], count)
    loaded, tokenizer = open_model(model, dtype, device)
    made = bundled_examples(tokenizer, count, seed, shortest, longest) if "bundled" in data else []
    texts = [*(example.context for example in made), *named]
    try:
        with bar("training a gate", lines=True) as progress:
            gate = train_gate(loaded, tokenizer, texts, config, out, folder, resume, progress)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Interrupted; go on with --resume and the features in {folder}.") from None
    rows = {name.replace("_", " "): f"{value:.4f}" for name, value in gate.card.figures.items()}
    output.print(figures_table(f"Wrote {escape(str(out))}", {"kind": kind, "predicts": gate.card.target, **rows}))


def evenly(texts: list[str], count: int) -> list[str]:
    """`count` of the texts in their order, evenly spread; all of them if there are no more."""
    most = min(count, len(texts))
    return [texts[index * len(texts) // most] for index in range(most)]
