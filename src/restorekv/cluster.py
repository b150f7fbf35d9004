"""Start a Ray cluster on this machine, or join one that is already running."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from restorekv.errors import RestoreKVError, import_extra, summarize_error

LOCAL = "local"
# No usage reports, GPUs not hidden from workers that reserve none, workers at this process's
# priority, no log output.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
# For "local": loopback alone, on Linux too (despite the variable's name), and only with a token.
PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


def connect_ray(address: str, cpus: int, memory: int, needed: Mapping[str, float]) -> ModuleType:
    """Connect to a Ray cluster, or start one, without letting Ray print anything.

    Args:
        address: "auto" or "host:port" of a running cluster, or "local" to start one that nobody
            else can reach.
        cpus: The number of CPUs of a cluster that is started here.
        memory: The bytes of shared memory of a cluster that is started here.
        needed: The resources that a worker needs on its node, such as {"CPU": 1, "GPU": 0}.

    Returns:
        The module `ray`.

    Raises:
        RestoreKVError: Ray is not installed, the cluster cannot be reached or started, or no node
            has what a worker needs.
    """
    is_local = address == LOCAL
    environment = dict(ENVIRONMENT)
    # Ray reads these when it is imported. If that has happened, setting them now would only give
    # the processes that it starts other values than its own.
    if is_local and "ray" not in sys.modules:
        environment |= {**PRIVATE, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    ray = import_extra("ray", "ray")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL"}
    if is_local:
        options["num_cpus"] = cpus
        options["include_dashboard"] = False
        options["object_store_memory"] = memory
    try:
        if ":" in address:  # Ray would wait minutes for an address that nobody listens on
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address, **options)
    # Unreachable, malformed, another version, already running: these are errors of many types.
    except Exception as error:
        if is_local:
            fix = "try again when this machine is less busy"
        else:
            fix = "start one, set RAY_AUTH_TOKEN if it asks for a token, or use local"
        raise RestoreKVError(
            f"There is no Ray cluster at {address} ({summarize_error(error)}); {fix}."
        ) from error
    if not any(node["Alive"] and _has_enough(node, needed) for node in ray.nodes()):
        ray.shutdown()
        worker = " and ".join(f"{needed[kind]:g} {kind}s" for kind in ("CPU", "GPU"))
        raise RestoreKVError(f"No node of the Ray cluster has the {worker} of a worker.")
    return ray


def _has_enough(node: Mapping[str, Any], needed: Mapping[str, float]) -> bool:
    """Return whether a node has what a worker needs."""
    resources = node["Resources"]
    return all(resources.get(kind, 0) >= count for kind, count in needed.items())
