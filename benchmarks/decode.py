"""`python -m benchmarks decode`: what a decode step costs over a compressed cache, compared with
transformers' own caches.

The model has random weights in the shape of Qwen3-0.6B. Caches of T tokens hold random states; a
global ranking of random scores, with a different mean for each head, decides which pairs are kept.
Every round measures all sides, one after the other:

    attention    one pass over all layers' attention with random queries, seconds per layer
    step         a pass of the whole model for one token, seconds
    ours         the compressed cache: r T H pairs a layer, heads of unequal lengths
    rectangle    transformers' DynamicCache of as many pairs, heads of one length; at r = 1 that is
                 the full one
    full         transformers' DynamicCache of all T tokens
    as rows      attention over the full cache by one call of SDPA that reads a KV head once for its
                 group: SDPA at its best, which transformers does not use here
    roofline     bytes of pairs and tail over the bandwidth of a copy (read and written), measured
                 in the same run

`held` compares the resident memory that a compressed cache adds to this process with the bytes of
its pairs (restore cache included) and of the tail after them. `answers` are the tokens a second of
many questions about one document, each side in its own process: ours in one batch, kvpress's by its
pipeline. Both sides compress with KVzip; that time is not counted.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import Cache

from benchmarks import compare as bench
from benchmarks.compare import (
    KVPRESS,
    NO_KVPRESS,
    OURS,
    ask_kvpress_version,
    make_job,
    measure_side,
)
from benchmarks.measure import read_memory
from benchmarks.passes import Step, measure_bandwidth, pass_over, time_once
from benchmarks.workload import SHAPE, describe_machine, save_model, save_tokenizer
from restorekv.cache.dense import DenseLayer, list_dense_layers
from restorekv.cache.ragged import RaggedCache, RaggedLayer
from restorekv.compression import allocate
from restorekv.compression.budget import parse_ratio
from restorekv.errors import RestoreKVError
from restorekv.generation.fixed_steps import locate_last_logits
from restorekv.model import attention
from restorekv.model.cache_argument import pass_cache
from restorekv.model.load import load_model
from restorekv.model.offload import trim_heap
from restorekv.model.prompt import encode_question, make_context
from restorekv.model.shape import CacheShape

QUESTION = 24  # columns of the tail after the restore cache
RESTORE = 8  # n
COPIED = 1 << 28  # bytes of the copy that measures the bandwidth


@dataclass(frozen=True)
class Options:
    """The options of `decode`.

    `tokens` is the length T of the context of decode steps. `asked` questions about a document of
    `read` tokens get answers of `answer` tokens each; if `asked` is 0, answers are not measured.
    `shape` replaces fields of Qwen3-0.6B's config.
    """

    tokens: int = 32768
    ratios: Sequence[float] = (1, 0.4, 0.2, 0.1, 0.05)
    repeat: int = 5
    asked: int = 16
    read: int = 4096
    answer: int = 24
    threads: int = 0
    seed: int = 0
    kvpress_python: Path | None = None
    shape: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            parse_ratio(ratio)
        if (
            not self.ratios
            or min(self.tokens, self.repeat, self.answer - 3) < 1
            or min(self.asked, self.threads) < 0
        ):
            raise RestoreKVError(
                "Measure at least 1 token, ratio and repetition, and answers of at least 4 tokens."
            )
        if self.asked and self.read < bench.WARM_UP:
            raise RestoreKVError(
                f"The document has at least {bench.WARM_UP} tokens, not {self.read}."
            )


@torch.no_grad()
def run_decode(options: Options, progress: Callable[[str], None] = lambda phase: None) -> dict:
    """Measure decode steps, memory and answers.

    Returns:
        `rows` with {ratio, pairs, bytes, roofline, attention, step} for each ratio, the last two
        in seconds by side; `held` of `measure_memory`; `answers` by side; and facts of the model
        and the machine.
    """
    found = ask_kvpress_version(options.kvpress_python) if options.kvpress_python else None
    torch.set_num_threads(options.threads or torch.get_num_threads())
    with tempfile.TemporaryDirectory(prefix="restorekv-bench-") as name:
        progress("making the model")
        tokenizer = save_tokenizer(Path(name))
        parameters = save_model(Path(name), {**SHAPE, **options.shape}, options.seed)
        model, _ = load_model(name)
        shape = CacheShape.from_model(model)
        progress("memory held")
        held = measure_memory(shape, options, min(map(float, options.ratios)))
        bandwidth = measure_bandwidth(
            COPIED, model.device, lambda copy: time_in_turn({"": copy}, options.repeat)[""]
        )
        full = make_random_cache(shape, options.tokens, options.seed)
        rows = []
        for ratio in options.ratios:
            progress(f"r = {ratio:g}")
            rows.append(
                {
                    "ratio": float(ratio),
                    **measure_ratio(model, full, options, float(ratio), bandwidth),
                }
            )
        del full, model
        answers = (
            measure_answers(options, tokenizer, Path(name), progress) if options.asked else None
        )
    return {
        "model": {"parameters": parameters, "dtype": "bfloat16", **SHAPE, **options.shape},
        "machine": describe_machine(torch.get_num_threads()),
        "tokens": options.tokens,
        "tail": RESTORE + QUESTION,
        "bandwidth": bandwidth,
        "held": held,
        "rows": rows,
        "answers": answers,
        "kvpress": found,
        "note": None if found or not options.asked else NO_KVPRESS,
    }


def make_random_cache(shape: CacheShape, tokens: int, seed: int) -> DynamicCache:
    """Make a full cache of random numbers."""
    full = DynamicCache()
    generator = torch.Generator().manual_seed(seed)
    size = 1, shape.heads, tokens, shape.head_dim
    for index in range(shape.layers):
        keys = torch.empty(size, dtype=torch.bfloat16).normal_(generator=generator)
        values = torch.empty(size, dtype=torch.bfloat16).normal_(generator=generator)
        full.update(keys, values, index)
    return full


def compress_cache(
    full: DynamicCache, ratio: float, seed: int, consume: bool = False
) -> RaggedCache:
    """Return a cache of floor(r T L H) pairs: n in the restore cache of each head, and the others
    chosen from `full` by a global ranking of random scores.
    """
    layers = len(full.layers)
    _, heads, tokens, width = list_dense_layers(full)[0].keys.shape
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(layers, heads, tokens, generator=generator)
    scores += torch.randn(layers, heads, 1, generator=generator)
    count = int(parse_ratio(ratio) * scores.numel()) - RESTORE * layers * heads
    keep = allocate.make_allocation("global")(scores, max(count, 0))
    restore_cache = []
    for _ in range(layers):
        keys = torch.randn(1, heads, RESTORE, width).bfloat16()
        values = torch.randn(1, heads, RESTORE, width).bfloat16()
        restore_cache.append((keys, values))
    return RaggedCache.from_kept_pairs(full, keep, restore_cache, consume=consume)


def grow_tail(cache: RaggedCache, columns: int) -> RaggedCache:
    """Return a fork with `columns` random columns in its tail, after the restore cache."""
    fork = cache.fork()
    for layer in fork.layers:
        layer.update(
            *(
                torch.randn(1, layer.heads, columns, x.shape[-1]).to(x.dtype)
                for x in layer.keys_and_values
            )
        )
    return fork


def measure_memory(shape: CacheShape, options: Options, ratio: float) -> dict | None:
    """Measure the resident bytes that a compressed cache with a tail adds to this process.

    A cache of a few tokens is made first, as a warm-up. Returns None if the system is not Linux.
    """
    small = make_random_cache(shape, 4 * RESTORE, options.seed)
    grow_tail(compress_cache(small, 1.0, options.seed, consume=True), QUESTION)
    gc.collect()
    trim_heap()
    try:
        before = read_memory("VmRSS")
    except OSError:
        return None
    cache = compress_cache(
        make_random_cache(shape, options.tokens, options.seed), ratio, options.seed, consume=True
    )
    fork = grow_tail(cache, QUESTION)
    gc.collect()
    trim_heap()
    added = read_memory("VmRSS") - before
    pairs = cache.pairs_held * 2 * shape.head_dim * 2
    tail = 0
    for layer in fork.layers:
        tail += layer.keys[:, :, cache.restore_length :].nbytes
        tail += layer.values[:, :, cache.restore_length :].nbytes
    return {
        "ratio": ratio,
        "bytes": added,
        "pairs": pairs,
        "tail": tail,
        "share": added / (pairs + tail),
    }


def measure_ratio(
    model: PreTrainedModel, full: DynamicCache, options: Options, ratio: float, bandwidth: float
) -> dict:
    """Return one ratio's pairs, bytes and median seconds by side; `full` is left as it was."""
    shape = CacheShape.from_model(model)
    made = compress_cache(full, ratio, options.seed)
    caches = {"ours": grow_tail(made, QUESTION), "full": full}
    if ratio < 1:
        caches["rectangle"] = copy_columns(
            full, made.pairs_held // (shape.layers * shape.heads) + QUESTION
        )
    # What a layer's attention has to read: 2 bytes a number, for keys and for values.
    must = 4 * shape.head_dim * (made.pairs_held // shape.layers + shape.heads * QUESTION)
    found = {
        "pairs": made.pairs_held,
        "bytes": must,
        "roofline": must / bandwidth,
        "attention": time_attention(model, caches, options.repeat),
        "step": time_in_turn(
            {name: time_step(model, cache, options.tokens) for name, cache in caches.items()},
            options.repeat,
        ),
    }
    # A negative number says how many columns to remove: those that the timed steps added.
    full.crop(options.tokens - full.get_seq_length())
    return found


def copy_columns(full: DynamicCache, length: int) -> DynamicCache:
    """Return the first `length` columns, copied."""
    short = DynamicCache()
    for index, layer in enumerate(list_dense_layers(full)):
        short.update(layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone(), index)
    return short


def time_attention(
    model: PreTrainedModel, caches: Mapping[str, Cache], repeat: int
) -> dict[str, float]:
    """Return the seconds of one layer's attention by side.

    They are averaged over a pass through all layers, so that no layer's pairs are still in the
    processor's cache.
    """
    shape = CacheShape.from_model(model)
    module = model.model.layers[0].self_attn
    query = torch.randn(1, shape.heads * shape.groups, 1, shape.head_dim).bfloat16()
    rows = query.view(1, shape.heads, shape.groups, shape.head_dim)

    def attend(layer: DenseLayer | RaggedLayer) -> None:
        if isinstance(layer, RaggedLayer):
            attention.attend_layer(module, query, layer, layer, None)
        else:
            attention.attend_layer(module, query, layer.keys, layer.values, None)

    passes = {name: pass_over(cache.layers, attend) for name, cache in caches.items()}
    whole = list_dense_layers(caches["full"])
    passes["as rows"] = pass_over(
        whole, lambda layer: F.scaled_dot_product_attention(rows, layer.keys, layer.values)
    )
    return {name: took / shape.layers for name, took in time_in_turn(passes, repeat).items()}


def time_step(model: PreTrainedModel, cache: Cache, tokens: int) -> Step:
    """Return a step that passes one token through the model and adds its pairs to the cache.

    The position stays the same from step to step, because only time matters.
    """
    ids = torch.tensor([[0]])
    position = torch.tensor([[tokens]])
    return lambda: compute_next_logits(model, ids, None, position, cache).max(-1).indices


def compute_next_logits(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Cache
) -> Tensor:
    """Return the logits (B, V) after ids (B, q); the mask is (B, 1, q, columns), or None
    for causal.
    """
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        **pass_cache(model, cache),
        use_cache=True,
        logits_to_keep=locate_last_logits(ids),
    )
    return output.logits[:, -1]


