"""The benchmark `vllm-kl`: how far vLLM's token distributions over cache files are from those of
`ask` in the same dtype.

vLLM writes answers and returns the log-probabilities of all tokens; `ask`'s model is then given the
same tokens one by one. Two other figures put the distance in perspective: that of requests without
a document, for which vLLM and transformers differ only by rounding, and that to the cache of
another document.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from benchmarks.vllm_answers import QUESTIONS
from benchmarks.vllm_settings import IN_PROCESS, SETTINGS
from benchmarks.workload import cut_texts, describe_machine
from restorekv.evaluation.tables import Table
from restorekv.model.load import load_model
from restorekv.pipeline import compress
from restorekv.vllm import prompt, ragged_config
from restorekv.vllm.ragged_documents import PLACEHOLDERS

ENVIRONMENT = {**SETTINGS, **IN_PROCESS, "VLLM_CPU_KVCACHE_SPACE": "1", "RESTOREKV_VLLM": "1"}
PLAIN_TOKENS = 300  # the length of a prompt without a document


def run_kl(
    folder: Path,
    model_name: str,
    dtype: str,
    documents: int,
    tokens: int,
    ratio: str,
    answer: int,
    tell: Callable[[str], None],
) -> dict:
    """Compress documents, ask vLLM about them in the same dtype, and compare the distributions.

    Args:
        folder: The folder for the model and the cache files.
        model_name: The model, which must be available offline.
        dtype: The dtype of both sides.
        documents: The number of documents.
        tokens: The length of every document.
        ratio: The ratio to which every document is compressed.
        answer: The number of tokens of an answer.
        tell: Called with what is being done.
    """
    torch.set_num_threads(1)
    model, tokenizer = load_model(model_name, dtype=dtype)
    store = folder / "store"
    store.mkdir(parents=True, exist_ok=True)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    contexts = []
    prompts = []
    plain = []
    for number, text in enumerate(cut_texts(tokenizer, tokens, documents)):
        tell(f"compressing document {number + 1} of {documents}")
        context = compress(model, tokenizer, text, ratio=ratio)
        path = store / f"{number}.rkv"
        context.save(path)
        contexts.append(context)
        prompts.append([prompt(path, question, tokenizer) for question in QUESTIONS])
        plain.append(tokenizer.encode(text)[:PLAIN_TOKENS])
    tell("asking vLLM")
    found = ask_vllm(
        folder, dtype, [*(ids for each in prompts for ids in each), *plain], answer, len(tokenizer)
    )
    remaining = iter(found)
    own = []
    other = []
    for number, context in enumerate(contexts):
        tell(f"comparing document {number + 1} of {documents}")
        neighbor = contexts[(number + 1) % documents]
        for ids in prompts[number]:
            written, logprobs = next(remaining)
            asked = ids[PLACEHOLDERS:]
            own += compute_kl(model, context.cache.fork(), asked, written, logprobs)
            other += compute_kl(model, neighbor.cache.fork(), asked, written, logprobs)
    without = []
    for ids in plain:
        written, logprobs = next(remaining)
        without += compute_kl(model, DynamicCache(), ids, written, logprobs)
    return {
        "model": model_name,
        "dtype": dtype,
        "documents": documents,
        "tokens": tokens,
        "ratio": ratio,
        "questions": len(QUESTIONS),
        "answer_tokens": answer,
        "machine": describe_machine(1),
        "kl": {"documents": own, "without a document": without, "another document": other},
    }


def ask_vllm(
    folder: Path, dtype: str, prompts: Sequence[list[int]], answer: int, vocabulary: int
) -> list[tuple[list[int], Tensor]]:
    """Return what vLLM writes greedily after each prompt, and its log-probabilities (T, V).

    Args:
        folder: The folder that contains `model` and `store`.
        dtype: The engine's dtype.
        prompts: The token ids of each prompt.
        answer: The number of tokens T of an answer.
        vocabulary: The size V of the vocabulary.
    """
    os.environ.update(ENVIRONMENT)
    from vllm import LLM, SamplingParams

    from restorekv.vllm.plugin import register

    register()
    llm = LLM(
        str(folder / "model"),
        dtype=dtype,
        enforce_eager=True,
        block_size=32,
        max_model_len=1024,
        max_logprobs=-1,
        kv_transfer_config=ragged_config(folder / "store"),
    )
    params = SamplingParams(
        temperature=0,
        max_tokens=answer,
        min_tokens=answer,
        ignore_eos=True,
        logprobs=-1,
        flat_logprobs=True,
        detokenize=False,
    )
    try:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    finally:
        llm.llm_engine.engine_core.shutdown()
    found = []
    for output in outputs:
        first = output.outputs[0]
        found.append((list(first.token_ids), fill_logprobs(first.logprobs, vocabulary)))
    return found


def fill_logprobs(flat: Any, vocabulary: int) -> Tensor:
    """Return vLLM's flat list of log-probabilities as a tensor (T, V)."""
    rows = torch.full((len(flat.start_indices), vocabulary), torch.nan)
    for row, (start, end) in enumerate(zip(flat.start_indices, flat.end_indices, strict=True)):
        ids = torch.tensor(flat.token_ids[start:end])
        rows[row, ids] = torch.tensor(flat.logprobs[start:end])
    assert not bool(rows.isnan().any()), "vLLM left tokens out"
    return rows


@torch.no_grad()
def compute_kl(
    model: PreTrainedModel, cache: Cache, asked: list[int], written: list[int], logprobs: Tensor
) -> list[float]:
    """Return KL(model || vLLM) for every token written.

    Args:
        model: The model that `ask` uses.
        cache: The document's cache; the tokens are appended to it.
        asked: The question's ids.
        written: The answer's ids.
        logprobs: vLLM's log-probabilities (T, V).
    """
    found = []
    following = asked
    for token, theirs in zip(written, logprobs, strict=True):
        output = model(torch.tensor([following]), past_key_values=cache)
        ours = output.logits[0, -1].double().log_softmax(-1)[: len(theirs)]
        found.append(float((ours.exp() * (ours - theirs.double())).sum()))
        following = [token]
    return found


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the table of distances, then a sentence on what was asked."""
    lines = []
    for name, values in result["kl"].items():
        ordered = sorted(values)
        mean = sum(values) / len(values)
        highest = ordered[int(len(ordered) * 0.99)]
        lines.append([name, f"{len(values):,}", f"{mean:.6f}", f"{highest:.6f}"])
    yield Table(
        "vllm-kl",
        f"KL per token of vLLM from ask, both in {result['dtype']}",
        ["requests", "tokens", "mean", "99th percentile"],
        lines,
    )
    yield (
        f"{result['model']}, {result['documents']} documents of {result['tokens']:,} tokens at "
        f"r = {result['ratio']}, {result['questions']} questions each, "
        f"{result['answer_tokens']} tokens an answer, {result['machine']['processor']}."
    )
