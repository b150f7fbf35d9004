"""A self-test of fixed steps: on a small random decoder, they are compared with plain passes over
growing tails.

The decoder has two layers of the model's attention shape, with RoPE, over compressed contexts of
uneven heads: one for all rows, then two of different documents. Rows are padded on the left. Each
fixed step continues from the ids that the step before chose, without help from the plain passes,
which read the same ids. So a graph that replays stale ids, positions, masks or tails shows in the
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from restorekv.cache.multi_context import fork_caches
from restorekv.cache.ragged import RaggedCache
from restorekv.cache.tail import CompressedLayer
from restorekv.model import attention
from restorekv.model.attention.backend_self_test import LENGTHS, explain_no_obstacle, make_layer
from restorekv.model.attention.reference import make_causal_mask
from restorekv.model.attention.self_tests import Component, Measurement, Target, register_component

LAYERS = 2
HIDDEN = 64
VOCABULARY = 96
PROMPTS = (5, 2, 4)  # tokens of each row's question
RESTORED = (3, 1)  # restore tokens of each document
STEPS = 6  # one as usual, one captured, the others replayed
# Types of modules that import this one, so that it cannot import them.
MakeSteps = Callable[..., Any]  # FixedSteps
PadPrompts = Callable[..., Any]  # pad_prompts, which returns PaddedPrompts


class SmallDecoder:
    """A model that is called like transformers' models, with random weights that are the same on
    every device.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.device = target.device
        self.dtype = target.dtype
        self.config = PretrainedConfig()  # which asks for nothing besides logits
        self.module = torch.nn.Module()  # in place of a model's attention layer
        self.generator = torch.Generator().manual_seed(3)
        width = target.heads * target.groups * target.dim
        self.embedding, self.head = self.draw(VOCABULARY, HIDDEN), self.draw(HIDDEN, VOCABULARY)
        self.layers = [
            {
                "query": self.draw(HIDDEN, width, size=3 * HIDDEN**-0.5),
                "key": self.draw(HIDDEN, target.heads * target.dim, size=HIDDEN**-0.5),
                "value": self.draw(HIDDEN, target.heads * target.dim, size=HIDDEN**-0.5),
                "output": self.draw(width, HIDDEN, size=3 * width**-0.5),
            }
            for _ in range(LAYERS)
        ]
        # RoPE with a small base, so that positions differ in every frequency.
        powers = torch.arange(0, target.dim // 2, dtype=torch.float32, device="cpu") / max(
            target.dim // 2, 1
        )
        self.frequencies = (100.0**-powers).to(target.device)

    def draw(self, *shape: int, size: float = 1.0) -> Tensor:
        """Return random numbers on the device."""
        # On the CPU, so that every device gets the same numbers.
        numbers = (
            torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu") * size
        )
        return numbers.to(self.target.device, self.target.dtype)

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Cache,
        **_: object,
    ) -> SimpleNamespace:
        """ids and positions (B, q), a mask (B, 1, q, columns) or None -> logits (B, 1, V) of the
        last token.
        """
        target = self.target
        states = self.embedding[input_ids]
        angles = position_ids[:, None, :, None].float() * self.frequencies  # (B, 1, q, D / 2)
        tails = cast(list[CompressedLayer], past_key_values.layers)
        for weights, layer in zip(self.layers, tails, strict=True):
            normal = torch.nn.functional.rms_norm(states, (HIDDEN,))
            query = _rotate(
                self.split(normal @ weights["query"], target.heads * target.groups), angles
            )
            key = _rotate(self.split(normal @ weights["key"], target.heads), angles)
            value = self.split(normal @ weights["value"], target.heads)
            keys, values = layer.update(key, value)
            output = attention.attend_layer(
                self.module, query, keys, values, attention_mask, scaling=target.dim**-0.5
            )[0]
            states = states + output.flatten(2) @ weights["output"]
        last = torch.nn.functional.rms_norm(states[:, -1:], (HIDDEN,))
        return SimpleNamespace(logits=last @ self.head)

    def split(self, states: Tensor, heads: int) -> Tensor:
        """(B, q, heads * D) -> (B, heads, q, D)."""
        return states.unflatten(-1, (heads, -1)).transpose(1, 2)

    def make_cache(self, restored: int, first: int) -> RaggedCache:
        """Return a compressed context whose heads keep unequal numbers of pairs."""
        target = self.target
        layers = []
        for number in range(LAYERS):
            # Every layer and head has a different length, as after a global eviction.
            lengths = [
                LENGTHS[(first + number + head) % len(LENGTHS)] % 70 for head in range(target.heads)
            ]
            edges = [sum(lengths[:head]) for head in range(target.heads + 1)]
            layer = make_layer(
                self.draw(edges[-1], target.dim),
                self.draw(edges[-1], target.dim),
                edges,
                self.draw(1, target.heads, restored, target.dim),
                self.draw(1, target.heads, restored, target.dim),
                None,
            )
            layer.restore_keys = layer.keys
            layer.restore_values = layer.values
            layer.seen = 40 + first
            layers.append(layer)
        return RaggedCache(layers)


