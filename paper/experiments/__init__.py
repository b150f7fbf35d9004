"""The experiments in the order of the paper. Each module makes one for a setting, or a few that
share figures.
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
    "teaser": teaser.make_experiment,
    "main": main_figure.make_experiment,
    "methods": methods.make_experiment,
    "tradeoff": tradeoff.make_experiment,
    "mechanism": mechanism.make_experiment,
    "components": components.make_experiment,
    "prune-first": prune_first.make_experiment,
    "tokens": tokens.make_experiment,
    "efficiency": efficiency.make_experiment,
    "fast-kvzip": fast.make_experiment,
    "ratio-range": ratio_range.make_experiment,
    "offset": offset.make_experiment,
    "mismatch": mismatch.make_experiment,
    "longbench": longbench.make_experiment,
    "scbench": scbench.make_experiment,
    "training-data": training_data.make_experiment,
    "environment": facts.environment,
    "seeds": seeds.make_experiment,
    "metrics": facts.metrics,
}
# These are run only if they are asked for.
FURTHER: dict[str, Make] = {
    "contrastkv-simple": methods.simplified,
    "beyond": beyond.make_experiment,
}


def choose_experiments(names: str, setting: Setting) -> list[Experiment]:
    """Return the experiments named in a comma-separated list, in the order of the paper.

    If none is named, returns all of the paper's.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = {**EXPERIMENTS, **FURTHER}
    strange = [name for name in wanted if name not in known]
    if strange:
        raise RestoreKVError(
            f"There is no table or figure {strange[0]!r}; use some of {', '.join(known)}."
        )
    return [make(setting) for name, make in known.items() if name in (wanted or EXPERIMENTS)]
