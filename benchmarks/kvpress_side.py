"""kvpress's side of the benchmark, one measurement per process: KVPRESS_PYTHON kvpress_side.py JOB.

It runs in an environment with kvpress 0.5.5 (transformers < 5.3), without restorekv. It calls model
and press in the order of kvpress's own pipeline; it differs only in that the number of tokens is
fixed and the phases are timed.
"""

import sys
from importlib.metadata import version

import torch
from kvpress import KVPressTextGenerationPipeline, KVzipPress
from measure import Peak, serve_job  # in this folder; restorekv is not installed here
from timing import TokenTimer, time_block
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel


class TimedPress(KVzipPress):
    """kvpress's KVzip, with its last step, choosing the pairs, timed separately."""

    def compress_post(self, model: PreTrainedModel) -> None:
        self.seconds: dict[str, float] = {}
        with time_block(self.seconds, "evict"):
            super().compress_post(model)


def measure(job: dict) -> dict:
    """Return seconds per phase, peak memory, pairs and bytes held, and seconds per token at r and
    at r = 1.
    """
    safe = {"trust_remote_code": False, "use_safetensors": True}
    model = (
        AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto", **safe)
        .eval()
        .requires_grad_(False)
    )
    ids = torch.tensor([job["context_ids"]])
    _time_decoding(model, _compress(model, ids[:, : job["warm_up"]], job["ratio"])[0], job)
    with Peak() as peak:
        cache, seconds = _compress(model, ids, job["ratio"])
    config = model.config
    pairs = config.num_hidden_layers * config.num_key_value_heads * ids.shape[1]
    hidden = sum(len(layer.self_attn.masked_key_indices[0]) for layer in model.model.layers)
    size = 0
    for layer in cache.layers:
        # transformers annotates a layer as one that may hold no keys, or linear attention.
        for states in (layer.keys, layer.values):  # pyright: ignore[reportAttributeAccessIssue]
            assert states is not None, "the cache is filled"
            size += states.nbytes
    small = _time_decoding(model, cache, job)
    answers = (
        {"answers": _time_answers(model, cache, job, ids.shape[1])} if "questions" in job else {}
    )
    whole = DynamicCache()
    # A prefill, with as many queries as keys, makes kvpress drop the masks of its evicted pairs.
    model.model(input_ids=ids, past_key_values=whole)
    return {
        "versions": {name: version(name) for name in ("kvpress", "torch", "transformers")},
        "seconds": seconds,
        "peak": peak.bytes,
        "held": {"pairs": pairs - hidden, "pairs_full": pairs, "bytes": size, "bytes_full": size},
        "small": small,
        "full": _time_decoding(model, whole, job),
        **answers,
    }


def _compress(
    model: PreTrainedModel, ids: torch.Tensor, ratio: float
) -> tuple[DynamicCache, dict[str, float]]:
    """Compress ids (1, S + T); return the cache and the seconds per phase.

    kvpress only masks evicted pairs; they stay in the cache.
    """
    cache = DynamicCache()
    press = TimedPress(compression_ratio=1 - ratio)
    seconds = {}
    with time_block(seconds, "total"), press(model), time_block(seconds, "prefill"):
        model.model(input_ids=ids, past_key_values=cache)
    seconds["evict"] = press.seconds["evict"]
    seconds["score"] = seconds["total"] - seconds["prefill"] - seconds["evict"]
    return cache, seconds


def _time_decoding(model: PreTrainedModel, cache: DynamicCache, job: dict) -> dict:
    """Time a question and a fixed number of tokens.

    kvpress masks evicted pairs by a fake key, and raises ValueError if it finds none; the reason is
    returned then.
    """
    clock = TokenTimer()
    ids = torch.tensor([job["question_ids"]])
    try:
        for _ in range(job["decode"]):
            first = cache.get_seq_length()
            positions = torch.arange(first, first + ids.shape[1])[None]
            output = model(
                input_ids=ids, past_key_values=cache, position_ids=positions, logits_to_keep=1
            )
            ids = output.logits[:, -1].argmax(-1, keepdim=True)
            clock()
    except ValueError as error:
        return {"refused": str(error)}
    return clock.figures()


def _time_answers(model: PreTrainedModel, cache: DynamicCache, job: dict, length: int) -> dict:
    """Time all questions, one after the other in kvpress's own pipeline, with a fixed number of
    tokens each.
    """
    tokenizer = AutoTokenizer.from_pretrained(job["model"], trust_remote_code=False)
    pipe = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    seconds: dict[str, float] = {}
    kept = [cache.get_seq_length(index) for index in range(len(cache))]
    try:
        with time_block(seconds, "seconds"):
            for ids in job["questions"]:
                pipe.generate_answer(torch.tensor([ids]), cache, length, job["answer"])
                pipe._remove_answer_from_cache(cache, kept)
    except ValueError as error:
        return {"refused": str(error)}
    return seconds


if __name__ == "__main__":
    serve_job(sys.argv[1], measure)
