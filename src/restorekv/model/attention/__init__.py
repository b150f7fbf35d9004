"""The attention function "restorekv", which importing this folder registers with transformers.

A backend computes softmax(q [K_context; K_tail]^T * scale + bias) [V_context; V_tail];
`reference.py` is the definition. In models with learned sinks a logit of each query head is in that
softmax too (sinks.py). dispatch.py chooses the backend of each call.
"""

from restorekv.model.attention.dispatch import (
    BACKENDS,
    NAME,
    PROJECTIONS,
    Projection,
    attend_layer,
    choose_backend,
    force_backend,
    get_observer,
    inspect_attention,
    install_attention,
    observe_attention,
    plan_kernels,
    suspend_overrides,
)
from restorekv.model.attention.packed import quantize_context

__all__ = [
    "BACKENDS",
    "NAME",
    "PROJECTIONS",
    "Projection",
    "attend_layer",
    "choose_backend",
    "force_backend",
    "get_observer",
    "inspect_attention",
    "install_attention",
    "observe_attention",
    "plan_kernels",
    "quantize_context",
    "suspend_overrides",
]
