"""One side of `python -m benchmarks vllm`, in its own process: `python -m benchmarks.vllm_side
JOB`.

A side asks vLLM about documents that are either whole (in vLLM's own prefix cache) or compressed
(in our ragged backend). All sides have the same memory.
"""

import json
import sys
import time
from pathlib import Path

from benchmarks.vllm_settings import IN_PROCESS, SETTINGS, enter_environment

ENVIRONMENT = {
    **SETTINGS,
    **IN_PROCESS,
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "OMP_NUM_THREADS": "1",
}


def measure(job: dict) -> dict:
    """Return the seconds to the first token, cold and warm, and the tokens a second of each load.

    The job's `prompts` are ids by document and question.
    """
    from vllm import LLM, SamplingParams

    options = {"kv_transfer_config": job["transfer"]} if job["transfer"] else {}
    llm = LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=job["block"],
        num_gpu_blocks_override=job["blocks"],
        max_model_len=job["longest"],
        **options,
    )

    def timed(prompts: list[list[int]], tokens: int) -> float:
        params = SamplingParams(
            temperature=0, max_tokens=tokens, min_tokens=tokens, detokenize=False
        )
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    prompts = job["prompts"]
    timed([job["warmup"]], 2)
    cold = []
    warm = []
    for first_question, second_question, *_ in prompts[: job["alone"]]:
        cold.append(timed([first_question], 1))
        warm.append(timed([second_question], 1))
    result = {
        "cold": sorted(cold),
        "warm": sorted(warm),
        "throughput": {},
    }
    for name, documents in job["loads"].items():
        for together in job["together"]:
            asked = [
                prompts[number % documents][2 + number // documents] for number in range(together)
            ]
            # Ask about every document first, so that those that fit are in memory.
            for number in range(min(together, documents)):
                timed([prompts[number][-1]], 1)
            result["throughput"][f"{name}, {together} together"] = (
                together * job["tokens"] / timed(asked, job["tokens"])
            )
    return result


if __name__ == "__main__":
    place = Path(sys.argv[1])
    job = json.loads(place.read_text())
    enter_environment(ENVIRONMENT, with_documents=bool(job["transfer"]))
    place.with_suffix(".out.json").write_text(json.dumps(measure(job)))
