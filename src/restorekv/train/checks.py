"""Checks on one context before the first step, since a mistake would cost hours."""

from dataclasses import dataclass

import torch

from restorekv.cache.ragged import RaggedCache
from restorekv.errors import RestoreKVError
from restorekv.model import attention
from restorekv.model.cache_argument import pass_cache
from restorekv.model.prefill import read_only_view
from restorekv.model.shape import compute_logits
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.draw import StepSample
from restorekv.train.loss import compute_divergence, compute_hidden_divergence, run_answers
from restorekv.train.teacher_cache import TeacherCache

# How far losses may differ, absolutely and relatively; ROUNDED for other dtypes.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
ROUNDED = 0.05


@dataclass(frozen=True)
class SetupLosses:
    """Mean loss over one context's answer tokens (Eq. 8) at `ratio`: with the full, evicted and
    restored cache.
    """

    ratio: float
    full: float
    base: float
    restored: float
    steps_done: int

    def __str__(self) -> str:
        when = "Before training"
        if self.steps_done:
            # The context is not the one that was checked at the start.
            noun = "step" if self.steps_done == 1 else "steps"
            when = f"After {self.steps_done} {noun}"
        return (
            f"{when}, loss at r = {self.ratio:g} on one context: {self.full:.4f} full "
            f"cache, {self.base:.4f} evicted, {self.restored:.4f} with the adapter as it is."
        )


@torch.no_grad()
def check_setup(
    adapter: RestoreAdapter, teacher_cache: TeacherCache, sample: StepSample, steps_done: int = 0
) -> SetupLosses:
    """Refuse a setup if losses that must be equal differ on a sample's questions.

    The teacher's stored states must be those of the plain model on its dense cache. The evicted
    student must give the same loss by the definition of ragged attention, and with the adapter at 0
    restore tokens.

    Args:
        adapter: The adapter that is trained.
        teacher_cache: The full caches and what the model answers with them.
        sample: The context, with its questions and evictor.
        steps_done: How many steps the adapter has been trained.

    Raises:
        RestoreKVError: Losses that must be equal differ.
    """
    model = teacher_cache.model
    ratio = teacher_cache.config.ratio_max
    prepared, targets = teacher_cache.get_context(sample.index, sample.evictor)
    targets = [targets[question] for question in sample.questions]
    rows = [target.ids for target in targets]
    answers = [target.answer_length for target in targets]
    teacher = torch.cat([target.hidden for target in targets])
    tolerance = TOLERANCE.get(model.dtype, ROUNDED)

    def compute_loss(cache: RaggedCache) -> float:
        student = run_answers(model, cache, rows, answers)
        return float(compute_hidden_divergence(model, teacher, student.hidden).mean())

    # First: are the teacher's stored states of this model and this text? They are compared with
    # the plain model's own logits on the dense cache, one question at a time.
    plain = []
    for target in targets:
        ids = target.ids[None].to(model.device)
        dense = read_only_view(prepared.full)
        output = model(
            input_ids=ids,
            **pass_cache(model, dense),
            use_cache=True,
            logits_to_keep=target.answer_length + 1,
        )
        stored = compute_logits(model, target.hidden)
        plain.append(compute_divergence(stored, output.logits[0, :-1]))
    full = float(torch.cat(plain).mean())
    # Not `full >= tolerance`, which NaN would pass.
    if not full < tolerance:
        raise RestoreKVError(
            f"The teacher's answers are not those of this model on its full cache (loss "
            f"{full:.4f}); build the data with this model, or delete the folder of --store."
        )
    restored = prepared.with_restore_cache(adapter)
    # Then the evicted student with the adapter at n = 0, and with attention by its definition.
    base = compute_loss(prepared.evict(ratio))
    none = compute_loss(restored.evict(ratio, 0))
    with attention.force_backend("reference"):
        defined = compute_loss(prepared.evict(ratio))
    for what, other in (
        ("with no restore tokens", none),
        ("by the definition of ragged attention", defined),
    ):
        if not abs(other - base) <= tolerance * (1 + base):
            raise RestoreKVError(
                f"The evicted cache's loss is {base:.4f}, but {other:.4f} {what}; report this."
            )
    return SetupLosses(ratio, full, base, compute_loss(restored.evict(ratio)), steps_done)
