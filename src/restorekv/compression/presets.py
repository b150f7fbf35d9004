"""The default evictor, and the presets that name one by what a user wants.

It imports no PyTorch, so that the command line can refuse a preset at once.
"""

from restorekv.errors import RestoreKVError

DEFAULT_EVICTOR = "kvzip"
# fastkvzip scores during the prefill; kvzip reads the text once more to score it.
PRESETS = {"fast": "fastkvzip", "best": "kvzip"}


def resolve_preset(evictor: str) -> str:
    """Return the spec that a preset names, and any other spec unchanged."""
    if not isinstance(evictor, str):
        kind = evictor if isinstance(evictor, type) else type(evictor)
        if hasattr(kind, "score"):  # an evictor's class, or an object of it
            own = kind.__name__
            name = getattr(kind, "name", own.lower())
            raise RestoreKVError(
                f"The evictor is named by its spec, which cache files record, not by {own} itself; "
                f"register your own with restorekv.evictors.EVICTORS[{name!r}] = {own}, or as an "
                f"entry point of restorekv.evictors, and pass its spec, such as {name!r}."
            )
        raise RestoreKVError(
            f"The evictor is a preset, or a spec such as {DEFAULT_EVICTOR!r} or "
            f"'snapkv:window=64', not {type(evictor).__name__}."
        )
    name, colon, settings = evictor.partition(":")
    if colon and name in PRESETS:
        raise RestoreKVError(
            f"The preset {name} takes no settings; name its evictor, as in "
            f"{PRESETS[name]}:{settings or 'SETTING=VALUE'}."
        )
    return PRESETS.get(evictor, evictor)


def choose_evictor(evictor: str | None, preset: str | None) -> str:
    """Return the evictor's spec, given an evictor or a preset but not both; `evictor` may name a
    preset, too.
    """
    if preset is None:
        return resolve_preset(evictor or DEFAULT_EVICTOR)
    if evictor is not None:
        raise RestoreKVError(
            "A preset names the evictor; give either a preset or an evictor, not both."
        )
    if preset not in PRESETS:
        raise RestoreKVError(f"There is no preset {preset!r}; use {' or '.join(PRESETS)}.")
    return PRESETS[preset]
