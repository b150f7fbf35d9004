"""One engine of `python -m benchmarks vllm-steps`, in its own process: `python -m
benchmarks.vllm_steps_side JOB`.

It reads lines from standard input. For the name of a set of prompts, it answers them and prints the
seconds of the decode steps as JSON. For the line `kernels`, it measures attention over a document's
pages alone, in both of its implementations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.vllm_settings import IN_PROCESS, SETTINGS, enter_environment

ENVIRONMENT = {**SETTINGS, **IN_PROCESS, "VLLM_CPU_KVCACHE_SPACE": "1"}
PAIRS = (64, 256, 1024, 4096)  # of a head
TOKENS = (1, 4, 8, 16, 32, 128)  # of one step, all about the same document
ROUNDS = 7


def make_engine(job: dict) -> Any:
    """Start vLLM, with restorekv's plugin if the job has a connector."""
    from vllm import LLM

    options = {"kv_transfer_config": job["transfer"]} if job["transfer"] else {}
    return LLM(
        job["model"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=32,
        max_model_len=1024,
        **options,
    )


def time_steps(llm: Any, prompts: list[list[int]], tokens: int) -> list[float]:
    """Return the seconds of every step in which all requests write a token after their first."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
    )
    engine = llm.llm_engine
    for number, ids in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": ids}, params)
    written = dict.fromkeys(map(str, range(len(prompts))), 0)
    seconds = []
    while engine.has_unfinished_requests():
        before = min(written.values())
        start = time.perf_counter()
        outputs = engine.step()
        elapsed = time.perf_counter() - start
        for output in outputs:
            written[output.request_id] = len(output.outputs[0].token_ids)
        if before > 0 and len(outputs) == len(prompts):
            seconds.append(elapsed)
    return seconds


def measure_kernels(llm: Any) -> list[dict]:
    """Time one layer's attention over a document, by pages and head by head."""
    import torch

    from restorekv.vllm import worker_state
    from restorekv.vllm.cpu_backend import RaggedCPUImpl
    from restorekv.vllm.document_batch import DocumentBatch
    from restorekv.vllm.page_pool import DocumentPairs

    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    impl = next(layer.impl for layer in layers.values() if hasattr(layer, "impl"))
    assert isinstance(impl, RaggedCPUImpl)
    heads = impl.num_kv_heads
    groups = impl.num_heads // heads
    pool = worker_state.get_pool()
    rows = []
    for pairs in PAIRS:
        keys = torch.randn(heads * pairs, impl.head_size)
        lengths = torch.full((1, heads), pairs)
        table = pool.put("measured", DocumentPairs([keys], [keys], lengths))
        for tokens in TOKENS:
            queries = torch.randn(heads * tokens, groups, impl.head_size)
            batch = DocumentBatch([table], [tokens], heads, torch.device("cpu"))
            sequences, _ = batch.of_layer(0)
            paged = []
            looped = []
            for _ in range(ROUNDS):
                start = time.perf_counter()
                impl.attend_pages(queries, sequences)
                middle = time.perf_counter()
                impl.attend_heads(queries, table, 0)
                paged.append(middle - start)
                looped.append(time.perf_counter() - middle)
            ratios = [one / other for one, other in zip(paged, looped, strict=True)]
            rows.append(
                {
                    "pairs": pairs,
                    "tokens": tokens,
                    "pages": median(paged),
                    "loop": median(looped),
                    "ratio": median(ratios),
                    "loops": impl.prefers_loop(tokens, table),
                }
            )
        pool.drop("measured")
    return rows


def main() -> None:
    """Answer lines of the standard input until it ends."""
    # Answers go to the original standard output; anything else that is printed goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    enter_environment(ENVIRONMENT, with_documents=bool(job["transfer"]))
    llm = make_engine(job)
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name == "kernels":
            found: list = measure_kernels(llm)
        else:
            found = time_steps(llm, job["prompts"][name], job["tokens"])
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