def time_in_turn(sides: Mapping[str, Step], repeat: int) -> dict[str, float]:
    """Return the median seconds of each side over `repeat` rounds, after one as a warm-up.

    Every other round goes through the sides in reverse order.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(repeat + 1):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            found[name].append(time_once(sides[name]))
    return {name: median(times[1:]) for name, times in found.items()}


def measure_answers(
    options: Options, tokenizer: Tokenizer, folder: Path, progress: Callable[[str], None]
) -> dict:
    """Return the tokens a second that each side answers, measured in its own process."""
    job = make_job(bench.Options([options.read], seed=options.seed), tokenizer, options.read)
    context = make_context(tokenizer, job["text"])
    letters = (chr(ord("a") + number % 26) for number in range(options.asked))
    asked = [encode_question(tokenizer, context, f"{letter}?")[0].tolist() for letter in letters]
    job |= {
        "model": str(folder),
        "threads": torch.get_num_threads(),
        "questions": asked,
        "answer": options.answer,
    }
    found = {
        "asked": options.asked,
        "read": options.read,
        "answer": options.answer,
        "ratio": job["ratio"],
    }
    for side in [OURS, KVPRESS] if options.kvpress_python else [OURS]:
        progress(f"{options.asked} questions: {side}")
        found[side] = measure_side(side, job, folder, options.kvpress_python)["answers"]
        if "seconds" in found[side]:
            found[side]["rate"] = options.asked * options.answer / found[side]["seconds"]
    return found
