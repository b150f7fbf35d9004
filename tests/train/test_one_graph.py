"""Training is that of the paper's equations: the same loss and gradients as in one graph without a
cache, and the same steps as a loop of a few lines.
"""

import math
from dataclasses import replace

import pytest
import torch

from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.draw import StepSample, draw_step_samples
from restorekv.train.loop import (
    LOSS_OFFSET,
    compute_sample_loss,
    make_initial_adapter,
    train_adapter,
)
from restorekv.train.teacher_cache import TeacherCache
from tests.helpers.models import build_model
from tests.helpers.one_graph import compute_loss
from tests.helpers.training import CONFIG, EXAMPLES, losses

# One KV head, so that no two are alike by accident.
MODELS = {"qwen3": {}, "llama": {"tie_word_embeddings": True}, "gemma3": {"num_key_value_heads": 1}}


def build_exact_model(family):
    """In float64, so that differences are those of LoRA's float32 alone."""
    return build_model(family, **MODELS[family]).double()


def make_random_adapter(model, config):
    """An adapter whose every weight matters."""
    adapter = RestoreAdapter.create(model, config.restore_tokens, rank=2, alpha=4)
    if config.knows_ratio:
        adapter.add_ratio_vectors()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in adapter.lora:
            weight.normal_(std=0.3, generator=generator)
        if adapter.ratio_vectors is not None:
            adapter.ratio_vectors.normal_(std=0.3, generator=generator)
    return adapter


def take_gradients(adapter, loss):
    """The gradient of every weight, None where it is zero or missing."""
    loss.backward()
    gradients = {}
    for name, weight in adapter.named_parameters():
        has_any = weight.grad is not None and weight.grad.any()
        gradients[name] = weight.grad if has_any else None
        weight.grad = None
    return gradients


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize(
    ("ratio", "tokens", "changes"),
    [
        ("0.3", 2, {}),
        ("0.2", 1, {"kl": "forward", "reduction": "sum", "allocation": "per-head"}),
        ("0.2", 2, {"kl": "reverse", "answer_decay": 2.0, "evictor": "knorm"}),
        ("0.15", 2, {"hidden_weight": 0.5, "attention_weight": 0.25, "evictor": "snapkv"}),
        ("0.2", 1, {"knows_ratio": True, "prefix_policy": "counted", "evictor": "knorm"}),
        ("0.2", 1, {"restore_from": "evicted", "knows_ratio": True, "evictor": "knorm"}),
        # More restore tokens than gemma3's windows have columns.
        ("0.4", 15, {"restore_tokens": 16, "evictor": "knorm"}),
    ],
)
def test_loss_and_gradients_are_those_of_one_graph(tiny_tokenizer, family, ratio, tokens, changes):
    model = build_exact_model(family)
    config = replace(CONFIG, **changes)
    prepared, targets = TeacherCache(model, tiny_tokenizer, EXAMPLES, config).get_context(1)
    adapter = make_random_adapter(model, config)
    sample = StepSample(1, (0, 1), ratio, tokens)
    found = compute_sample_loss(adapter, prepared, targets, sample, config)
    expected = compute_loss(adapter, prepared, targets, sample, config)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    gradients = take_gradients(adapter, found)
    oracle = take_gradients(adapter, expected)
    assert gradients["embeddings"] is not None
    for name, right in oracle.items():
        if right is None:
            assert gradients[name] is None, name
            continue
        scale = float(right.abs().max())
        torch.testing.assert_close(gradients[name], right, rtol=1e-4, atol=1e-4 * scale, msg=name)
    # Tokens that were not used learn nothing.
    assert not gradients["embeddings"][tokens:].any()


