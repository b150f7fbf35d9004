"""`restorekv demo`: one document and a small benchmark, answered by SmolLM2 or by the tiny bundled model."""

import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from restorekv import tasks
from restorekv.cli import options
from restorekv.cli.session import notes, output, quiet, shares
from restorekv.evaluation.demo import Show, answers_table, document, seconds_table, show_for, side_by_side
from restorekv.evaluation.grid import SHIPPED, Grid
from restorekv.evaluation.report.build import terminal
from restorekv.evaluation.rows import payload
from restorekv.evaluation.run import run as run_grid
from restorekv.evaluation.worker import opened_model
from restorekv.files import write_json
from restorekv.model.load import SMOLLM2, canonical

COMMON = {"prefix_policy": "free"}  # as the shipped adapters were trained


def run(
    model: options.Model = SMOLLM2,
    count: Annotated[int | None, typer.Option(min=1, help="Held-out documents; else the model's own number.")] = None,
    json: Annotated[Path | None, options.target("Write rows and conventions here.")] = None,
) -> None:
    start, model = time.perf_counter(), canonical(model)
    show = show_for(model)
    quiet()
    with notes.status(f"loading {model}"):
        loaded, tokenizer = opened_model(model, "auto", "cpu", "kvpress")  # stays open for the grid's cells
    sample = document(model, tokenizer)
    tokens, answers = side_by_side(loaded, tokenizer, sample, dict.fromkeys(show.evictors, "auto"), show.shown)
    output.print(answers_table(sample, tokens, answers))
    output.print(seconds_table(answers))
    figures = measure(model, show, count or show.count)
    output.print(f"{time.perf_counter() - start:.0f} seconds")
    if json:
        write_json(json, figures)


def measure(model: str, show: Show, count: int) -> dict:
    """Prints what the methods keep of the answers to held-out documents; returns rows and conventions."""
    benchmark, title = replace(tasks.make(show.benchmark), count=count).spec, "asking held-out documents"
    methods = [(evictor, SHIPPED) for evictor in show.evictors]
    cells = Grid([model], methods, [benchmark], ratios=show.ratios, common=COMMON).cells()
    with shares(title) as update, TemporaryDirectory() as folder:
        results = run_grid(cells, Path(folder), on_progress=lambda progress: update(title, progress.share))
        tables, figures = terminal(results), payload(results)
        del figures["answers"]
    for table in tables:
        output.print(table)
    return figures
