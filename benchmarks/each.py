"""What the benchmarks of this package alone share: one random model in this process, measured once
for every title.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.workload import SHAPE, describe_machine, save_model, save_tokenizer
from restorekv.model.load import load_model

# Model, tokenizer, title, a folder for its files.
Measure = Callable[[PreTrainedModel, Tokenizer, str, Path], dict]


def measure_each(
    titles: Iterable[str],
    measure: Measure,
    progress: Callable[[str], None],
    *,
    kind: str,
    changed: Mapping[str, object],
    seed: int,
    threads: int,
) -> tuple[dict, list[dict]]:
    """Facts of model and machine, and a row {kind: title, ...} each; `changed` is what differs from
    SHAPE.
    """
    if threads:
        torch.set_num_threads(threads)
    titles = list(titles)
    shape = {**SHAPE, **changed}
    rows = []
    with tempfile.TemporaryDirectory(prefix="restorekv-bench-") as name:
        folder = Path(name)
        progress("making the model")
        tokenizer = save_tokenizer(folder)
        parameters = save_model(folder, shape, seed)
        model, _ = load_model(name)
        for title in titles:
            progress(f"{title}, {len(rows) + 1} of {len(titles)}")
            rows.append({kind: title, **measure(model, tokenizer, title, folder)})
    facts = {
        "model": {"parameters": parameters, "dtype": "bfloat16", **shape},
        "machine": describe_machine(torch.get_num_threads()),
    }
    return facts, rows
