"""The restore pass and its loss by their definitions, in one graph: an oracle of training.

Context, restore tokens, question and answer are one sequence at the positions 0, 1, 2, ..., which
passes through the model at once. A mask for each layer and KV head hides the evicted pairs from the
question, and LoRA is added only at the restore tokens. There is no cache.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from restorekv.compression.full_cache import ScoredContext
from restorekv.model.shape import list_windows
from restorekv.restore.adapter import RestoreAdapter
from restorekv.restore.lora import LORA_A
from restorekv.train.config import TrainConfig
from restorekv.train.draw import StepSample
from restorekv.train.teacher import TeacherTarget

masks: dict[int, Tensor] = {}  # by layer: which keys a query sees, (H, Q, K)


def attend_by_mask(module, query, key, value, mask, scaling, **_) -> tuple[Tensor, None]:
    """Softmax attention with the mask of the layer, for transformers' AttentionInterface."""
    groups = query.shape[1] // key.shape[1]
    visible = masks[module.layer_idx].repeat_interleave(groups, 0)
    logits = query @ key.repeat_interleave(groups, 1).mT * scaling
    weights = logits.masked_fill(~visible, -math.inf).softmax(-1)
    return (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous(), None


AttentionInterface.register("one graph", attend_by_mask)


@dataclass(frozen=True)
class Sequence:
    """A context of T ids, n restore tokens and a tail of ids, for a single pass.

    `keep` (L, H, T) marks the pairs that eviction keeps in the full-attention layers, None without
    eviction. It applies to the tail, and to the restore tokens if `restored_from_evicted`.
    """

    model: PreTrainedModel
    context: Tensor
    tail: Tensor
    adapter: RestoreAdapter | None = None
    restore_tokens: int = 0
    ratio: float = 1.0
    keep: Tensor | None = None
    restored_from_evicted: bool = False

    def run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the last hidden states of the tail, (q, d), and those of every layer and of its
        attention, (layers, q, d) each.
        """
        embed = self.model.get_input_embeddings()
        inputs = [embed(self.context), *self._embed_restore_tokens(), embed(self.tail)]
        sequence = torch.cat(inputs)[None]
        tail = sequence.shape[1] - len(self.tail)
        masks.clear()
        masks.update(self._make_masks(sequence.shape[1]))
        states: dict[str, list[Tensor]] = {"hidden": [], "attention": []}

        def record(name):
            def hook(module, inputs, output):
                output = output if isinstance(output, Tensor) else output[0]
                states[name].append(output[0, tail:])

            return hook

        handles = []
        for layer in self.model.model.layers:
            handles.append(layer.register_forward_hook(record("hidden")))
            handles.append(layer.self_attn.register_forward_hook(record("attention")))
        # Masks come from here, whatever kinds of them the model wants.
        no_masks = dict.fromkeys(("full_attention", "sliding_attention"))
        hybrid = any(list_windows(self.model.config))
        with self._add_lora(sequence.shape[1]), self._attend_by_mask():
            output = self.model.model(
                inputs_embeds=sequence,
                position_ids=torch.arange(sequence.shape[1])[None],
                attention_mask=no_masks if hybrid else None,
                use_cache=False,
            )
        for handle in handles:
            handle.remove()
        stacked = {name: torch.stack(layers) for name, layers in states.items()}
        return output.last_hidden_state[0, tail:], stacked

    def _embed_restore_tokens(self) -> list[Tensor]:
        if not self.restore_tokens:
            return []
        inputs = self.adapter.embeddings
        if self.adapter.ratio_vectors is not None:
            inputs = inputs + math.log(self.ratio / 0.1) * self.adapter.ratio_vectors
        return [inputs[: self.restore_tokens].to(self.model.dtype)]

    def _make_masks(self, length: int) -> dict[int, Tensor]:
        heads = self.model.config.num_key_value_heads
        positions = torch.arange(length)
        distance = positions[:, None] - positions
        context = len(self.context)
        first = context if self.restored_from_evicted else context + self.restore_tokens
        evicted = iter(self.keep if self.keep is not None else ())
        made = {}
        for layer, window in enumerate(list_windows(self.model.config)):
            mask = (distance >= 0).repeat(heads, 1, 1)
            if window is not None:
                mask &= distance < window
            elif self.keep is not None:
                mask[:, first:, :context] &= next(evicted)[:, None]
            made[layer] = mask
        return made

    @contextmanager
    def _add_lora(self, length: int) -> Iterator[None]:
        """Add alpha / r * B A x at the restore tokens, in float32, as PEFT does."""
        handles = []
        if self.restore_tokens:
            config = self.adapter.lora_config
            gate = torch.zeros(length, 1)
            start = len(self.context)
            gate[start : start + self.restore_tokens] = config.lora_alpha / config.r
            parameters = self.adapter.lora_parameters

            def make_hook(a, b):
                return lambda module, inputs, output: (
                    output + gate * (inputs[0].float() @ a.T @ b.T)
                )

            for name in parameters:
                path, _, part = name.partition(LORA_A)
                if part == "" and name.endswith(LORA_A):
                    hook = make_hook(parameters[name], parameters[f"{path}.lora_B.weight"])
                    handles.append(self.model.get_submodule(path).register_forward_hook(hook))
        yield
        for handle in handles:
            handle.remove()

    @contextmanager
    def _attend_by_mask(self) -> Iterator[None]:
        before = self.model.config._attn_implementation
        self.model.config._attn_implementation = "one graph"
        try:
            yield
        finally:
            self.model.config._attn_implementation = before


def compute_loss(
    adapter: RestoreAdapter,
    prepared: ScoredContext,
    targets: list[TeacherTarget],
    sample: StepSample,
    config: TrainConfig,
) -> Tensor:
    """Return the loss of `compute_sample_loss`; only ids and lengths of the targets are used."""
    model = prepared.model
    text = prepared.context
    restored = prepared.with_restore_cache(adapter)
    budget = restored.make_budget(sample.ratio, sample.restore_tokens)
    keep = prepared.config.mark_kept(prepared.competing_scores(), budget.retained)
    keep = pad(keep, (text.num_tokens - keep.shape[-1], 0), value=True)
    losses = []
    weights = []
    for question in sample.questions:
        target = targets[question]
        answer = target.answer_length
        # The last id of the question predicts the first one of the answer.
        predicting = slice(len(target.ids) - answer - 1, len(target.ids) - 1)
        with torch.no_grad():
            teacher, teacher_states = Sequence(model, text.ids[0], target.ids).run()
        student, student_states = Sequence(
            model,
            text.ids[0],
            target.ids,
            adapter,
            budget.restore_tokens,
            float(budget.ratio),
            keep,
            config.restore_from == "evicted",
        ).run()
        log_p = model.lm_head(teacher[predicting]).log_softmax(-1)
        log_q = model.lm_head(student[predicting]).log_softmax(-1)
        forward = (log_p.exp() * (log_p - log_q)).sum(-1)
        reverse = (log_q.exp() * (log_q - log_p)).sum(-1)
        kinds = {"forward": forward, "reverse": reverse, "symmetric": (forward + reverse) / 2}
        loss = kinds[config.kl]
        for name, weight in config.state_weights().items():
            right = teacher_states[name][:, predicting]
            distance = (student_states[name][:, predicting] - right).square().sum(-1)
            loss = loss + weight * (distance / right.square().sum(-1)).mean(0)
        losses.append(loss)
        decay = config.answer_decay or math.inf
        weights.append(torch.exp(-torch.arange(answer) / decay))
    weight = torch.cat(weights)
    loss = torch.cat(losses) * weight / weight.mean()
    if config.reduction == "sum":
        return loss.sum() / len(sample.questions)
    return loss.mean()
