"""Starts a Ray cluster on this machine, or joins one that runs."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from types import ModuleType

from restorekv.errors import RestoreKVError, import_extra, summarize_error

LOCAL = "local"
ENVIRONMENT = {  # no usage reports, workers at this process's priority, no log output
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
# On every system, loopback alone.
PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


def connect_ray(address: str, cpus: int, memory: int, needed: Mapping[str, float]) -> ModuleType:
    """Returns Ray, connected to the cluster at `address`, "auto" or "host:port", without its own
    output.

    "local" starts one with so many CPUs and bytes of shared memory, which nobody else reaches.
    Raises RestoreKVError where Ray or the cluster is missing, or no node has what a worker needs,
    such as {"CPU": 1, "GPU": 0}.
    """
    private = {**PRIVATE, "RAY_AUTH_TOKEN": secrets.token_hex(32)} if address == LOCAL else {}
    if "ray" in sys.modules:  # it has read them, and its processes must not read others
        private = {}
    for name, value in {**ENVIRONMENT, **private}.items():
        os.environ.setdefault(name, value)
    ray = import_extra("ray", "ray")
    own = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": memory}
    quiet = {"log_to_driver": False, "logging_level": "CRITICAL"}
    try:
        if ":" in address:  # Ray would wait minutes for an address that nobody listens on
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address, **quiet, **(own if address == LOCAL else {}))
    except (
        Exception
    ) as error:  # unreachable, malformed, another version, already running: many types
        fix = "start one, set RAY_AUTH_TOKEN if it asks for a token, or use local"
        fix = "try again when this machine is less busy" if address == LOCAL else fix
        raise RestoreKVError(
            f"There is no Ray cluster at {address} ({summarize_error(error)}); {fix}."
        ) from error
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(all(node.get(kind, 0) >= count for kind, count in needed.items()) for node in nodes):
        ray.shutdown()
        has = " and ".join(f"{needed[kind]:g} {kind}s" for kind in ("CPU", "GPU"))
        raise RestoreKVError(f"No node of the Ray cluster has the {has} of a worker.")
    return ray
