"""Model ids: the base name answers from the full cache, `name:method-ratio` from a compressed one.

`name:method-ratio-base` is the same without restore tokens: what the evictor alone keeps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from restorekv.compression.budget import parse_ratio
from restorekv.compression.presets import PRESETS, resolve_preset
from restorekv.errors import OptionError, name_option
from restorekv.evictors import EVICTORS
from restorekv.restore.adapter import RestoreAdapter
from restorekv.spec import hint_near_name

WITHOUT_RESTORING = "-base"


class UnknownModelError(OptionError):
    """A model id that names neither the model of the server nor a variant of it."""


def _list_names(base: str, rest: str) -> list[str]:
    """Return the model ids to suggest instead of a wrong one, with the ratio that it seems to
    mean.
    """
    found = re.search(r"0?\.\d+", rest)
    ratio = found[0] if found else "0.1"
    variants = [f"{base}:{method}-{ratio}" for method in (*PRESETS, *EVICTORS)]
    return [base, *variants, *(name + WITHOUT_RESTORING for name in variants)]


def is_method(name: str) -> bool:
    """Return whether a name is that of a preset or an evictor."""
    return name in PRESETS or name in EVICTORS


@dataclass(frozen=True)
class Variant:
    """How documents are held.

    Args:
        base: The name of the model.
        method: A preset, an evictor's name, or "" for the full cache.
        ratio: The share of the KV pairs that is kept.
        restores: Whether the server's adapter adds restore tokens, by default the one that ships
            for model and method.
    """

    base: str
    method: str = ""
    ratio: Fraction = Fraction(1)
    restores: bool = True

    @classmethod
    def parse(cls, name: str, base: str) -> Self:
        """Return the variant of a model id such as smollm2:fast-0.1; refuse unknown ids."""
        if name == base:
            return cls(base)
        before, _, rest = name.partition(f"{base}:")
        method, dash, ratio = rest.removesuffix(WITHOUT_RESTORING).rpartition("-")
        if before or not dash or not is_method(method):
            hint = hint_near_name(name, _list_names(base, rest))
            raise UnknownModelError(
                f"There is no model {name!r} here{hint}; use {base}, or {base}:METHOD-RATIO with "
                f"an evictor or a preset ({' or '.join(PRESETS)}) and a ratio, such as "
                f"{base}:fast-0.1.",
                "model",
            )
        with name_option("model"):
            share = parse_ratio(ratio)
        return cls(base, method, share, not rest.endswith(WITHOUT_RESTORING))

    @property
    def name(self) -> str:
        """The model id."""
        if not self.method:
            return self.base
        ratio = str(float(self.ratio)).removesuffix(".0")
        ending = "" if self.restores else WITHOUT_RESTORING
        return f"{self.base}:{self.method}-{ratio}{ending}"

    def make_options(self, adapter: RestoreAdapter | str | None) -> dict[str, Any]:
        """Return the arguments of `compress`; `adapter` is the server's, as `compress` takes it."""
        if not self.method:
            return {"ratio": 1, "adapter": None}
        return {
            "evictor": resolve_preset(self.method),
            "ratio": self.ratio,
            "adapter": adapter if self.restores else None,
        }
