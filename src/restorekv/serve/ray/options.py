"""How many replicas of Ray Serve answer, and which of them run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from restorekv.errors import RestoreKVError

# The names of the replicas that run, as `note_replicas` last got them.
REPLICAS: frozenset[str] = frozenset()


def note_replicas(names: Iterable[str]) -> None:
    """Remember which replicas run."""
    global REPLICAS
    REPLICAS = frozenset(names)


def option(default: object, text: str, **settings: object) -> Any:
    """Return a field that is an option of the command; `settings` are typer's."""
    return field(default=default, metadata={"help": text, **settings})


@dataclass(frozen=True)
class RayOptions:
    """Whether and how a server answers in replicas of Ray Serve."""

    ray: str | None = option(
        None, "Answer with replicas on Ray Serve: local, auto or the address of a cluster."
    )
    replicas: int = option(2, "Minimum number of replicas.")
    max_replicas: int = option(
        0, "Maximum number of replicas, when many questions come; 0 starts no more."
    )
    replica_cpus: int = option(1, "CPUs of a replica, and its threads.")
    replica_gpus: float = option(
        -1.0, "GPUs of a replica; by default 1 with --device cuda, else 0.", show_default=False
    )

    def __post_init__(self) -> None:
        if self.ray is None:
            for each in fields(self):
                if getattr(self, each.name) != each.default:
                    flag = each.name.replace("_", "-")
                    raise RestoreKVError(
                        f"--{flag} is for --ray; add --ray local, for example, or leave it out."
                    )
        has_too_few = self.replicas < 1 or self.replica_cpus < 1
        if has_too_few or 0 < self.max_replicas < self.replicas:
            raise RestoreKVError(
                "--replicas and --replica-cpus must be at least 1, and --max-replicas 0 or no less "
                "than --replicas."
            )

    def find_resources(self, device: str) -> dict[str, float]:
        """Return the resources that a replica needs of its node."""
        gpus = self.replica_gpus
        if gpus < 0:
            gpus = 1.0 if device.startswith("cuda") else 0.0
        return {"CPU": self.replica_cpus, "GPU": gpus}
