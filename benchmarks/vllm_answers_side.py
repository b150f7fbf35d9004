"""One mode of `python -m benchmarks vllm-answers`, in its own process: `python -m
benchmarks.vllm_answers_side JOB`.
"""

import json
import os
import sys
import time
from pathlib import Path

from benchmarks.vllm_settings import SETTINGS

ENVIRONMENT = {**SETTINGS, "VLLM_CPU_KVCACHE_SPACE": "2", "RESTOREKV_VLLM": "1"}


def answer(job: dict) -> dict:
    """Return two rounds of answers to `prompts`, the seconds of each round and the number of
    preemptions.
    """
    from vllm import LLM, SamplingParams

    own = {
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": job["longest"],
        "disable_log_stats": False,
    }
    llm = LLM(job["model"], kv_transfer_config=job["transfer"], **{**own, **job["options"]})
    params = SamplingParams(temperature=0, max_tokens=job["tokens"])
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    rounds = []
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        rounds.append([output.outputs[0].text for output in outputs])
    preemptions = sum(
        int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    return {"rounds": rounds, "seconds": seconds, "preemptions": preemptions}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    job = json.loads(place.read_text("utf-8"))
    os.environ.update(ENVIRONMENT)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if job["own_process"] else "0"
    out = place.with_suffix(".out.json")
    temporary = out.with_suffix(".part")
    temporary.write_text(json.dumps(answer(job)), "utf-8")
    temporary.rename(out)
