"""Start a Ray cluster on this machine, or join one that runs."""

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
ENVIRONMENT = {  # no usage reports, workers at this process's priority, no log output
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
# Only loopback, on every system, and only with a token.
PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


def connect_ray(address: str, cpus: int, memory: int, needed: Mapping[str, float]) -> ModuleType:
    """Connect to a Ray cluster, without its output.

    Args:
        address: "auto", "host:port", or "local", which starts one that nobody else reaches.
        cpus: How many CPUs a cluster gets that is started here.
        memory: Bytes of shared memory of a cluster that is started.
        needed: What a worker needs of its node, such as {"CPU": 1, "GPU": 0}.

    Returns:
        The module `ray`.

    Raises:
        RestoreKVError: Ray or the cluster is missing, or no node has what a worker needs.
    """
    is_local = address == LOCAL
    environment = dict(ENVIRONMENT)
    # Once Ray is imported it has read these, and its processes must not read others.
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
