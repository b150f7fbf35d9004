"""Specs: a name with settings, "kvzip:chunk=512,sinks=0", the one grammar of evictors, allocations and methods.

What can be named is a frozen dataclass; its fields are its settings, numbers, words or true/false.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

from restorekv.errors import RestoreKVError

Named = TypeVar("Named")
EXAMPLES = {int: "NUMBER", float: "NUMBER", bool: "true|false", str: "TEXT"}


def parse(text: str, known: Mapping[str, type[Named]], what: str) -> Named:
    """An object of the class that `known` has under the spec's name; `what` names the kind in messages."""
    name, _, rest = text.partition(":")
    if name not in known:
        raise RestoreKVError(f"There is no {what} {name!r}; use one of {', '.join(known)}.")
    kinds = settings_of(known[name])
    settings = {}
    for item in filter(None, map(str.strip, rest.split(","))):
        key, _, value = item.partition("=")
        if key not in kinds:
            usage = ", ".join(f"{setting}={EXAMPLES[kind]}" for setting, kind in sorted(kinds.items()))
            mend = f"give {usage}" if usage else "it takes none"
            raise RestoreKVError(f"{name} has no setting {item!r}; {mend}.")
        try:
            settings[key] = read(kinds[key], value)
        except (KeyError, ValueError):
            raise RestoreKVError(f"{name} takes {key}={EXAMPLES[kinds[key]]}, not {value!r}.") from None
    return known[name](**settings)


def write(name: str, made: object) -> str:
    """The shortest spec that makes `made` again: settings at their defaults are left out."""
    changed = [
        f"{field.name}={str(value).lower() if isinstance(value, bool) else value}"
        for field in fields(made)
        if (value := getattr(made, field.name)) != field.default or field.default is MISSING
    ]
    return f"{name}:{','.join(changed)}" if changed else name


def settings_of(kind: type) -> dict[str, type]:
    """Fields that a spec can set, with their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if hints[field.name] in EXAMPLES}


def read(kind: type, value: str) -> Any:
    """A setting's value; raises ValueError."""
    if kind is bool:
        return {"true": True, "false": False}[value]
    if not value or (kind is int and not value.isdecimal()):
        raise ValueError(value)
    return kind(value)
