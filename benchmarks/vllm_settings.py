"""The environment of every benchmark's vLLM: on a CPU, quiet, and away from the hub."""

import os
from collections.abc import Mapping

SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine shares the caller's process


def enter_environment(environment: Mapping[str, str], with_documents: bool) -> None:
    """Set the variables of an engine that this process is to start, before vLLM is imported.

    `with_documents` switches restorekv's plugin on; without it vLLM is alone, whatever was set.
    """
    os.environ.update(environment)
    os.environ.pop("RESTOREKV_VLLM", None)
    if with_documents:
        os.environ["RESTOREKV_VLLM"] = "1"
