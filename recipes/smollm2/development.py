"""Compare adapters by how far their caches are from the full cache, on development passages.

    python -m recipes.smollm2.development FOLDER --corpus CORPUS --adapter NAME=PLACE [...]
        [--evictor kvzip kvzip+] [--dtype bfloat16]

The passages and their questions are those of search.py: one of every genre, and generated
documents. No published figure uses them, so they may be used to choose between trainings. PLACE is
an adapter's folder or the name of one that ships, such as smollm2:kvzip. The script prints a table
for each evictor: the mean KL from the full cache, in nats, at every ratio, alone and with each
adapter, and what each adapter gains over the first one. FOLDER keeps the full cache's answers and
what was measured; an interrupted run continues where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from recipes.run import make_parser, run_recipe
from recipes.smollm2.search import (
    RATIOS,
    Bench,
    Case,
    answer_document,
    draw_development_documents,
    format_mean,
)
from restorekv.compression.eviction import Eviction
from restorekv.compression.full_cache import ScoredContext
from restorekv.evaluation.fidelity import FullAnswers
from restorekv.model.prompt import encode_question, make_context
from restorekv.restore.adapter import RestoreAdapter

ALONE = "alone"
SEPARATOR = "="


def write_development_cases(bench: Bench, corpus: Path) -> None:
    """Draw the passages and write them with the full cache's answers, unless they are there."""
    path = bench.folder / "development.jsonl"
    if path.exists():
        return
    lines = []
    for document in draw_development_documents(corpus, bench):
        lines.append(json.dumps(answer_document(bench, document)) + "\n")
    path.write_text("".join(lines), "utf-8")


@torch.no_grad()
def measure_case(
    bench: Bench, case: Case, evictor: str, adapters: Mapping[str, RestoreAdapter | None]
) -> dict[str, dict[str, float]]:
    """Return the mean divergence over all answers' tokens, by adapter and ratio.

    Args:
        bench: The model and its tokenizer.
        case: A passage with its questions and the full cache's answers.
        evictor: The evictor's spec.
        adapters: The adapters by name; None is the evictor alone.
    """
    context = make_context(bench.tokenizer, case.text)
    eviction = Eviction.make(evictor, on_small_budget="fewer")
    prepared = eviction.prepare(bench.model, bench.tokenizer, context)
    assert isinstance(prepared, ScoredContext), "the recipe does not stream"
    prompts = [
        encode_question(bench.tokenizer, context, question, empty=True)
        for question in case.questions
    ]
    answers = [torch.tensor(ids) for ids in case.answer_ids]
    # At r = 1 every pair is kept.
    full = FullAnswers.from_answers(bench.model, prepared.evict(1), prompts, answers)
    lengths = [len(answer) for answer in answers]
    divergences = {}
    for name, adapter in adapters.items():
        restored = prepared if adapter is None else prepared.with_restore_cache(adapter)
        divergences[name] = {}
        for ratio in RATIOS:
            by_answer = full.measure_divergences(bench.model, restored.evict(f"{ratio:g}"))
            divergences[name][f"{ratio:g}"] = float(np.average(by_answer, weights=lengths))
    return divergences


def measure_adapters(
    bench: Bench, evictors: Sequence[str], adapters: Mapping[str, RestoreAdapter | None]
) -> list[dict]:
    """Measure what is missing in the folder; return the lines of these evictors and adapters."""
    path = bench.folder / "divergences.jsonl"
    done = {}
    if path.exists():
        for text in path.read_text("utf-8").splitlines():
            line = json.loads(text)
            done[line["case"], line["evictor"], line["weights"]] = line["kl"]
    weights = {}
    for name, adapter in adapters.items():
        weights[name] = "" if adapter is None else adapter.to_stored().weights_hash()
    cases = bench.load_cases("development")
    lines = []
    for number, case in enumerate(cases, 1):
        for evictor in evictors:
            missing = {
                name: adapter
                for name, adapter in adapters.items()
                if (case.name, evictor, weights[name]) not in done
            }
            if missing:
                measured = measure_case(bench, case, evictor, missing)
                with path.open("a", encoding="utf-8") as file:
                    for name, kl in measured.items():
                        done[case.name, evictor, weights[name]] = kl
                        line = {"case": case.name, "evictor": evictor, "weights": weights[name]}
                        file.write(json.dumps(line | {"kl": kl}) + "\n")
                print(f"{number}/{len(cases)} {evictor}: {case.name}", flush=True)
            for name in adapters:
                kl = done[case.name, evictor, weights[name]]
                lines.append({"adapter": name, "evictor": evictor, "kl": kl})
    return lines


def make_table(lines: Sequence[Mapping], evictor: str, names: Sequence[str]) -> str:
    """Return one evictor's Markdown table; gains are paired, with 95 % intervals over passages."""
    divergences = {}
    for name in names:
        rows = [line for line in lines if line["evictor"] == evictor and line["adapter"] == name]
        divergences[name] = {
            ratio: np.array([row["kl"][f"{ratio:g}"] for row in rows]) for ratio in RATIOS
        }
    first = names[1]
    header = " | ".join(f"KL at {ratio:g} | gain" for ratio in RATIOS)
    table = [f"| {evictor} | {header} |", "|" + "---|" * (1 + 2 * len(RATIOS))]
    for name in names:
        cells = [name]
        for ratio in RATIOS:
            gains = divergences[first][ratio] - divergences[name][ratio]
            cells.append(f"{divergences[name][ratio].mean():.4f}")
            cells.append("" if name == first else format_mean(gains))
        table.append("| " + " | ".join(cells) + " |")
    return "\n".join(table)


def main(args: Sequence[str] | None = None) -> None:
    """Measure what is missing, then print the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="One folder for each dtype.")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--adapter", nargs="+", required=True, metavar="NAME=PLACE")
    parser.add_argument("--evictor", nargs="+", default=["kvzip"])
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(args)
    options.folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.folder, options.dtype)
    adapters: dict[str, RestoreAdapter | None] = {ALONE: None}
    for text in options.adapter:
        name, separator, place = text.partition(SEPARATOR)
        if not separator or name in adapters:
            parser.error(f"--adapter takes NAME=PLACE, each name once and not {ALONE}, not {text}")
        adapters[name] = RestoreAdapter.from_pretrained(bench.model, place)
    write_development_cases(bench, options.corpus)
    lines = measure_adapters(bench, options.evictor, adapters)
    for evictor in options.evictor:
        print("\n" + make_table(lines, evictor, list(adapters)))


if __name__ == "__main__":
    run_recipe(main)
