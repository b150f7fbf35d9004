"""Training gates: planted ones are found again, interruptions lose nothing, and the command tells
mistakes plainly.
"""

import contextlib
import copy
import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch

from restorekv import evictors
from restorekv.data.overlap import find_near_copies
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evictors import gate_file
from restorekv.evictors.kvzap import KVzap
from restorekv.model import gate_kinds
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill
from restorekv.model.prompt import make_context
from restorekv.model.shape import CacheShape
from restorekv.train import features as features_module
from restorekv.train.features import Features, collect_features
from restorekv.train.gate import (
    FITS,
    _scale_rate,
    compute_cross_entropy,
    compute_spearman,
    compute_top_overlap,
    fit_linear,
    measure_gate,
    train_gate,
    unstack_layers,
)
from restorekv.train.gate_config import USED_SETTINGS, GateConfig
from tests.helpers.cli_world import cli
from tests.helpers.data_world import text
from tests.helpers.gates import random_layers
from tests.helpers.models import build_model

CPU = torch.device("cpu")
TEXTS = [
    f"the code of the red house is {word}; who lives in the blue house? " * 3
    for word in ("seven", "ten", "two")
]


def silent(*_):
    pass


def planted(kind, predict, tokens=600, scale=1.0):
    """Inputs drawn at random and what a random gate of the shape of the tiny model says of them."""
    model = build_model("qwen3")
    layers = random_layers(kind, model, seed=7)
    stacked = {name: torch.stack([layer[name] for layer in layers]) * scale for name in layers[0]}
    hidden = torch.randn(tokens, 3, 32, generator=torch.Generator().manual_seed(2))
    target = predict(stacked, hidden.transpose(0, 1)).permute(2, 0, 1)
    return CacheShape.from_model(model), stacked, hidden, target


def test_ridge_finds_a_planted_linear_gate():
    shape, gate, hidden, target = planted("kvzap-linear", KVzap.predict, scale=0.2)
    data = Features(hidden, target.exp(), torch.zeros(600))
    found = fit_linear(data, shape, GateConfig("kvzap-linear", alpha=1e-9), CPU, silent)
    for name in gate:
        torch.testing.assert_close(found[name], gate[name], rtol=1e-4, atol=1e-5)


def test_ridge_is_the_penalised_minimum():
    """At the minimum of |y - XW - b|^2 + alpha |W|^2 the gradient vanishes, and the intercept has
    no penalty.
    """
    shape, _, hidden, target = planted("kvzap-mlp", KVzap.predict)
    data = Features(hidden, target.exp(), torch.zeros(600))
    found = fit_linear(data, shape, GateConfig("kvzap-linear", alpha=30.0), CPU, silent)
    weight, bias = (found[name].double().requires_grad_() for name in ("weight", "bias"))
    error = torch.einsum("nld,lhd->nlh", hidden.double(), weight) + bias - target.double()
    loss = error.square().sum() + 30 * weight.square().sum()
    for gradient in torch.autograd.grad(loss, (weight, bias)):
        assert gradient.abs().max() < 1e-2


def test_a_floor_stands_for_log_zero():
    shape, _, hidden, target = planted("kvzap-linear", KVzap.predict)
    data = Features(hidden, torch.zeros_like(target), torch.zeros(600))
    found = fit_linear(data, shape, GateConfig("kvzap-linear", floor=1e-3), CPU, silent)
    torch.testing.assert_close(found["bias"], torch.full((3, 2), math.log(1e-3)))


