"""What must hold before the first step, on one context: a mistake here would cost hours of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from restorekv.cache.ragged import RaggedCache
from restorekv.compression.prepared import ScoredContext
from restorekv.errors import RestoreKVError
from restorekv.model import attention
from restorekv.model.load import logits
from restorekv.model.prefill import read_only_view
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.answers import answer_pass
from restorekv.train.distill import divergence, from_hidden
from restorekv.train.lessons import TeacherCache
from restorekv.train.teacher import TeacherTarget
from restorekv.train.visit import StepSample

SAME = {torch.float32: 1e-3, torch.float64: 1e-6}  # of losses, absolute and relative; else ROUNDED
ROUNDED = 0.05


@dataclass(frozen=True)
class Checks:
    """Mean loss over the answer tokens of one context (Eq. 8) at `ratio`: from the full cache, evicted, restored."""

    ratio: float
    full: float
    base: float
    restored: float

    def __str__(self) -> str:
        return (
            f"Before training, loss at r = {self.ratio:g} on one context: {self.full:.4f} full cache, "
            f"{self.base:.4f} evicted, {self.restored:.4f} with the adapter as it is."
        )


@torch.no_grad()
def check(adapter: RestoreAdapter, lessons: TeacherCache, visit: StepSample) -> Checks:
    """Compares what must be equal on the questions of a visit; raises RestoreKVError where it is not.

    The teacher's stored states are those of the plain model on its dense cache; the evicted student is the one that
    the definition of ragged attention gives; with no restore tokens the adapter changes nothing.
    """
    prepared, every = lessons[visit.index]
    taught = [every[question] for question in visit.questions]
    ratio = lessons.config.ratio_max
    same = SAME.get(lessons.model.dtype, ROUNDED)

    def loss(cache: RaggedCache) -> float:
        return float(losses(lessons, cache, taught).mean())

    full = float(plain(lessons, prepared, taught).mean())
    if not full < same:
        raise RestoreKVError(
            f"The teacher's answers are not those of this model on its full cache (loss {full:.4f}); build the data "
            "with this model, or delete the folder of --store."
        )
    restored = prepared.with_restore_cache(adapter)
    base, none = loss(prepared.evict(ratio)), loss(restored.evict(ratio, 0))
    with attention.using("naive"):
        defined = loss(prepared.evict(ratio))
    for what, found in (("with no restore tokens", none), ("by the definition of ragged attention", defined)):
        if not abs(found - base) <= same * (1 + base):
            raise RestoreKVError(f"The evicted cache's loss is {base:.4f}, but {found:.4f} {what}; report this.")
    return Checks(ratio, full, base, loss(restored.evict(ratio)))


def losses(lessons: TeacherCache, cache: RaggedCache, taught: list[TeacherTarget]) -> Tensor:
    """(M,) over all questions of the context, symmetric."""
    seen = answer_pass(lessons.model, cache, [x.ids for x in taught], [x.answer for x in taught])
    return from_hidden(lessons.model, torch.cat([x.hidden for x in taught]), seen.hidden)


def plain(lessons: TeacherCache, prepared: ScoredContext, taught: list[TeacherTarget]) -> Tensor:
    """`losses` of the model on the dense cache, one question at a time, by the logits that it makes itself."""
    model, found = lessons.model, []
    for lesson in taught:
        ids, cache = lesson.ids[None].to(model.device), read_only_view(prepared.full)
        made = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=lesson.answer + 1)
        found.append(divergence(logits(model, lesson.hidden), made.logits[0, :-1]))
    return torch.cat(found)
