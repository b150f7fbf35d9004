"""Train Fast KVzip's gate for SmolLM2 on passages of many genres. Resumable.

    python -m recipes.smollm2.gate FOLDER --corpus CORPUS [--passages 2000] [--install]

The passages are the corpus' training passages, alternating between all genres, with generated
documents in between; none shares its words with an evaluation text or with another split. The gate
learns KVzip's scores of some of their tokens. At the end, the gate that ships and the new one are
measured on passages that were held out of the training. Two thousand passages take about two hours
of one core.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from recipes.run import make_parser, run_recipe
from recipes.smollm2.build import start_command, wait_for, write_held_out
from restorekv.data.build import index_excluded_texts
from restorekv.data.config import BuildConfig
from restorekv.data.corpus import read_corpus
from restorekv.data.documents import DropRow
from restorekv.data.files import iterate_rows
from restorekv.evictors.fastkvzip import FastKVzip
from restorekv.evictors.gate_file import Gate, read_gate, write_gate
from restorekv.model.gate_kinds import TARGETS
from restorekv.model.load import load_model
from restorekv.model.names import SMOLLM2, shipped_path
from restorekv.train.features import Features, collect_features
from restorekv.train.gate import measure_gate
from restorekv.train.gate_config import GateConfig

GATE = "fastkvzip.safetensors"
MADE = 0.08  # share of generated documents: tables, logs, lists of keys
SHORTEST = 256
LONGEST = 700
QUESTION = "What is this text about?"
CONFIG = GateConfig(kind="fastkvzip", tokens=64, held_out=0.05, steps=5000, batch=1000)


def write_passages(folder: Path, corpus: Path, count: int) -> Path:
    """Write the first `count` passages and generated documents that may be trained on, as JSON
    lines; return the file.
    """
    path = folder / f"passages-{count}.jsonl"
    if path.exists():
        return path
    _, tokenizer = load_model(SMOLLM2)
    config = BuildConfig(
        mixture="corpus",
        passage_shortest=SHORTEST,
        passage_longest=LONGEST,
        made=MADE,
        corpus_passages=count,
        seed=20,
    )
    held_out = write_held_out(folder, corpus)
    evaluations = index_excluded_texts(tokenizer, [str(held_out)], config.overlap)
    lines: list[str] = []
    for item in read_corpus(iterate_rows(str(corpus), {}), config, tokenizer):
        if isinstance(item, DropRow) or evaluations.find_match(item.text):
            continue
        # A gate needs no questions, but lines of data have them.
        questions = [question for _, question in item.asked] or [QUESTION]
        row = {"context": item.text, "questions": questions}
        row |= {"source": item.name, "license": item.license}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        if len(lines) == count:
            break
    path.write_text("".join(lines), "utf-8")
    return path


def train(folder: Path, passages: Path, count: int) -> Path:
    """Train the gate with the command `train-gate`, continuing an earlier run; return its file."""
    path = folder / GATE
    flags = ["--kind", CONFIG.kind, "--data", str(passages), "--out", str(path)]
    flags += ["--count", str(count), "--tokens", str(CONFIG.tokens)]
    flags += ["--held-out", str(CONFIG.held_out)]
    flags += ["--steps", str(CONFIG.steps), "--batch", str(CONFIG.batch)]
    flags += ["--features", str(folder / "features"), "--model", SMOLLM2, "--resume"]
    if not path.exists():
        wait_for(start_command("train-gate", *flags))
    return path


def measure(folder: Path, passages: Path, paths: dict[str, Path]) -> dict[str, dict[str, float]]:
    """Return the figures of several gates on the passages that were held out of the training."""
    model, tokenizer = load_model(SMOLLM2)
    texts = [json.loads(line)["context"] for line in passages.read_text("utf-8").splitlines()]
    features = collect_features(
        model,
        tokenizer,
        texts,
        TARGETS[CONFIG.kind],
        CONFIG.tokens,
        CONFIG.seed,
        folder / "features",
        resume=True,
    )
    held_out: Features = features.split_held_out(CONFIG.held_out)[1]
    figures = {}
    for name, path in paths.items():
        stacked = stack_layers(read_gate(path))
        figures[name] = measure_gate(
            held_out, stacked, FastKVzip.predict, CONFIG, torch.device("cpu")
        )
    return figures


def stack_layers(gate: Gate) -> dict[str, torch.Tensor]:
    """Return a gate's parameters in float32 with a leading layer axis, as training has them."""
    names = gate.layers[0]
    return {name: torch.stack([layer[name].float() for layer in gate.layers]) for name in names}


def install_gate(path: Path) -> None:
    """Copy the gate into the distribution, in bfloat16.

    The card of KVzip's adapter names the gate whose caches it serves, so run other_evictors.py
    again afterwards.
    """
    gate = read_gate(path)
    layers = []
    for layer in gate.layers:
        layers.append({name: value.to(torch.bfloat16) for name, value in layer.items()})
    target = shipped_path(SMOLLM2, "gates", path.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    card = replace(gate.card, model=SMOLLM2)
    write_gate(target, replace(gate, layers=layers, card=card))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--passages", type=int, default=2000)
    parser.add_argument("--install", action="store_true", help="Ship the gate.")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    passages = write_passages(options.folder, options.corpus, options.passages)
    path = train(options.folder, passages, options.passages)
    shipped = shipped_path(SMOLLM2, "gates", GATE)
    figures = measure(options.folder, passages, {"ships": shipped, "new": path})
    print(json.dumps(figures, indent=1))
    if options.install:
        install_gate(path)


if __name__ == "__main__":
    run_recipe(main)
