"""The benchmark `vllm`: whole documents in vLLM's own prefix cache, compared with compressed ones
in our ragged backend, in the same memory.

The memory is what `fitting` whole documents take, with room for questions about them. For whole
documents, vLLM's KV space gets all of it. For compressed ones, vLLM's KV space gets what the pool
of documents leaves.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.folder_options import claim_folder
from benchmarks.workload import SHAPE, cut_texts, describe_machine, save_model, save_tokenizer
from restorekv.errors import RestoreKVError
from restorekv.evaluation.tables import Table
from restorekv.model.load import load_model
from restorekv.model.prompt import encode_question, make_context
from restorekv.model.shape import CacheShape
from restorekv.pipeline import compress
from restorekv.storage.cache_file import open_cache_file
from restorekv.vllm import prompt, ragged_config
from restorekv.vllm.page_pool import count_pages
from restorekv.vllm.ragged_documents import identify

RANDOM = "qwen3-0.6b-random"  # random weights in Qwen3-0.6B's shape, which cost what its own would
BLOCK = 32  # tokens of a block of vLLM's KV space, and pairs of a page of documents on a CPU
SPARE = 64  # positions for a question and its answer
# Blocks that the pool leaves for questions and answers; a request takes up to two.
LEAST_BLOCKS = 16
QUESTIONS = tuple(f"What happens in part {number} of the story?" for number in range(34))


@dataclass(frozen=True)
class Options:
    """The options of `vllm`, which the command's --help explains."""

    model: str
    tokens: int
    documents: int
    fitting: int
    ratios: tuple[str, ...]
    together: tuple[int, ...]
    answer: int

    def __post_init__(self) -> None:
        if self.fitting > self.documents:
            raise RestoreKVError(
                f"fitting is at most the number of documents, {self.documents}, not {self.fitting}."
            )
        # Of a document's questions, two are asked alone and one is asked before each load.
        most = (len(QUESTIONS) - 3) * self.fitting
        for count in self.together:
            if not 1 <= count <= most:
                raise RestoreKVError(
                    f"With {self.fitting} fitting documents the questions together are at least 1 "
                    f"and at most {most}, not {count}."
                )


@dataclass(frozen=True)
class Side:
    """What one engine is given.

    Args:
        name: The side's name in the tables.
        prompts: Ids by document and question.
        transfer: The connector's config, or None for vLLM alone.
        blocks: The number of blocks of vLLM's KV space.
        document_bytes: The mean size of a document.
        resident: How many documents fit.
    """

    name: str
    prompts: list[list[list[int]]]
    transfer: dict | None
    blocks: int
    document_bytes: int
    resident: int


def run_vllm(folder: Path, options: Options, tell: Callable[[str], None]) -> dict:
    """Make the documents that the folder lacks, then measure all sides one after the other, each in
    its own process.

    Args:
        folder: The folder that keeps the model and the cache files.
        options: What is measured.
        tell: Called with what is being done.
    """
    torch.set_num_threads(1)
    # The paths of documents name tokens, ratio and number, so only the model must be the same.
    claim_folder(folder, {"model": options.model})
    facts = save_side_model(folder / "model", options.model)
    model, tokenizer = load_model(str(folder / "model"))
    documents = cut_texts(tokenizer, options.tokens, options.documents)
    # Make all documents first, so that the sides are measured as close in time as possible.
    sides = list(iterate_sides(model, tokenizer, documents, folder, options, tell))
    rows = []
    for side in sides:
        tell(f"asking vLLM, {side.name}")
        measured = _ask_side(folder, options, side, model.dtype)
        sizes = {"bytes": side.document_bytes, "resident": side.resident}
        rows.append({"side": side.name, **sizes, **measured})
    return {"options": asdict(options), "machine": describe_machine(1), "rows": rows, **facts}


