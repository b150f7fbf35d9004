"""The analyses over the documents of a benchmark, resumable document by document.

OUT/analysis/<what>-<label>.jsonl   the settings, then a line a document, each written when it is done
                        .json    figures of all documents, written last
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.budget import exact_ratio
from restorekv.compression.compressor import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evaluation.analysis import attention_mass, divergence, gaze, survivors
from restorekv.evaluation.analysis.case import Case
from restorekv.evaluation.analysis.pool import Pool
from restorekv.evaluation.protocols import Protocol
from restorekv.evaluation.provenance import facts
from restorekv.evaluation.results import append_line, complete_lines, differences
from restorekv.files import write_json
from restorekv.model.load import model_name
from restorekv.tasks import Benchmark, Sample
from restorekv.tasks.base import digest

FOLDER = "analysis"
ANALYSES: dict[str, ModuleType] = {
    "attention": attention_mass, "divergence": divergence, "survivors": survivors, "gaze": gaze,
}  # fmt: skip
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Journal:
    """One analysis of one run: `path` without its ending, and the settings that its lines were made under."""

    what: str
    label: str
    path: Path
    settings: dict

    @property
    def lines_path(self) -> Path:
        return self.path.parent / f"{self.path.name}.jsonl"

    @property
    def figures_path(self) -> Path:
        return self.path.parent / f"{self.path.name}.json"

    def open(self) -> Journal:
        """Begins the file, or refuses one of other settings."""
        lines = list(complete_lines(self.lines_path))
        if not lines:
            append_line(self.lines_path, {"settings": self.settings})
            return self
        told = differences(lines[0].get("settings", {}), self.settings)
        if told:
            raise RestoreKVError(
                f"{self.lines_path} was made with {told}; give another --out or --label, or remove it."
            )
        return self

    def lines(self) -> dict[str, dict]:
        """By document."""
        return {line["document"]: line for line in list(complete_lines(self.lines_path))[1:]}

    def add(self, sample: Sample, figures: dict) -> None:
        append_line(self.lines_path, {"document": sample.id, "questions": len(sample.questions), "figures": figures})

    def finish(self, samples: Sequence[Sample], ratios: Sequence[str]) -> Path:
        """The figures of all documents, in the order of the benchmark."""
        module, lines = ANALYSES[self.what], self.lines()
        every = [lines[sample.id] for sample in samples]
        questions = [line["questions"] for line in every]
        figures = {key: module.pooled(Pool([line["figures"][key] for line in every], questions)) for key in ratios}
        made = {
            "analysis": self.what, "label": self.label, "conventions": self.settings, "definitions": module.DEFINITIONS,
            "documents": len(every), "questions": sum(questions), "figures": figures,
        }  # fmt: skip
        write_json(self.figures_path, made)
        return self.figures_path


def analyze(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    eviction: Eviction,
    protocol: Protocol,
    benchmark: Benchmark,
    ratios: Sequence[float | str],
    out: Path,
    what: Sequence[str] = tuple(ANALYSES),
    label: str | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Path]:
    """The files written. One preparation of a document serves all analyses and ratios; what is done is not done again.

    Without an adapter there is no restored cache and no "gaze". Raises RestoreKVError where files of other settings
    are in the way.
    """
    what = [each for each in what if each != "gaze" or eviction.adapter]
    label = label or label_of(model_name(model), eviction.evictor.spec)
    samples, name = benchmark.chosen(tokenizer, protocol.name), model_name(model)
    contexts = [protocol.context(name, tokenizer, sample.context)[0] for sample in samples]
    eviction = protocol.adapted(eviction, contexts[0].prefix)
    settings = settings_of(model, eviction, protocol, benchmark, samples, ratios)
    keys = {f"{float(exact_ratio(ratio)):g}": ratio for ratio in ratios}
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    journals = [Journal(each, label, folder / f"{each}-{label}", settings).open() for each in what]
    done = {journal.what: set(journal.lines()) for journal in journals}
    for index, (sample, context) in enumerate(zip(samples, contexts, strict=True)):
        progress(index, len(samples))
        missing = [journal for journal in journals if sample.id not in done[journal.what]]
        if not missing:
            continue
        prepared = eviction.prepare(model, tokenizer, context)
        figures: dict[str, dict] = {journal.what: {} for journal in missing}
        for key, ratio in keys.items():
            case = Case(prepared, tokenizer, protocol, sample, ratio, eviction.adapter, index)
            for each, found in figures.items():
                found[key] = ANALYSES[each].measure(case)
        for journal in missing:
            journal.add(sample, figures[journal.what])
    progress(len(samples), len(samples))
    return [journal.finish(samples, list(keys)) for journal in journals]


def settings_of(
    model: PreTrainedModel,
    eviction: Eviction,
    protocol: Protocol,
    benchmark: Benchmark,
    samples: Sequence[Sample],
    ratios: Sequence[float | str],
) -> dict:
    """Everything that decides the figures."""
    return {
        **facts(model, eviction.conventions),
        "evictor": eviction.evictor.spec,
        "method": eviction.identity(model),
        "adapter": eviction.adapter.identity() if eviction.adapter else None,
        "benchmark": benchmark.spec,
        "data": digest(samples),
        "protocol": protocol.name,
        "ratios": [float(exact_ratio(ratio)) for ratio in ratios],
        "interval": "95 %, bootstrap over documents",
    }


def label_of(*parts: str) -> str:
    """A file's name: "bundled-kvzip"; of a path or a hub id the last part."""
    names = [re.sub(r"[^\w.+=-]+", "-", part.rstrip("/").rsplit("/", 1)[-1]).strip("-") for part in parts]
    return "-".join(names)
