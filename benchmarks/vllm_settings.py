"""The environment of vLLM in all benchmarks: on a CPU, quiet, and offline."""

import os
from collections.abc import Mapping

SETTINGS = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # the engine shares the caller's process


def enter_environment(environment: Mapping[str, str], with_documents: bool) -> None:
    """Set the environment of an engine that this process will start; call it before vLLM is
    imported.

    `with_documents` switches restorekv's plugin on; without it the plugin is off, whatever
    RESTOREKV_VLLM was.
    """
    os.environ.update(environment)
    os.environ.pop("RESTOREKV_VLLM", None)
    if with_documents:
        os.environ["RESTOREKV_VLLM"] = "1"
