"""The experiments in the order of the paper; each module makes one, or a few that share figures,
for a setting.
"""

from __future__ import annotations

from collections.abc import Callable

from paper.experiments import (
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
from paper.plan import Experiment
from paper.setting import Setting
from restorekv.errors import RestoreKVError

Make = Callable[[Setting], Experiment]
EXPERIMENTS: dict[str, Make] = {
    "teaser": teaser.experiment,
    "main": main_figure.experiment,
    "methods": methods.experiment,
    "tradeoff": tradeoff.experiment,
    "mechanism": mechanism.experiment,
    "components": components.experiment,
    "prune-first": prune_first.experiment,
    "tokens": tokens.experiment,
    "efficiency": efficiency.experiment,
    "fast-kvzip": fast.experiment,
    "ratio-range": ratio_range.experiment,
    "offset": offset.experiment,
    "mismatch": mismatch.experiment,
    "longbench": longbench.experiment,
    "scbench": scbench.experiment,
    "training-data": training_data.experiment,
    "environment": facts.environment,
    "seeds": seeds.experiment,
    "metrics": facts.metrics,
}
# Only when asked for.
FURTHER: dict[str, Make] = {"contrastkv-simple": methods.simplified, "beyond": beyond.experiment}


def chosen(names: str, setting: Setting) -> list[Experiment]:
    """Those named, with commas, in the order of the paper; all of the paper's if none is."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {**EXPERIMENTS, **FURTHER}
    strange = [name for name in wanted if name not in known]
    if strange:
        raise RestoreKVError(
            f"There is no table or figure {strange[0]!r}; use some of {', '.join(known)}."
        )
    return [make(setting) for name, make in known.items() if name in (wanted or EXPERIMENTS)]
