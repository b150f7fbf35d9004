"""`restorekv demo`: the main job on a small real model, or on the tiny one, with figures."""

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from restorekv import tasks
from restorekv.cli import options
from restorekv.cli.session import open_model, output, shares
from restorekv.evaluation.demo import Show, answers_table, document, seconds_table, show_for, side_by_side
from restorekv.evaluation.expand import SHIPPED, Grid
from restorekv.evaluation.report.build import terminal
from restorekv.evaluation.rows import payload
from restorekv.evaluation.run import run as carry_out
from restorekv.files import check_target, write_json
from restorekv.model.load import SMOLLM2, canonical

COMMON = {"prefix_policy": "free"}  # as the shipped adapters were trained


def run(
    model: options.Model = SMOLLM2,
    count: Annotated[int | None, typer.Option(min=1, help="Held-out documents; else the model's own number.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write rows and conventions here.")] = None,
) -> None:
    if json:
        check_target(json)
    begun, model = time.perf_counter(), canonical(model)
    show = show_for(model)
    loaded, tokenizer = open_model(model)
    sample = document(model, tokenizer)
    adapters = dict.fromkeys(show.evictors, "auto")
    tokens, found = side_by_side(loaded, tokenizer, sample, adapters, show.shown)
    output.print(answers_table(sample, tokens, found))
    output.print(seconds_table(found))
    del loaded
    told = figures(model, show, count or show.count)
    output.print(f"{time.perf_counter() - begun:.0f} seconds")
    if json:
        write_json(json, told)


def figures(model: str, show: Show, count: int) -> dict:
    """Prints what the methods keep of the answers to held-out documents; returns rows and conventions."""
    benchmark = replace(tasks.make(show.benchmark), count=count).spec
    methods = [(evictor, SHIPPED) for evictor in show.evictors]
    cells = Grid([model], methods, [benchmark], ratios=show.ratios, common=COMMON).cells()
    with shares("asking held-out documents") as tell, TemporaryDirectory() as folder:
        results = carry_out(
            cells, Path(folder), tell=lambda progress: tell("asking held-out documents", progress.share)
        )
        tables, told = terminal(results), payload(results)
        del told["answers"]
    for table in tables:
        output.print(table)
    return told
