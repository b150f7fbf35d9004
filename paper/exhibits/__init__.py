"""The exhibits in the order of the paper; each module makes one, or a few that share figures, for a setting."""

from __future__ import annotations

from collections.abc import Callable

from paper.exhibits import (
    beyond,
    components,
    efficiency,
    facts,
    fast,
    longbench,
    main_figure,
    mechanism,
    methods,
    mismatch,
    offset,
    prune_first,
    ratio_range,
    scbench,
    seeds,
    teaser,
    tokens,
    tradeoff,
    training_data,
)
from paper.plan import Exhibit
from paper.setting import Setting
from restorekv.errors import RestoreKVError

Make = Callable[[Setting], Exhibit]
EXHIBITS: dict[str, Make] = {
    "teaser": teaser.exhibit,
    "main": main_figure.exhibit,
    "methods": methods.exhibit,
    "tradeoff": tradeoff.exhibit,
    "mechanism": mechanism.exhibit,
    "components": components.exhibit,
    "prune-first": prune_first.exhibit,
    "tokens": tokens.exhibit,
    "efficiency": efficiency.exhibit,
    "fast-kvzip": fast.exhibit,
    "ratio-range": ratio_range.exhibit,
    "offset": offset.exhibit,
    "mismatch": mismatch.exhibit,
    "longbench": longbench.exhibit,
    "scbench": scbench.exhibit,
    "training-data": training_data.exhibit,
    "environment": facts.environment,
    "seeds": seeds.exhibit,
    "metrics": facts.metrics,
}
FURTHER: dict[str, Make] = {"contrastkv-simple": methods.simplified, "beyond": beyond.exhibit}  # only when asked for


def chosen(names: str, setting: Setting) -> list[Exhibit]:
    """Those named, with commas, in the order of the paper; all of the paper's if none is."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {**EXHIBITS, **FURTHER}
    strange = [name for name in wanted if name not in known]
    if strange:
        raise RestoreKVError(f"There is no table or figure {strange[0]!r}; use some of {', '.join(known)}.")
    return [make(setting) for name, make in known.items() if name in (wanted or EXHIBITS)]