def save_side_model(folder: Path, name: str) -> dict:
    """Save the model and its tokenizer; return the result's field `model` for random weights, else
    an empty dict.
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
) -> Iterator[Side]:
    """Yield the side of whole documents, then one for every ratio."""
    shape = CacheShape.from_model(model)
    pair_bytes = 2 * shape.head_dim * model.dtype.itemsize
    position_bytes = shape.layers * shape.heads * pair_bytes
    blocks = options.fitting * (options.tokens + 2 * SPARE) // BLOCK
    whole = []
    for text in documents:
        context = make_context(tokenizer, text)
        ids = context.ids[0].tolist()
        whole.append(
            [ids + encode_question(tokenizer, context, each)[0].tolist() for each in QUESTIONS]
        )
    yield Side("whole", whole, None, blocks, options.tokens * position_bytes, options.fitting)
    for ratio in options.ratios:
        store = folder / f"store-{Path(options.model).name}-{options.tokens}-{ratio}"
        store.mkdir(exist_ok=True)
        prompts = []
        pages = []
        for number, text in enumerate(documents):
            path = store / f"{number}.rkv"
            if not path.exists():
                tell(f"compressing document {number + 1} of {options.documents} at r = {ratio}")
                small = compress(
                    model, tokenizer, text, evictor="snapkv", adapter=None, ratio=ratio
                )
                small.save(path)
            prompts.append([prompt(path, each, tokenizer) for each in QUESTIONS])
            lengths = identify(open_cache_file(path)).lengths
            pages.append(count_pages(lengths, BLOCK))
        # A page holds BLOCK pairs of one head, a block BLOCK pairs of every head of every layer.
        page_bytes = BLOCK * pair_bytes
        block_bytes = BLOCK * position_bytes
        left = min(LEAST_BLOCKS, blocks // 2)
        pool = min(sum(pages) * page_bytes, (blocks - left) * block_bytes)
        yield Side(
            f"r = {ratio}",
            prompts,
            ragged_config(store, documents_memory=pool),
            (blocks * block_bytes - pool) // block_bytes,
            sum(pages) * page_bytes // len(pages),
            # How many of the first documents fit; all have about the same size.
            sum(total * page_bytes <= pool for total in accumulate(pages)),
        )


def _ask_side(folder: Path, options: Options, side: Side, dtype: torch.dtype) -> dict:
    """Measure one side in its own process."""
    job = {
        "model": str(folder / "model"),
        "dtype": str(dtype).removeprefix("torch."),
        "transfer": side.transfer,
        "prompts": side.prompts,
        "warmup": list(range(100, 130)),
        "block": BLOCK,
        # A request about a compressed document needs positions in vLLM for the question only.
        "longest": (options.tokens if side.transfer is None else 0) + 4 * SPARE,
        "tokens": options.answer,
        "blocks": side.blocks,
        "together": options.together,
        "alone": min(4, options.documents),
        "loads": {"fit": options.fitting, "do not fit": options.documents},
    }
    place = folder / "job.json"
    place.write_text(json.dumps(job))
    subprocess.run([sys.executable, "-m", "benchmarks.vllm_side", str(place)], check=True)
    return json.loads(place.with_suffix(".out.json").read_text())


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the table, then a sentence on the model and the machine."""
    options = result["options"]
    rows = result["rows"]
    head = ["documents", "MB each", "resident", "first token, cold", "warm"]
    names = list(rows[0]["throughput"])
    lines = []
    for row in rows:
        times = [median(row["cold"]), median(row["warm"])]
        rates = [row["throughput"][name] for name in names]
        texts = [f"{row['bytes'] / 1e6:.1f}", str(row["resident"])]
        texts += [f"{each:.2f} s" for each in times]
        texts += [f"{each:.1f}" for each in rates]
        lines.append([row["side"], *texts])
    yield Table(
        "vllm",
        "Whole and compressed documents in the same memory",
        [*head, *(f"tokens/s, {x}" for x in names)],
        lines,
    )
    processor = result["machine"]["processor"]
    yield f"{options['model']}, documents of {options['tokens']:,} tokens, {processor}."