@pytest.mark.parametrize("kind", [pytest.param("fastkvzip", marks=pytest.mark.slow), "kvzap-mlp"])
def test_training_comes_close_to_a_planted_gate(kind):
    fit, predict = FITS[kind]
    shape, _, hidden, target = planted(kind, predict, tokens=1500)
    target = target if kind == "fastkvzip" else target.exp()
    data = Features(hidden, target, torch.arange(1500) // 500)
    train, held = data.split_held_out(0.3)
    length = {"fastkvzip": ("steps", 400), "kvzap-mlp": ("epochs", 40)}
    name, most = length[kind]
    few, many = (
        GateConfig(kind, lr=1e-9, **{name: 1}),
        GateConfig(kind, batch=200, **{name: most}),
    )
    before, after = (
        measure_gate(
            held, fit(train, shape, config.resolve(shape), CPU, silent), predict, config, CPU
        )
        for config in (few, many)
    )
    least = 0.0
    if kind == "fastkvzip":  # of soft targets the entropy remains
        least = float(compute_cross_entropy(*[held.target.permute(1, 2, 0)] * 2))
    assert after["held_out_loss"] - least < 0.3 * (before["held_out_loss"] - least)
    assert after["spearman"] > 0.8 > before["spearman"]


def test_the_loss_sums_heads_and_layers_and_averages_tokens():
    scores, target = torch.rand(2, 3, 2, 5, generator=torch.Generator().manual_seed(0)).double()
    total = 0.0
    for layer in range(3):
        for head in range(2):
            for p, y in zip(
                scores[layer, head].tolist(), target[layer, head].tolist(), strict=True
            ):
                total -= (y * math.log(p) + (1 - y) * math.log(1 - p)) / 5
    assert float(compute_cross_entropy(scores, target)) == pytest.approx(total)


def test_learning_rate_factors():
    steps = [0, 1, 49, 50, 2499, 2500, 3749, 3750, 4999]
    assert [_scale_rate(step, 5000) for step in steps] == [
        0,
        0.01,
        0.49,
        1,
        1,
        0.5,
        0.5,
        0.25,
        0.25,
    ]


def test_ranks_and_overlap():
    first = torch.tensor([0.1, 0.9, 0.5, 0.7])
    assert float(compute_spearman(first, first.exp())) == pytest.approx(1)
    assert float(compute_spearman(first, -first)) == pytest.approx(-1)
    assert float(compute_spearman(first, torch.tensor([1.0, 3, 2, 4]))) == pytest.approx(
        1 - 6 * 2 / (4 * 15)
    )
    tied = torch.tensor([0.0, 0.0, 1.0, 1.0])  # ranks 1.5, 1.5, 3.5, 3.5
    assert float(compute_spearman(tied, torch.tensor([1.0, 2, 3, 4]))) == pytest.approx(2 / 5**0.5)
    assert float(compute_spearman(torch.zeros(4), first)) == 0, (
        "what knows nothing agrees with nothing"
    )
    assert float(compute_top_overlap(first, torch.tensor([1.0, 3, 2, 4]), 0.25)) == 0
    assert float(compute_top_overlap(first, torch.tensor([1.0, 3, 2, 4]), 0.5)) == 1


@pytest.mark.parametrize("share", [0.01, 0.8, 0.99])
def test_some_contexts_are_left_to_train_on(share):
    data = Features(torch.zeros(4, 1, 2), torch.zeros(4, 1, 1), torch.arange(4) // 2)
    train, held = data.split_held_out(share)
    assert len(train.target) == len(held.target) == 2


def test_whole_contexts_are_held_out():
    data = Features(torch.zeros(50, 1, 2), torch.zeros(50, 1, 1), torch.arange(50) // 5)
    train, held = data.split_held_out(0.2)
    assert len(train.target) == 40 and len(held.document.unique()) == 2
    assert not set(train.document.tolist()) & set(held.document.tolist())
    with pytest.raises(RestoreKVError, match="at least two"):
        Features(torch.zeros(5, 1, 2), torch.zeros(5, 1, 1), torch.zeros(5)).split_held_out(0.2)


@pytest.mark.parametrize("chunk", [4096, 17])
def test_features_are_inputs_and_scores_of_the_same_tokens(
    tiny_model, tiny_tokenizer, tmp_path, monkeypatch, chunk
):
    """Also of a text that is read in several chunks."""
    context, inputs = make_context(tiny_tokenizer, TEXTS[1]), {}
    with observe_layers(tiny_model, lambda view: inputs.update({view.layer: view.hidden})):
        full = prefill(tiny_model, context.ids)
    inputs = torch.stack([inputs[layer] for layer in range(3)])[:, context.prefix_length :]
    # Features hold the inputs in half of the bits.
    inputs = inputs.to(torch.bfloat16).float()
    scores = evictors.make_evictor("kvzip+").score(tiny_model, tiny_tokenizer, context, full)
    monkeypatch.setattr("restorekv.model.prefill.CHUNK", chunk)
    found = collect_features(tiny_model, tiny_tokenizer, TEXTS, "kvzip+", 20, 0, tmp_path / "f")
    assert found.hidden.shape == (60, 3, 32) and found.hidden.dtype == torch.bfloat16
    assert found.document.tolist() == [0] * 20 + [1] * 20 + [2] * 20
    columns = []
    for hidden, target in zip(found.hidden[20:40], found.target[20:40], strict=True):
        same = (inputs - hidden[:, None]).abs().amax((0, 2))
        columns.append(int(same.argmin()))
        assert same.min() < 0.05  # the last bit may differ; other tokens are at 2 and more
        torch.testing.assert_close(target, scores[..., columns[-1]], rtol=1e-3, atol=1e-5)
    assert len(set(columns)) == 20, "every token is drawn once"


def test_an_interruption_loses_nothing(tiny_tokenizer, tmp_path, monkeypatch):
    model, observe, calls = build_model("qwen3"), features_module.observe_context, []

    def stopping(*arguments):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(1)
        return observe(*arguments)

    config = GateConfig(tokens=30, steps=5, held_out=0.3)
    whole = train_gate(model, tiny_tokenizer, TEXTS, config, tmp_path / "whole", tmp_path / "f0")
    monkeypatch.setattr(features_module, "observe_context", stopping)
    arguments = (model, tiny_tokenizer, TEXTS, config, tmp_path / "gate", tmp_path / "f1")
    with pytest.raises(KeyboardInterrupt):
        train_gate(*arguments)
    assert len(list((tmp_path / "f1" / "features").iterdir())) == 2
    assert not (tmp_path / "gate").exists()
    with pytest.raises(RestoreKVError, match="holds features already"):
        train_gate(*arguments)
    calls.clear()
    resumed = train_gate(*arguments, resume=True)
    assert len(calls) == 1, "only the third context was left"
    assert resumed.card == whole.card
    sums = [gate_file.read_gate(tmp_path / name).digest for name in ("whole", "gate")]
    assert sums[0] == sums[1], "bit for bit"


def test_near_copies_of_what_is_checked_on_are_not_trained_on(tiny_tokenizer, tmp_path):
    model = build_model("qwen3")
    texts = [text(number, 60) for number in range(4)]
    config = GateConfig("kvzap-linear", tokens=20, held_out=0.25)
    alone = train_gate(model, tiny_tokenizer, texts, config, tmp_path / "a", tmp_path / "fa")
    # The first is held out; another version of it would be in both halves.
    copied = [*texts, texts[0].upper() + " Revised on Monday."]
    assert find_near_copies(copied[1:], copied[:1]) == [3]
    config = replace(config, held_out=0.2)
    with pytest.warns(RestoreKVWarning, match="1 of 5 contexts are nearly the same as one"):
        gate = train_gate(model, tiny_tokenizer, copied, config, tmp_path / "b", tmp_path / "fb")
    for one, other in zip(alone.layers, gate.layers, strict=True):
        assert all(torch.equal(other[name], value) for name, value in one.items())
    assert gate.card.figures == alone.card.figures
    with pytest.raises(RestoreKVError, match="none can check the gate"):
        train_gate(model, tiny_tokenizer, copied[::4], config, tmp_path / "c", tmp_path / "fc")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_program_without_gradients_trains_all_the_same(
    tiny_model, tiny_tokenizer, tmp_path, mode
):
    config = GateConfig("fastkvzip", steps=2)
    gates = []
    for context in (contextlib.nullcontext, mode):
        place = tmp_path / context.__name__
        with context():
            gates.append(
                train_gate(tiny_model, tiny_tokenizer, TEXTS, config, place, tmp_path / "features")
            )
        shutil.rmtree(tmp_path / "features")
    for one, other in zip(gates[0].layers, gates[1].layers, strict=True):
        assert all(torch.equal(other[name], value) for name, value in one.items())


def test_features_of_other_settings_are_not_taken(tiny_tokenizer, tmp_path, monkeypatch):
    model, folder = build_model("qwen3"), tmp_path / "f"

    def collect(model, tokenizer, texts, target, tokens, seed):
        """Return how many contexts were observed anew."""
        observe, calls = features_module.observe_context, []

        def counting(*arguments):
            calls.append(1)
            return observe(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(features_module, "observe_context", counting)
            collect_features(model, tokenizer, texts, target, tokens, seed, folder, resume=True)
        return len(calls)

    same = (model, tiny_tokenizer, TEXTS, "kvzip", 5, 0)
    assert collect(*same) == 3 and collect(*same) == 0
    cases = [
        (build_model("qwen3", seed=1), TEXTS, "kvzip", 5, 0),
        (model, TEXTS[::-1], "kvzip", 5, 0),
        (model, TEXTS, "kvzip+", 5, 0),
        (model, TEXTS, "kvzip", 6, 0),
        (model, TEXTS, "kvzip", 5, 1),
    ]
    for other, texts, target, tokens, seed in cases:
        assert collect(other, tiny_tokenizer, texts, target, tokens, seed) >= 2
    # The evictor reads what the template puts after a question.
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template += "{% if add_generation_prompt %} The code is 12. {% endif %}"
    assert collect(model, tokenizer, TEXTS, "kvzip", 5, 0) == 3
    with monkeypatch.context() as patch:
        patch.setattr("restorekv.spec.digest_code", lambda kind: "other code")
        assert collect(*same) == 3
    assert collect(*same) == 0
    for path in (folder / "features").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(RestoreKVError, match=r"cut short.*; delete it to have it computed again"):
        collect(*same)


def test_a_layer_of_stacked_parameters():
    [first, second] = unstack_layers({"weight": torch.arange(6.0).view(2, 3)})
    assert first["weight"].tolist() == [0, 1, 2] and second["weight"].tolist() == [3, 4, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("train_gate")
    build_model("qwen3").save_pretrained(folder / "model")
    tiny_tokenizer.save_pretrained(folder / "model")
    rows = [{"context": text, "questions": ["who?"]} for text in TEXTS]
    (folder / "data").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "one").write_text(json.dumps(rows[0]))
    return folder


SHORT = {"fastkvzip": ("--steps", 3), "kvzap-linear": (), "kvzap-mlp": ("--epochs", 1)}


def command(folder, out, *more):
    kind = more[more.index("--kind") + 1] if "--kind" in more else "fastkvzip"
    data = () if "--data" in more else ("--data", folder / "data")
    return [
        "train-gate",
        "--model",
        folder / "model",
        *data,
        "--out",
        out,
        "--tokens",
        20,
        *SHORT.get(kind, ()),
        *more,
    ]


@pytest.mark.parametrize(
    ("kind", "flag", "value"),
    [
        ("kvzap-linear", "--lr", 0.1),
        ("kvzap-linear", "--width", 64),
        ("kvzap-mlp", "--steps", 9),
        ("fastkvzip", "--floor", 1e-3),
    ],
)
def test_a_flag_that_the_kind_does_not_use_is_refused(folder, tmp_path, kind, flag, value):
    out = tmp_path / "gate.safetensors"
    result = cli(*command(folder, out, "--kind", kind, flag, value))
    said = f"A gate of the kind {kind} does not use {flag[2:]} ({flag} in the shell); leave it out."
    assert result.code == 1 and result.err == f"error: {said}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", gate_kinds.KINDS)
def test_the_command_makes_a_gate_that_works(folder, tmp_path, kind):
    out = tmp_path / "gate.safetensors"
    result = cli(*command(folder, out, "--kind", kind))
    assert result.code == 0 and "spearman" in result.out and "predicts" in result.out, result
    card = gate_file.read_gate(out).card
    assert card.kind == kind and card.target == gate_kinds.TARGETS[kind]
    assert card.figures.keys() == {
        "held_out_loss",
        "spearman",
        "spearman_within_heads",
        "overlap_of_top_tenth",
    }
    assert card.settings.keys() == {"tokens", "held_out", "seed", "contexts", *USED_SETTINGS[kind]}
    assert None not in card.settings.values() and card.settings.get("width", 64) == 64
    assert len(list((tmp_path / "gate.safetensors.features").rglob("*.safetensors"))) == 3
    (tmp_path / "text").write_text(TEXTS[0])
    spec = f"{kind.partition('-')[0]}:gate={out}"
    result = cli(
        "compress",
        tmp_path / "text",
        "--model",
        folder / "model",
        "-o",
        tmp_path / "c",
        "--evictor",
        spec,
    )
    assert result.code == 0, result


def test_a_context_with_a_line_for_each_question_counts_once(folder, tmp_path):
    """Else the gate would be measured on texts that it was trained on."""
    rows = [
        {"context": text, "questions": [question]}
        for text in TEXTS
        for question in ("who?", "where?")
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "gate.safetensors"
    result = cli(
        *command(folder, out, "--data", tmp_path / "lines", "--data", folder / "data", "--count", 3)
    )
    assert result.code == 0 and "6 of 9 contexts repeat an earlier one" in result.err, result
    assert gate_file.read_gate(out).card.settings["contexts"] == 3
    assert len(list((tmp_path / "gate.safetensors.features").rglob("*.safetensors"))) == 3


MISTAKES = {
    "unknown kind": (["--kind", "kvzap"], "no gate of the kind 'kvzap'.*kvzap-linear"),
    "no tokens": (["--tokens", 0], "tokens must be at least 1"),
    "no batch": (["--batch", 0], "batch must be at least 1"),
    "learning rate NaN": (["--lr", "nan"], "lr must be above 0"),
    "no floor": (["--floor", 0], "floor must be above 0"),
    "all held out": (["--held-out", 1], "held_out must be between"),
    "missing data": (["--data", "nowhere"], "no training file"),
    "swapped lengths": (
        ["--data", "tiny", "--shortest", 900, "--longest", 800],
        "swap them",
    ),
    "lengths of other data": (["--longest", 800], "--longest is for --data tiny; leave it out"),
    "one context": (["--data", "{}/one"], "at least two contexts"),
    "features in a file": (["--features", "{}/data"], "is a file"),
    "output into a missing folder": (["--out", "/no/such/folder/gate"], "does not exist"),
    "output is a folder": (["--out", "{}"], "is a folder"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_sentence(folder, tmp_path, name):
    more, words = MISTAKES[name]
    result = cli(
        *command(
            folder, tmp_path / "gate", *[str(word).replace("{}", str(folder)) for word in more]
        )
    )
    assert result.code == 1 and result.err.startswith("error: ") and result.err.count("\n") == 1, (
        result
    )
    assert re.search(words, result.err), result.err
    assert not list(tmp_path.iterdir())


def test_an_interrupted_command_names_the_way_on(folder, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(features_module, "observe_context", interrupt)
    result = cli(*command(folder, tmp_path / "gate"))
    assert result.code == 130 and "--resume" in result.err and not (tmp_path / "gate").exists()
