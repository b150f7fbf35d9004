"""Whole documents (vLLM's own prefix cache) beside compressed ones (our connector), in the same KV
space.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.workload import SHAPE, cut_texts, describe_machine, save_model, save_tokenizer
from restorekv.compression.config import CompressionConfig
from restorekv.evaluation.tables import Table
from restorekv.model.load import load_model
from restorekv.model.prompt import encode_question, make_context
from restorekv.pipeline import compress
from restorekv.vllm import transfer_config

RANDOM = "qwen3-0.6b-random"  # random weights in its shape, which cost what the model's own would
# tokens of a block; positions for a question and its answer
BLOCK = 32
SPARE = 64
QUESTIONS = tuple(f"What happens in part {number} of the story?" for number in range(34))


@dataclass(frozen=True)
class Options:
    """See the command's flags."""

    model: str
    tokens: int
    documents: int
    fitting: int
    ratios: tuple[str, ...]
    together: tuple[int, ...]
    answer: int


def run_vllm(options: Options, tell: Callable[[str], None]) -> dict:
    """Make the documents, then measures one side after the other, each in a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="restorekv-vllm-") as name:
        folder = Path(name)
        facts = save_side_model(folder / "model", options.model)
        model, tokenizer = load_model(str(folder / "model"))
        documents = cut_texts(tokenizer, options.tokens, options.documents)
        rows = []
        for side, (prompts, transfer, columns) in iterate_sides(
            model, tokenizer, documents, folder, options, tell
        ):
            tell(f"asking vLLM, {side}")
            rows.append(
                {
                    "side": side,
                    "positions": columns,
                    **_ask_side(folder, options, prompts, transfer, model.dtype),
                }
            )
    return {"options": asdict(options), "machine": describe_machine(1), "rows": rows, **facts}


def save_side_model(folder: Path, name: str) -> dict:
    """Save the model and its tokenizer; of random weights, return what `model` of the result
    says.
    """
    if name != RANDOM:
        for part in load_model(name):
            part.save_pretrained(folder)
        return {}
    save_tokenizer(folder)
    facts = {"num_hidden_layers": SHAPE["num_hidden_layers"], "dtype": "bfloat16"}
    return {"model": {"parameters": save_model(folder, SHAPE, seed=0), **facts}}


def iterate_sides(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    documents: list[str],
    folder: Path,
    options: Options,
    tell: Callable[[str], None],
) -> Iterator[tuple[str, tuple[list, dict | None, int]]]:
    """Yield every side with its prompts by document and question, its connector and the positions
    of a document.
    """
    whole = []
    for text in documents:
        context = make_context(tokenizer, text)
        ids = context.ids[0].tolist()
        whole.append(
            [ids + encode_question(tokenizer, context, each)[0].tolist() for each in QUESTIONS]
        )
    yield "whole", (whole, None, options.tokens)
    for ratio in options.ratios:
        store = folder / f"store-{ratio}"
        store.mkdir()
        prompts = []
        columns = 0
        for number, text in enumerate(documents):
            tell(f"compressing document {number + 1} of {options.documents} at r = {ratio}")
            small = compress(
                model,
                tokenizer,
                text,
                evictor="snapkv",
                adapter=None,
                ratio=ratio,
                config=CompressionConfig(allocation="per-head"),
            )
            portable = small.portable()
            portable.save(store / f"{number}.safetensors")
            prompts.append(
                [portable.inputs(tokenizer, each)["input_ids"][0].tolist() for each in QUESTIONS]
            )
            columns = portable.tokens
        yield f"r = {ratio}", (prompts, transfer_config(store), columns)


def _ask_side(
    folder: Path, options: Options, prompts: list, transfer: dict | None, dtype: torch.dtype
) -> dict:
    """Run one side in a process of its own."""
    job = {
        "model": str(folder / "model"),
        "dtype": str(dtype).removeprefix("torch."),
        "transfer": transfer,
        "prompts": prompts,
        "warmup": list(range(100, 130)),
        "block": BLOCK,
        "longest": options.tokens + 4 * SPARE,
        "tokens": options.answer,
        "blocks": options.fitting * (options.tokens + 2 * SPARE) // BLOCK,
        "together": options.together,
        "alone": min(4, options.documents),
        "loads": {"fit": options.fitting, "do not fit": options.documents},
    }
    place = folder / "job.json"
    place.write_text(json.dumps(job))
    subprocess.run([sys.executable, "-m", "benchmarks.vllm_side", str(place)], check=True)
    return json.loads(place.with_suffix(".out.json").read_text())


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the table and the machine."""
    options = result["options"]
    rows = result["rows"]
    space = options["fitting"] * options["tokens"]
    head = ["documents", "positions each", "resident", "first token, cold", "warm"]
    names = list(rows[0]["throughput"])
    lines = []
    for row in rows:
        sizes = [row["positions"], space // row["positions"]]
        times = [median(row["cold"]), median(row["warm"])]
        rates = [row["throughput"][name] for name in names]
        texts = [f"{each:,}" for each in sizes]
        texts += [f"{each:.2f} s" for each in times]
        texts += [f"{each:.1f}" for each in rates]
        lines.append([row["side"], *texts])
    yield Table(
        "vllm",
        "Whole and compressed documents in one KV space",
        [*head, *(f"tokens/s, {x}" for x in names)],
        lines,
    )
    processor = result["machine"]["processor"]
    yield f"{options['model']}, documents of {options['tokens']:,} tokens, {processor}."
