"""The evictors by name. A spec is a name with settings: "kvzip", "kvzip+:chunk=512,sinks=0"."""

from dataclasses import fields

from restorekv.errors import RestoreKVError
from restorekv.evictors.base import Evictor
from restorekv.evictors.kvzip import KVzip
from restorekv.evictors.kvzip_plus import KVzipPlus

__all__ = ["EVICTORS", "Evictor", "make"]

EVICTORS: dict[str, type[Evictor]] = {"kvzip": KVzip, "kvzip+": KVzipPlus}


def make(spec: str) -> Evictor:
    """An evictor from its spec; every setting is a whole number."""
    name, _, rest = spec.partition(":")
    if name not in EVICTORS:
        raise RestoreKVError(f"There is no evictor {name!r}; use one of {', '.join(EVICTORS)}.")
    known = {field.name for field in fields(EVICTORS[name])}
    settings: dict[str, int] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known or not value.isdecimal():
            usage = ", ".join(f"{setting}=NUMBER" for setting in sorted(known))
            raise RestoreKVError(f"{name} has no setting {item!r}; give {usage}.")
        settings[key] = int(value)
    return EVICTORS[name](**settings)