def _rotate(states: Tensor, angles: Tensor) -> Tensor:
    """Apply RoPE to (B, heads, q, D); the last number of an odd D stays."""
    half = angles.shape[-1]
    first, second, rest = states.float().split([half, half, states.shape[-1] - 2 * half], -1)
    cos = angles.cos()
    sin = angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(
        states.dtype
    )


def measure_steps(
    make_steps: MakeSteps, pad_prompts: PadPrompts, target: Target
) -> Iterator[Measurement]:
    """Compare the logits of every step with those of a plain pass, and ids with those logits."""
    decoder = SmallDecoder(target)
    one, two = (decoder.make_cache(count, first) for first, count in enumerate(RESTORED))
    with attention.suspend_overrides():
        yield from _measure_rows(
            "one document", decoder, [one] * len(PROMPTS), make_steps, pad_prompts
        )
        yield from _measure_rows("two documents", decoder, [one, one, two], make_steps, pad_prompts)


def _measure_rows(
    name: str,
    decoder: SmallDecoder,
    caches: Sequence[RaggedCache],
    make_steps: MakeSteps,
    pad_prompts: PadPrompts,
) -> Iterator[Measurement]:
    """Compare steps for a batch of rows; row i reads caches[i]."""
    prompts = [torch.arange(3, 3 + count, device="cpu") * 7 % VOCABULARY for count in PROMPTS]
    padded = pad_prompts(decoder, caches, prompts)
    ids = padded.ids
    positions = padded.positions
    visible = padded.visible
    plain = fork_caches(caches, PROMPTS)
    fixed = fork_caches(caches, PROMPTS)
    mask = visible[:, None, None] & make_causal_mask(ids.shape[1], visible.shape[1], ids.device)
    # Both caches read the questions in the usual way; only the steps after them differ.
    for cache in (plain, fixed):
        logits = decoder(ids, mask, positions, cache).logits[:, -1]
    ids = logits.max(-1, keepdim=True).indices
    positions = positions[:, -1:] + 1
    steps = make_steps(decoder, fixed, ids, positions, visible, STEPS, strict=True)
    for number in range(STEPS):
        # Copies, since a replayed graph writes its results to the same memory again.
        chosen = steps().clone()
        found = steps.logits.clone()
        visible = torch.nn.functional.pad(visible, (0, 1), value=True)
        wanted = decoder(ids, visible[:, None, None], positions, plain).logits[:, -1]
        yield Measurement(
            f"{name}, step {number + 1}",
            measure_distance(found, wanted),
            get_tolerance(decoder.dtype),
        )
        # The id must be one of the likeliest; a tie may be broken differently.
        highest = found.amax(-1, keepdim=True)
        yield Measurement(
            f"{name}, ids of step {number + 1}",
            measure_distance(found.gather(-1, chosen), highest),
            0.0,
        )
        ids = chosen
        positions = positions + 1


def measure_distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of logits, relative to the largest logit."""
    return float(
        (found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-9)
    )


def get_tolerance(dtype: torch.dtype) -> float:
    """Return the difference that rounding explains after a few layers: some units in the last
    place of `dtype`.
    """
    return 8 * max(torch.finfo(dtype).eps, 8 * torch.finfo(torch.float32).eps)


def register_graph(make_steps: MakeSteps, pad_prompts: PadPrompts) -> None:
    """Register the self-test of CUDA graphs, given what it tests."""
    register_component(
        Component(
            "graph",
            "Decoding with CUDA graphs",
            "Steps are computed one by one, more slowly",
            explain_no_obstacle,
            partial(measure_steps, make_steps, pad_prompts),
        )
    )
