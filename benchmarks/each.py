"""What benchmarks without a competitor share: one random model in this process, measured once for
each method or variant.
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
    """Measure one random model once for every title.

    Args:
        titles: What is measured, such as the names of methods.
        measure: Measures one of them and returns its figures.
        progress: Called with what is measured next.
        kind: The key under which a row has its title, such as "method".
        changed: Fields of the model's config that differ from SHAPE.
        seed: The seed of the weights.
        threads: The number of CPU threads; 0 leaves it to PyTorch.

    Returns:
        Facts of the model and the machine, and a row {kind: title, ...} for every title.
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
