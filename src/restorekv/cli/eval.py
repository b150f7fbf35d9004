"""`restorekv eval`: the bundled suite over evictors and ratios, with and without restoring."""

from pathlib import Path
from typing import Annotated

import typer

from restorekv.atomic import check_target, write_json
from restorekv.budget import exact_ratio
from restorekv.bundled.suite import documents
from restorekv.cli import options
from restorekv.cli.session import bar, open_model, output
from restorekv.compression import method
from restorekv.errors import RestoreKVError
from restorekv.evaluate import RATIOS, evaluate
from restorekv.prepared import Conventions
from restorekv.tables import held, payload, scores

DEFAULT_RATIOS = tuple(map(str, RATIOS))


def run(
    evictor: Annotated[
        list[str],
        typer.Option(
            help="SPEC or SPEC@ADAPTER (a folder, a hub id, published, auto, none); repeatable. " + options.EVICTOR_HELP
        ),
    ] = ("kvzip", "kvzip+"),
    ratio: Annotated[list[str], typer.Option(help="A ratio in (0, 1]; repeatable.")] = DEFAULT_RATIOS,
    count: Annotated[int, typer.Option(min=1, help="Held-out documents.")] = 52,
    seed: Annotated[int, typer.Option(help="Which held-out documents.")] = 0,
    split: Annotated[str, typer.Option(help="test, or another name for other documents.")] = "test",
    restore_tokens: options.RestoreTokens = None,
    model: options.Model = "bundled",
    prefix_policy: options.PrefixPolicy = "free",
    on_tight: options.OnTight = "error",
    allocation: options.Allocation = "global",
    restore_from: options.RestoreFrom = "full",
    offset: options.Offset = 0,
    device: options.Device = "cpu",
    dtype: options.Dtype = "auto",
    json: Annotated[Path | None, typer.Option(help="Write rows, conventions and every answer here.")] = None,
) -> None:
    if split.startswith("restore"):
        raise RestoreKVError(f"The split {split!r} is for training; evaluate on another one.")
    ratios = [float(exact_ratio(value)) for value in ratio]
    adapters = dict(adapter_of(value) for value in evictor)
    if len(adapters) < len(evictor):
        raise RestoreKVError("An evictor can be asked for with one adapter at a time; run eval once for each.")
    conventions = Conventions.make(prefix_policy, on_tight, allocation, restore_from, offset)
    for name in adapters:
        method(name, conventions)
    if json:
        check_target(json)
    loaded, tokenizer = open_model(model, dtype, device)
    made = documents(tokenizer, count, split, seed)
    with bar("asking held-out documents") as progress:
        result = evaluate(loaded, tokenizer, made, adapters, ratios, conventions, progress, restore_tokens)
    output.print(scores(result))
    output.print(held(result))
    if json:
        write_json(json, payload(result))


def adapter_of(value: str) -> tuple[str, str | None]:
    """`kvzip` -> its shipped adapter; `kvzip@FOLDER`; `kvzip@none` -> the base alone."""
    name, found, source = value.partition("@")
    if found and not source:
        raise RestoreKVError(
            f"{value!r} names no adapter; give a folder, a hub id, published, auto or none behind the @."
        )
    return name, None if source == "none" else source or "auto"
