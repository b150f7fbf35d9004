"""Runs the analyses over the documents of a benchmark; an interrupted run resumes after the last
document that was done.

OUT/analysis/<what>-<label>.jsonl   the settings, then a line for every document once it is done
                        .json    figures of all documents, written last
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.workload import make_label
from paper.analysis import attention_mass, divergence, restore_attention, survivors
from paper.analysis.case import Case, DocumentFigures
from restorekv.compression.budget import parse_ratio
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.compression.progress import OnStep
from restorekv.errors import RestoreKVError
from restorekv.evaluation.protocols import AskingProtocol
from restorekv.evaluation.results import describe_changes, identify_setup
from restorekv.files import append_line, load_lines, write_json
from restorekv.model.identity import identify_model
from restorekv.model.names import get_model_name
from restorekv.tasks import Benchmark, Sample
from restorekv.tasks.base import digest_samples

FOLDER = "analysis"
ANALYSES: dict[str, ModuleType] = {
    "attention": attention_mass,
    "divergence": divergence,
    "survivors": survivors,
    "restore_attention": restore_attention,
}


@dataclass(frozen=True)
class Journal:
    """The file `path` with the lines of one analysis, and the settings that they were made with."""

    what: str
    label: str
    path: Path
    settings: dict

    @classmethod
    def open(cls, what: str, label: str, folder: Path, settings: dict) -> Self:
        """Begin a journal, or continue one of the same settings; refuse one of other settings."""
        path = folder / f"{what}-{label}.jsonl"
        lines = list(load_lines(path))
        if not lines:
            append_line(path, {"settings": settings})
        elif changes := describe_changes(lines[0].get("settings", {}), settings):
            raise RestoreKVError(
                f"{path} was made with {changes}; give another --out or --label, or remove it."
            )
        return cls(what, label, path, settings)

    def lines(self) -> dict[str, dict]:
        return {line["document"]: line for line in list(load_lines(self.path))[1:]}

    def add(self, sample: Sample, figures: dict) -> None:
        append_line(
            self.path,
            {"document": sample.id, "questions": len(sample.questions), "figures": figures},
        )

    def finish(self, samples: Sequence[Sample], ratios: Sequence[str]) -> Path:
        """Pool the figures of all documents, in the order of the benchmark, and write them to a
        file; return its path.
        """
        module = ANALYSES[self.what]
        by_document = self.lines()
        lines = [by_document[sample.id] for sample in samples]
        questions = [line["questions"] for line in lines]
        figures = {
            ratio: module.pool_figures(
                DocumentFigures([line["figures"][ratio] for line in lines], questions)
            )
            for ratio in ratios
        }
        path = self.path.with_suffix(".json")
        write_json(
            path,
            {
                "analysis": self.what,
                "label": self.label,
                "conventions": self.settings,
                "definitions": module.DEFINITIONS,
                "documents": len(lines),
                "questions": sum(questions),
                "figures": figures,
            },
            follow=False,
        )
        return path


def analyze(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    eviction: Eviction,
    protocol: AskingProtocol,
    benchmark: Benchmark,
    ratios: Sequence[float | str],
    out: Path,
    what: Sequence[str] = tuple(ANALYSES),
    label: str | None = None,
    progress: OnStep = lambda done, total, what: None,
) -> list[Path]:
    """Run the analyses that `what` names, and return the files written.

    Each document is prepared once for all analyses and ratios, and not again if it is done already.
    Without an adapter there is neither a restored cache nor "restore_attention". Raises
    RestoreKVError if the folder has files of the same name and other settings.
    """
    what = [each for each in what if each != "restore_attention" or eviction.adapter]
    name = get_model_name(model)
    label = label or make_label(name, eviction.evictor.spec)
    samples = benchmark.choose_samples(tokenizer, protocol.name)
    contexts = [protocol.make_context(name, tokenizer, sample.context)[0] for sample in samples]
    eviction = protocol.adapt_method(eviction, contexts[0].prefix_length)
    settings = _describe_settings(eviction, model, protocol, benchmark, samples) | {
        "ratios": [float(parse_ratio(ratio)) for ratio in ratios],
        "interval": "95 %, bootstrap over documents",
    }
    keys = {f"{float(parse_ratio(ratio)):g}": ratio for ratio in ratios}
    (out / FOLDER).mkdir(parents=True, exist_ok=True)
    journals = [Journal.open(each, label, out / FOLDER, settings) for each in what]
    done = {journal.what: set(journal.lines()) for journal in journals}
    for index, (sample, context) in enumerate(zip(samples, contexts, strict=True)):
        progress(index, len(samples), "documents")
        missing = [journal for journal in journals if sample.id not in done[journal.what]]
        if not missing:
            continue
        prepared = eviction.prepare(model, tokenizer, context)
        assert isinstance(prepared, ScoredContext), "an analysis does not stream"
        figures: dict[str, dict] = {journal.what: {} for journal in missing}
        for key, ratio in keys.items():
            case = Case(prepared, tokenizer, protocol, sample, ratio, eviction.adapter, index)
            for each, by_ratio in figures.items():
                by_ratio[key] = ANALYSES[each].measure(case)
        for journal in missing:
            journal.add(sample, figures[journal.what])
    progress(len(samples), len(samples), "documents")
    return [journal.finish(samples, list(keys)) for journal in journals]


def _describe_settings(
    eviction: Eviction,
    model: PreTrainedModel,
    protocol: AskingProtocol,
    benchmark: Benchmark,
    samples: Sequence[Sample],
) -> dict:
    return {
        **identify_setup(model, identify_model(model), eviction.config),
        "evictor": eviction.evictor.spec,
        "method": eviction.identity(model),
        "adapter": eviction.adapter.identity() if eviction.adapter else None,
        "benchmark": benchmark.spec,
        "data": digest_samples(samples),
        "protocol": protocol.name,
    }
