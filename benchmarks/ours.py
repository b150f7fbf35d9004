"""Our side of the benchmark, one measurement per process: python -m benchmarks.ours JOB."""

import sys
from collections.abc import Iterator

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from benchmarks.measure import Peak, serve_job
from benchmarks.timing import TokenTimer, time_block
from restorekv import __version__
from restorekv.cache.dense import list_dense_layers
from restorekv.cache.multi_context import fork_caches
from restorekv.cache.ragged import RaggedCache
from restorekv.compression.config import CompressionConfig
from restorekv.context import CompressedContext
from restorekv.generation import decoding
from restorekv.model.load import load_model
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter


def measure(job: dict) -> dict:
    """Return seconds per phase, peak memory, pairs and bytes held, and seconds per token at r and
    at r = 1.
    """
    model, tokenizer = load_model(job["model"])
    adapter = RestoreAdapter.create(model, 8, rank=8, seed=job["seed"])

    def squeeze(text: str) -> CompressedContext:
        return compress(
            model,
            tokenizer,
            text,
            ratio=job["ratio"],
            adapter=adapter,
            config=CompressionConfig(prefix_policy="counted", on_small_budget="fewer"),
        )

    _time_decoding(model, squeeze(job["text"][: job["warm_up"]]).cache, job)
    total: dict[str, float] = {}
    with Peak() as peak, time_block(total, "total"):
        made = squeeze(job["text"])
    m = made.manifest
    everything = made.context.num_tokens * m.shape["layers"] * m.shape["heads"]
    return {
        "versions": {
            "restorekv": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "seconds": {**m.seconds, **total},
        "peak": peak.bytes,
        "restore_tokens": m.restore_tokens,
        "held": {
            "pairs": m.pairs_held,
            "pairs_full": everything,
            "bytes": m.bytes_held,
            "bytes_full": m.bytes_full,
        },
        "small": _time_decoding(model, made.cache, job),
        "full": _time_decoding(model, _make_full_cache(model, tokenizer, made.context), job),
        **({"answers": time_answers(model, made.cache, job)} if "questions" in job else {}),
    }


def _make_full_cache(model: PreTrainedModel, tokenizer: Tokenizer, context: Context) -> RaggedCache:
    """Make the cache at r = 1, which keeps every pair."""
    full = prefill(model, context.ids)
    heads, columns = list_dense_layers(full)[0].keys.shape[1:3]
    return RaggedCache.from_kept_pairs(
        full, torch.ones(len(full.layers), heads, columns, dtype=torch.bool)
    )


def _time_decoding(model: PreTrainedModel, cache: RaggedCache, job: dict) -> dict[str, float]:
    """Time a question and the generation of a fixed number of tokens."""
    clock = TokenTimer()
    for _ in write_tokens(model, [cache], [torch.tensor(job["question_ids"])], job["decode"]):
        clock()
    return clock.figures()


def write_tokens(
    model: PreTrainedModel, caches: list[RaggedCache], prompts: list[Tensor], count: int
) -> Iterator[object]:
    """Return an iterator that generates `count` tokens of every answer; no EOS ends them
    earlier.
    """
    padded = decoding.pad_prompts(model, caches, prompts)
    forks = fork_caches(caches, [len(prompt) for prompt in prompts])
    return decoding.decode_batch(model, forks, padded, [count] * len(prompts), set())


def time_answers(model: PreTrainedModel, cache: RaggedCache, job: dict) -> dict[str, float]:
    """Time all questions in one batch, with a fixed number of tokens each, after a short batch as a
    warm-up.
    """
    prompts = [torch.tensor(ids) for ids in job["questions"]]
    seconds = {}
    for name, count in (("warm-up", 2), ("seconds", job["answer"])):
        with time_block(seconds, name):
            for _ in write_tokens(model, [cache] * len(prompts), prompts, count):
                pass
    return seconds


if __name__ == "__main__":
    serve_job(sys.argv[1], measure)
