"""`restorekv demo`: the bundled model on held-out documents, and one document asked three questions side by side."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from restorekv.bundled.suite import documents, draw, measure
from restorekv.compression import Eviction, load_adapter
from restorekv.evaluate import RATIOS, Evaluation, evaluate
from restorekv.generate import ask
from restorekv.models import load_model
from restorekv.tables import held, name, scores, write_json

EVICTORS = ("kvzip", "kvzip+")


def run(console: Console, count: int = 52, ratio: float = 0.05, json_path: Path | None = None) -> Evaluation:
    """Evaluate full, KVzip, RestoreKV, KVzip+ and RestoreKV+ on `count` documents, then show one at `ratio`."""
    begun = time.perf_counter()
    model, tokenizer = load_model("bundled")
    adapters = dict.fromkeys(EVICTORS, "auto")
    made = documents(tokenizer, count)
    with Progress(
        TextColumn("asking held-out documents"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as bar:
        task = bar.add_task("documents", total=None)
        result = evaluate(
            model,
            tokenizer,
            made,
            adapters,
            RATIOS,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(scores(result))
    console.print(held(result))
    console.print(side_by_side(model, tokenizer, adapters, ratio))
    console.print(f"took {time.perf_counter() - begun:.0f} seconds")
    if json_path:
        write_json(json_path, result)
    return result


def side_by_side(model, tokenizer, adapters: dict, ratio: float) -> Table:
    """Three questions of different families about one held-out document, answered from five caches."""
    document = draw("demo 0", "mixed", 1000, 1100, measure(tokenizer))
    asked = list({question.family: question for question in document.questions}.values())[:3]
    columns: dict[str, list[str]] = {"reference": [question.target for question in asked]}
    for evictor, source in adapters.items():
        adapter = load_adapter(model, source, evictor)
        with torch.no_grad():
            prepared = Eviction.make(evictor, adapter).prepare(model, tokenizer, document.text)
        caches = {"full cache": prepared.at(1, restored=False)} if len(columns) == 1 else {}
        caches |= {name(evictor, restored): prepared.at(ratio, restored=restored) for restored in (False, True)}
        for title, cache in caches.items():
            told = ask(model, tokenizer, prepared.context, cache, [question.text for question in asked], 32)
            columns[f"{title}\n{cache.nbytes:,} bytes"] = [answer.strip() for answer in told]
    table = Table(
        title=f"One document of {prepared.context.tokens} tokens, three questions, r = {ratio:g}", show_lines=True
    )
    table.add_column("question")
    for title in columns:
        table.add_column(title)
    for row, question in enumerate(asked):
        table.add_row(question.text, *(answers[row] for answers in columns.values()))
    return table
