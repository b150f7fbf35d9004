"""`restorekv demo`: the main job on the bundled model, with figures."""

import time
from pathlib import Path
from typing import Annotated

import typer

from restorekv.atomic import check_target, write_json
from restorekv.bundled.suite import documents
from restorekv.cli.session import bar, open_model, output
from restorekv.demo import EVICTORS, side_by_side
from restorekv.evaluate import evaluate
from restorekv.tables import held, payload, scores


def run(
    count: Annotated[int, typer.Option(min=1, help="Held-out documents.")] = 52,
    json: Annotated[Path | None, typer.Option(help="Write rows and conventions here.")] = None,
) -> None:
    if json:
        check_target(json)
    begun = time.perf_counter()
    model, tokenizer = open_model("bundled")
    adapters = dict.fromkeys(EVICTORS, "auto")
    with bar("asking held-out documents") as progress:
        result = evaluate(model, tokenizer, documents(tokenizer, count), adapters, progress=progress)
    output.print(scores(result))
    output.print(held(result))
    output.print(side_by_side(model, tokenizer, adapters))
    output.print(f"{time.perf_counter() - begun:.0f} seconds")
    if json:
        write_json(json, payload(result))