@pytest.mark.parametrize("room", [0.5, 1, 2, 2.5])
def test_a_budget_at_its_edge_has_the_loss_of_one_graph(tiny_tokenizer, room):
    """Of n = 2 restore tokens as many are used as fit, and the evictor gets the rest."""
    model = build_exact_model("llama")
    config = replace(CONFIG, evictor="knorm")
    prepared, targets = TeacherCache(model, tiny_tokenizer, EXAMPLES, config).get_context(1)
    adapter = make_random_adapter(model, config)
    ratio = f"{room / prepared.context.text_tokens + 5e-7:.6f}"
    sample = StepSample(1, (0, 1), ratio, 2)
    cache = prepared.with_restore_cache(adapter).evict(ratio, 2)
    assert cache.restore_length == min(int(room), 2)
    found = compute_sample_loss(adapter, prepared, targets, sample, config)
    expected = compute_loss(adapter, prepared, targets, sample, config)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"draws": 2, "nested": True, "loss_power": 0.5, "ratio_weight": 1.0},
        {"knows_ratio": True, "loss_power": 0.0, "clip": 0.0, "evictor": "knorm,snapkv"},
        {"reduction": "sum", "clip": 0.1, "weight_decay": 1.0},
    ],
)
def test_steps_are_those_of_a_plain_loop(tiny_tokenizer, tmp_path, changes):
    model = build_exact_model("llama")
    config = replace(CONFIG, **{"lr": 1e-3, "evictor": "knorm", **changes})
    start = make_initial_adapter(model, tiny_tokenizer, config).trainable_state()
    trained = train_adapter(model, tiny_tokenizer, EXAMPLES, config, tmp_path / "run")
    adapter, curve = train_in_one_graph(model, tiny_tokenizer, config)
    assert losses(tmp_path / "run") == pytest.approx(curve, rel=1e-4)
    right = adapter.trainable_state()
    for name, found in trained.trainable_state().items():
        moved = float((right[name] - start[name]).abs().max())
        torch.testing.assert_close(found, right[name], rtol=0, atol=1e-3 * moved, msg=name)


def train_in_one_graph(model, tokenizer, config):
    """Take all steps of a run on the objective itself, with AdamW by its formulas; return the
    adapter and the loss of every step.
    """
    contexts = TeacherCache(model, tokenizer, EXAMPLES, config)
    adapter = make_initial_adapter(model, tokenizer, config)
    # Nothing comes from what the last layer does after its keys and values.
    last = f"layers.{model.config.num_hidden_layers - 1}."
    weights = [adapter.embeddings]
    if adapter.ratio_vectors is not None:
        weights.append(adapter.ratio_vectors)
    for name, weight in adapter.lora_parameters.items():
        if last not in name or "k_proj" in name or "v_proj" in name:
            weights.append(weight)
    means = [torch.zeros_like(weight) for weight in weights]
    squares = [torch.zeros_like(weight) for weight in weights]
    curve = []
    for step in range(config.steps):
        samples = draw_step_samples(config, step, EXAMPLES)
        step_losses = []
        objective = 0
        for sample in samples:
            prepared, targets = contexts.get_context(sample.index, sample.evictor)
            loss = compute_loss(adapter, prepared, targets, sample, config)
            step_losses.append(float(loss.detach()))
            power = config.loss_power
            shifted = loss + LOSS_OFFSET
            minimized = shifted**power / power if power else shifted.log()
            weight = (float(sample.ratio) / config.ratio_max) ** config.ratio_weight
            objective = objective + weight * minimized / len(samples)
        curve.append(sum(step_losses) / len(samples))
        gradients = torch.autograd.grad(objective, weights)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        shrink = min(1.0, config.clip / norm) if config.clip else 1.0
        if step < config.warmup:
            rate = config.lr * (step + 1) / config.warmup
        else:
            done = (step - config.warmup) / (config.steps - config.warmup)
            rate = config.lr * (1 + math.cos(math.pi * done)) / 2
        with torch.no_grad():
            for weight, gradient, mean, square in zip(
                weights, gradients, means, squares, strict=True
            ):
                mean.lerp_(shrink * gradient, 0.1)
                square.lerp_((shrink * gradient).square(), 0.001)
                weight.mul_(1 - rate * config.weight_decay)
                size = (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
                weight.sub_(rate * mean / (1 - 0.9 ** (step + 1)) / size)
    return adapter, curve
