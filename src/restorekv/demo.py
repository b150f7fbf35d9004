"""One held-out document asked three questions, answered side by side from the full cache and four small ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from rich.table import Table
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.bundled.suite import draw, measure
from restorekv.compression import Eviction, load_adapter
from restorekv.generate import ask
from restorekv.tables import name

EVICTORS = ("kvzip", "kvzip+")


def side_by_side(
    model: PreTrainedModel, tokenizer: Tokenizer, adapters: Mapping[str, str | None], ratio: float = 0.05
) -> Table:
    """Columns: the question, what is true, and each cache's answer with the bytes it holds."""
    document = draw("demo 0", "mixed", 1000, 1100, measure(tokenizer))
    asked = list({question.family: question for question in document.questions}.values())[:3]
    questions = [question.text for question in asked]
    columns: dict[str, list[str]] = {"true": [question.target for question in asked]}
    for evictor, source in adapters.items():
        eviction = Eviction.make(evictor)
        eviction = replace(eviction, adapter=load_adapter(model, source, eviction))
        with torch.no_grad():
            prepared = eviction.prepare(model, tokenizer, document.text)
        caches = {"full cache": prepared.at(1, restored=False)} if len(columns) == 1 else {}
        caches |= {name(evictor, restored): prepared.at(ratio, restored=restored) for restored in (False, True)}
        for title, cache in caches.items():
            told = ask(model, tokenizer, prepared.context, cache, questions, 32)
            columns[f"{title}\n{cache.nbytes / 1024:,.0f} KB"] = [answer.strip() for answer in told]
    table = Table(title=f"One document of {prepared.context.tokens} tokens, r = {ratio:g}", show_lines=True)
    table.add_column("question", ratio=2)
    for title in columns:
        table.add_column(title, overflow="fold", ratio=1)
    for row, question in enumerate(questions):
        table.add_row(question, *(answers[row] for answers in columns.values()))
    return table
