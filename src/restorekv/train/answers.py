"""What a model makes of given answers: one pass over rows of question + answer that share a cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from restorekv.cache.ragged import RaggedCache
from restorekv.model.load import logits
from restorekv.model.shape import decoder
from restorekv.train.distill import answer_rows

HIDDEN, ATTENTION = "hidden", "attention"  # what a layer puts out; what its attention puts out
States = dict[str, Tensor]  # (layers, M, d) each


@dataclass(frozen=True)
class Pass:
    """At the M positions that predict an answer token: the last hidden states (M, d), and what was watched."""

    hidden: Tensor
    states: States


def answer_pass(
    model: PreTrainedModel,
    cache: RaggedCache,
    rows: list[Tensor],
    answers: list[int],
    watch: tuple[str, ...] = (),
) -> Pass:
    """rows: ids of question + answer; answers: how many of them are the answer. Gradients reach the cache."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows]).to(model.device)
    lengths = [(len(row) - answer, answer) for row, answer in zip(rows, answers, strict=True)]
    chosen = answer_rows(lengths, width).to(model.device)
    with recording(model, chosen, watch) as states:
        # Padding is to the right of every answer, so the causal mask alone keeps it unseen.
        hidden = decoder(model)(input_ids=ids, past_key_values=cache.fork(len(rows)), use_cache=True).last_hidden_state
    return Pass(hidden[chosen], {name: torch.stack(found) for name, found in states.items()})


def answer_logits(model: PreTrainedModel, cache: RaggedCache, rows: list[Tensor], answers: list[int]) -> Tensor:
    """Logits that predict the answers, (M, V)."""
    return logits(model, answer_pass(model, cache, rows, answers).hidden)


@contextmanager
def recording(model: PreTrainedModel, chosen: Tensor, watch: tuple[str, ...]) -> Iterator[dict[str, list[Tensor]]]:
    """Collects, layer by layer, the rows `chosen` (B, Q) of what is watched."""
    found: dict[str, list[Tensor]] = {name: [] for name in watch}
    layers: list[nn.Module] = list(decoder(model).layers) if watch else []

    def collect(name: str):
        def hook(module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
            found[name].append((output if isinstance(output, Tensor) else output[0])[chosen])

        return hook

    handles = [
        (layer if name == HIDDEN else layer.self_attn).register_forward_hook(collect(name))
        for layer in layers
        for name in watch
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
