"""The benchmark `vllm-steps`: what documents cost a decode step of vLLM, and what the plugin costs
requests without documents.

Two engines are started: vLLM alone, and vLLM with restorekv. In every round they take turns at
writing the same plain answers, and the second one also answers as many requests about documents.
All figures are ratios of steps of one round, so that other work on the machine affects both sides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks.folder_options import claim_folder
from benchmarks.workload import cut_texts, describe_machine
from restorekv.evaluation.tables import Table
from restorekv.files import write_json
from restorekv.model.load import load_model
from restorekv.pipeline import compress
from restorekv.vllm import prompt, ragged_config

QUESTION = "What happens in the story, and who is named in it?"


@dataclass(frozen=True)
class StepOptions:
    """The options of `vllm-steps`, which the command's --help explains."""

    model: str
    tokens: int
    documents: int
    ratio: str
    evictor: str
    answer: int
    rounds: int


class Side:
    """An engine in its own process (`vllm_steps_side`)."""

    def __init__(self, place: Path, job: dict) -> None:
        place.write_text(json.dumps(job), "utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.vllm_steps_side", str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def ask(self, name: str) -> list:
        """Have the engine measure something; return what it found."""
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        """End the engine."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> list:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("vLLM ended with an error; see above.")
        return json.loads(line)


def run_steps(folder: Path, options: StepOptions, tell: Callable[[str], None]) -> dict:
    """Make the documents that the folder lacks, and measure.

    Args:
        folder: The folder that keeps the model and the cache files.
        options: What is measured.
        tell: Called with what is being done.
    """
    torch.set_num_threads(1)
    prompts = _make_prompts(folder, options, tell)
    job = {
        "model": str(folder / "model"),
        "prompts": prompts,
        "tokens": options.answer,
        "transfer": None,
    }
    tell("starting vLLM twice")
    alone = Side(folder / "alone.json", job)
    plugin = Side(folder / "plugin.json", {**job, "transfer": ragged_config(folder / "store")})
    try:
        rounds = []
        for number in range(options.rounds + 1):
            tell(f"round {number} of {options.rounds}")
            turns = [(alone, "plain"), (plugin, "plain"), (plugin, "documents")]
            # Rotate the order, so that each comes first equally often.
            shift = number % len(turns)
            found = {}
            for side, name in turns[shift:] + turns[:shift]:
                key = "alone" if side is alone else name
                found[key] = median(side.ask(name))
            if number:  # the first round loads the documents
                rounds.append(found)
        tell("measuring attention over pages")
        kernels = plugin.ask("kernels")
    finally:
        alone.close()
        plugin.close()
    return {
        "options": asdict(options),
        "machine": describe_machine(1),
        "rounds": rounds,
        "kernels": kernels,
    }


def _make_prompts(folder: Path, options: StepOptions, tell: Callable[[str], None]) -> dict:
    """Return prompts with documents and without, which ask the same question."""
    options_of_work = {
        "model": options.model,
        "tokens": options.tokens,
        "documents": options.documents,
        "ratio": options.ratio,
        "evictor": options.evictor,
    }
    claim_folder(folder, options_of_work)
    store = folder / "store"
    store.mkdir(parents=True, exist_ok=True)
    place = folder / "prompts.json"
    if place.exists():
        return json.loads(place.read_text("utf-8"))
    model, tokenizer = load_model(options.model)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    documents = []
    for number, text in enumerate(cut_texts(tokenizer, options.tokens, options.documents)):
        path = store / f"{number}.rkv"
        if not path.exists():
            tell(f"compressing document {number + 1} of {options.documents}")
            small = compress(
                model,
                tokenizer,
                text,
                evictor=options.evictor,
                adapter=None,
                ratio=options.ratio,
            )
            small.save(path)
        documents.append(prompt(path, QUESTION, tokenizer))
    plain = []
    for number in range(options.documents):
        # A different first token for each, so that they share no block of the prefix cache.
        ids = tokenizer.encode(QUESTION)
        plain.append([1000 + number, *ids])
    prompts = {"documents": documents, "plain": plain}
    write_json(place, prompts)
    return prompts


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the table of ratios of steps, what was measured, and the table of attention."""
    rounds = result["rounds"]
    options = result["options"]
    lines = []
    for what, one, other in (
        ("plain requests: with the plugin / vLLM alone", "plain", "alone"),
        ("with the plugin: requests with documents / plain ones", "documents", "plain"),
    ):
        ratios = sorted(each[one] / each[other] for each in rounds)
        times = [median(each[name] for each in rounds) * 1e3 for name in (one, other)]
        lines.append(
            [
                what,
                f"{median(ratios):.3f}",
                f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                f"{times[0]:.1f} / {times[1]:.1f} ms",
            ]
        )
    yield Table(
        "vllm-steps", "Decode steps of vLLM", ["ratio of", "median", "rounds", "steps"], lines
    )
    yield (
        f"{options['model']}, {options['documents']} requests in a batch, one document of "
        f"{options['tokens']:,} tokens each at r = {options['ratio']} ({options['evictor']}), "
        f"{len(rounds)} rounds of {options['answer']} tokens, {result['machine']['processor']}."
    )
    kernels = result["kernels"]
    tokens = sorted({row["tokens"] for row in kernels})
    found = {(row["pairs"], row["tokens"]): row for row in kernels}
    lines = []
    for pairs in sorted({row["pairs"] for row in kernels}):
        cells = []
        for count in tokens:
            row = found[pairs, count]
            chosen = "loop" if row["loops"] else "pages"
            cells.append(f"{row['ratio']:.2f} ({chosen})")
        lines.append([f"{pairs:,}", *cells])
    yield Table(
        "vllm-kernels",
        "Attention of one layer over a document: time as pages / head by head (what is chosen)",
        ["pairs of a head", *(f"{count} tokens" for count in tokens)],
        lines,
    )
