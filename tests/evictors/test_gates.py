"""Gates: what they compute, in float64 from the formulas; which columns stay; their files; their
training.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from restorekv import evictors, seal
from restorekv.compression.eviction import Eviction
from restorekv.errors import GateError, RestoreKVError
from restorekv.evictors import gate_file
from restorekv.evictors.gate_file import GateCard
from restorekv.model import gate_kinds
from restorekv.model.load import load_model
from restorekv.model.names import tiny_path
from restorekv.model.observer import observe_layers
from restorekv.model.prefill import prefill
from restorekv.model.prompt import Context
from restorekv.model.shape import CacheShape
from restorekv.tiny.suite import draw_documents
from restorekv.train.gate import compute_spearman, compute_top_overlap
from tests.helpers.gates import RANK, SINKS, S, T, random_layers, save_gate
from tests.helpers.models import build_model


def make_context(length=T, prefix=S):
    ids = torch.randint(3, 320, (1, prefix + length), generator=torch.Generator().manual_seed(1))
    return Context(ids, prefix, torch.zeros(1, 0, dtype=torch.long))


def observed(spec, model, context, chunk=4096):
    evictor = evictors.make_evictor(spec)
    observer = evictor.make_observer(model, context)
    with observe_layers(model, observer.on_layer):
        full = prefill(model, context.ids, chunk)
    return evictor.score(model, None, context, full, observer)


def attention_inputs(model, context):
    """(L, S + T, d) float64."""
    found = {}
    with observe_layers(model.double(), lambda view: found.update({view.layer: view.hidden})):
        prefill(model, context.ids)
    model.float()
    return torch.stack([found[layer] for layer in sorted(found)])


def one_pair(layer, x, head, groups):
    """The formula of Fast KVzip for one token and head, term by term."""
    rank, total = RANK, 0.0

    def norm(v, weight):
        return v / math.sqrt(float((v * v).mean()) + 1e-6) * weight

    key = norm(layer["k_proj.weight"][head * rank : (head + 1) * rank] @ x, layer["k_norm.weight"])
    for group in range(groups):
        place = slice((head * groups + group) * rank, (head * groups + group + 1) * rank)
        query = norm(
            layer["q_proj.weight"][place] @ x + layer["q_proj.bias"][place], layer["q_norm.weight"]
        )
        own = math.exp(float(query @ key) / math.sqrt(rank) + float(layer["b"][head, 0, group]))
        sinks = sum(
            math.exp(float(query @ sink) / math.sqrt(rank)) for sink in layer["k_base"][head, 0]
        )
        total += own / (own + sinks)
    return total / groups


def exact(kind, layers, hidden, shape):
    """(L, H, S + T) float64."""
    layers = [{name: value.double() for name, value in layer.items()} for layer in layers]
    if kind == "fastkvzip":
        rows = [
            [
                [one_pair(layer, x, head, shape.groups) for x in inputs]
                for head in range(shape.heads)
            ]
            for layer, inputs in zip(layers, hidden, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.float64)
    if kind == "kvzap-linear":
        return torch.stack(
            [(x @ g["weight"].T + g["bias"]).T for g, x in zip(layers, hidden, strict=True)]
        )
    inner = [x @ g["0.weight"].T + g["0.bias"] for g, x in zip(layers, hidden, strict=True)]
    inner = [0.5 * x * (1 + torch.erf(x / math.sqrt(2))) for x in inner]
    return torch.stack(
        [(x @ g["2.weight"].T + g["2.bias"]).T for g, x in zip(layers, inner, strict=True)]
    )


NAMES = {
    "fastkvzip": "fastkvzip:window=0,sinks=0,gate=",
    "kvzap-linear": "kvzap:gate=",
    "kvzap-mlp": "kvzap:gate=",
}


@pytest.mark.parametrize("chunk", [4096, 20, 1])
@pytest.mark.parametrize("kind", gate_kinds.KINDS)
def test_scores_are_the_formula(tiny_model, tmp_path, kind, chunk):
    context, layers = make_context(), random_layers(kind, tiny_model)
    path = save_gate(tmp_path / "gate", kind, tiny_model, layers)
    found = observed(NAMES[kind] + path, tiny_model, context, chunk)
    wanted = exact(
        kind, layers, attention_inputs(tiny_model, context), CacheShape.from_model(tiny_model)
    )[..., S:]
    assert found.shape == (3, 2, T) and found.dtype == torch.float32
    # A score near zero is a difference of larger numbers, so its error is measured by the largest
    # score; how large the error is depends on the processor's instructions.
    scale = float(wanted.abs().max())
    torch.testing.assert_close(found.double() / scale, wanted / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", gate_kinds.KINDS)
def test_a_half_precision_gate_in_a_half_precision_model(tmp_path, kind):
    """Projections in bfloat16, the rest in float32."""
    model, context = build_model("qwen3"), make_context()
    layers = [{k: v.bfloat16() for k, v in layer.items()} for layer in random_layers(kind, model)]
    path = save_gate(tmp_path / "gate", kind, model, layers)
    whole = observed(NAMES[kind] + path, model, context)
    half = observed(NAMES[kind] + path, model.bfloat16(), context)
    assert half.dtype == torch.float32
    assert torch.corrcoef(torch.stack([whole[0].flatten(), half[0].flatten()]))[0, 1] > 0.999
    if kind == "fastkvzip":
        assert not half.equal(half.bfloat16().float()), "not rounded on the way"


def test_the_bias_counts_once(tiny_model, tmp_path):
    """With all else zero a token meets s sinks at logit 0: score = e^b / (e^b + s)."""
    layers = [
        {k: torch.zeros_like(v) for k, v in g.items()}
        for g in random_layers("fastkvzip", tiny_model)
    ]
    for layer in layers:
        layer["b"] += 0.7
    path = save_gate(tmp_path / "gate", "fastkvzip", tiny_model, layers)
    found = observed(NAMES["fastkvzip"] + path, tiny_model, make_context())
    torch.testing.assert_close(
        found, torch.full_like(found, math.exp(0.7) / (math.exp(0.7) + SINKS))
    )


def kept(spec, length, prefix):
    return list(evictors.make_evictor(spec).list_pinned_columns(make_context(length, prefix)))


@pytest.mark.parametrize(
    ("spec", "length", "prefix", "first", "last"),
    [
        ("fastkvzip", 10, 3, 1, 0),  # 13 columns: the window is empty, not everything
        ("fastkvzip", 49, 0, 4, 0),
        ("fastkvzip", 50, 0, 4, 1),
        ("fastkvzip", 47, 3, 1, 1),  # the prefix counts towards the window and the sinks
        ("fastkvzip", 200, 9, 0, 4),
        ("fastkvzip", 31_999, 0, 4, 639),
        ("fastkvzip", 32_000, 0, 4, 4096),
        ("fastkvzip:long=16000", 16_000, 0, 4, 4096),
        ("fastkvzip:long=20,cap=6,sinks=0", 30, 0, 0, 6),
        ("fastkvzip:window=1", 30, 3, 0, 30),
        ("fastkvzip:window=0.9,sinks=20", 30, 0, 3, 27),
        ("fastkvzip:window=0,sinks=0", 90, 0, 0, 0),
        ("kvzap", 500, 3, 0, 0),
        ("kvzap:window=128", 500, 3, 0, 128),
        ("kvzap:window=128", 60, 3, 0, 60),
    ],
)
def test_which_columns_stay(spec, length, prefix, first, last):
    assert kept(spec, length, prefix) == [*range(first), *range(length - last, length)]


def test_kept_columns_stand_above_all(tiny_model, tmp_path):
    path = save_gate(tmp_path / "gate", "kvzap-linear", tiny_model)
    plain = observed(f"kvzap:gate={path}", tiny_model, make_context())
    pinned = observed(f"kvzap:gate={path},window=4", tiny_model, make_context())
    assert plain[..., :-4].equal(pinned[..., :-4])
    assert pinned[..., -4:].min() > plain.max()
    assert (pinned[..., -4:].diff(dim=-1) > 0).all()


def test_a_file_brings_everything_back(tiny_model, tmp_path):
    for kind in gate_kinds.KINDS:
        layers = random_layers(kind, tiny_model)
        save_gate(tmp_path / kind, kind, tiny_model, layers)
        gate = gate_file.read_gate(tmp_path / kind)
        assert gate.card == GateCard.for_model(
            tiny_model, kind, "kvzip", settings={"seed": 1}, figures={"loss": 0.5}
        )
        for mine, theirs in zip(layers, gate.layers, strict=True):
            assert mine.keys() == theirs.keys() and all(
                mine[name].equal(theirs[name]) for name in mine
            )


def test_every_byte_counts(tiny_model, tmp_path):
    path = tmp_path / "gate"
    save_gate(path, "kvzap-linear", tiny_model)
    data = path.read_bytes()
    for place in [0, 9, *range(20, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(GateError):
            gate_file.read_gate(path)
    for length in (0, 5, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(GateError):
            gate_file.read_gate(path)


def test_foreign_files_are_refused(tiny_model, tmp_path):
    from safetensors.torch import save_file

    save_file({"layers.0.weight": torch.zeros(2, 32)}, tmp_path / "foreign")
    (tmp_path / "text").write_text("a gate" * 99)
    for name, words in (
        ("foreign", "not a gate of restorekv"),
        ("text", "not a safetensors"),
        ("gone", "no gate file"),
    ):
        with pytest.raises(GateError, match=words):
            gate_file.read_gate(tmp_path / name)
    with pytest.raises(GateError, match="no gate file"):
        gate_file.read_gate(tmp_path)


def test_gates_of_others_are_refused(tmp_path):
    model = build_model("qwen3")
    path = save_gate(tmp_path / "gate", "kvzap-linear", model)
    turned = build_model("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    cases = [
        (build_model("qwen3", seed=1), "a different model"),
        (build_model("llama"), "a different model"),
        (turned, "RoPE"),
    ]
    for other, words in cases:
        with pytest.raises(GateError, match=words):
            gate_file.load_gate(other, path, ("kvzap-linear",))
    with pytest.raises(GateError, match="kind kvzap-linear, not fastkvzip"):
        evictors.make_evictor(f"fastkvzip:gate={path}").load_gate(model)
    gate = gate_file.read_gate(tmp_path / "gate")
    for layers, words in (
        (gate.layers[:2], "2 layers, the model 3"),
        ([{}, *gate.layers[1:]], "lacks a layer"),
    ):
        gate_file.write_gate(tmp_path / "bad", replace(gate, layers=layers))
        with pytest.raises(GateError, match=words):
            gate_file.load_gate(model, str(tmp_path / "bad"), ("kvzap-linear",))
    with pytest.raises(GateError, match="not finite"):
        gate_file.write_gate(
            tmp_path / "nan", replace(gate, layers=[{"weight": torch.tensor([math.nan])}])
        )
    assert not (tmp_path / "nan").exists()


def harmed(path, change=lambda card: None, tensors=None):
    """Seals a gate of the given card and tensors again, as a stranger would who knows the
    format.
    """
    metadata, good = seal.read_sealed(path, gate_file.FILE)
    card = json.loads(metadata["card"])
    change(card)
    harmed = path.with_name("harmed")
    seal.write_sealed(
        harmed, gate_file.FILE, {**good, **(tensors or {})}, {"card": json.dumps(card)}
    )
    return harmed


def test_sealed_gates_that_cannot_be_are_refused(tiny_model, tmp_path):
    good = Path(save_gate(tmp_path / "gate", "kvzap-linear", tiny_model))
    bias = gate_file.read_gate(good).layers[0]["bias"]
    assert gate_file.read_gate(harmed(good)).card == gate_file.read_gate(good).card
    cards = [
        {"kind": "x"},
        {"kind": []},
        {"rope": 7},
        {"model": None},
        {"figures": {"loss": "low"}},
        {"surplus": 1},
    ]
    paths = [
        (lambda change=change: harmed(good, lambda card: card.update(change))) for change in cards
    ]
    numbers = [
        {"layers.0.bias": bias * torch.nan},
        {"layers.0.bias": bias.long()},
        {"layers.999999999.bias": bias},
        {"layers.0.bias": bias[:1]},
        {"strange": bias},
    ]
    paths += [(lambda tensors=tensors: harmed(good, tensors=tensors)) for tensors in numbers]
    for path in paths:
        with pytest.raises(GateError):
            gate_file.load_gate(tiny_model, str(path()), gate_kinds.KINDS)


def test_a_gate_is_read_once_per_model_and_again_when_it_changes(tmp_path, monkeypatch):
    import os

    first, twin = build_model("qwen3"), build_model("qwen3")
    path = save_gate(tmp_path / "gate", "kvzap-linear", first)
    reads, read = [], gate_file.read_gate
    monkeypatch.setattr(gate_file, "read_gate", lambda path: reads.append(path) or read(path))
    for model in (first, first, twin, first, twin):
        gate_file.load_gate(model, path, ("kvzap-linear",))
    assert len(reads) == 2
    changed = random_layers("kvzap-linear", first, seed=5)
    save_gate(tmp_path / "gate", "kvzap-linear", first, changed)
    os.utime(path, ns=(1, 1))
    assert (
        gate_file.load_gate(first, path, ("kvzap-linear",))
        .layers[0]["weight"]
        .equal(changed[0]["weight"])
    )
    with pytest.raises(GateError):
        gate_file.load_gate(build_model("qwen3", seed=3), path, ("kvzap-linear",))


def test_auto_is_the_shipped_gate_of_this_very_model(tmp_path, monkeypatch):
    model = build_model("qwen3")
    monkeypatch.setattr(gate_file, "shipped_path", lambda model, *parts: tmp_path.joinpath(*parts))
    (tmp_path / "gates").mkdir()
    with pytest.raises(
        GateError, match=r"No fastkvzip gate ships.*train-gate.*convert-gate.*gate=FILE"
    ):
        evictors.make_evictor("fastkvzip").load_gate(model)
    for kind in gate_kinds.KINDS:
        save_gate(tmp_path / "gates" / f"{kind}.safetensors", kind, model)
    for spec, kind in (
        ("fastkvzip", "fastkvzip"),
        ("kvzap", "kvzap-mlp"),
        ("kvzap:gate=linear", "kvzap-linear"),
    ):
        assert evictors.make_evictor(spec).load_gate(model).card.kind == kind
    with pytest.raises(GateError, match="No kvzap-mlp gate"):
        evictors.make_evictor("kvzap").load_gate(build_model("qwen3", seed=1))


@pytest.mark.parametrize(
    ("spec", "target"),
    [("fastkvzip:window=0,sinks=0", "kvzip"), ("kvzap", "kvzip+"), ("kvzap:gate=linear", "kvzip+")],
)
def test_the_shipped_gates_rank_like_their_evictors(spec, target):
    """On a document that no gate was trained on. Of the best tenth H2O has 0.06, chance 0.1.

    A gate that knew the heads and nothing of the tokens would have a rank correlation of 0 within
    heads.
    """
    model, tokenizer = load_model("tiny")
    [document] = draw_documents(tokenizer, 1, "gate-dev", low=512, high=600)
    found = Eviction.make(spec).prepare(model, tokenizer, document.text).scores
    wanted = Eviction.make(target).prepare(model, tokenizer, document.text).scores
    assert compute_spearman(found, wanted) > 0.7 and compute_top_overlap(found, wanted) > 0.65
    heads = zip(found.flatten(0, 1), wanted.flatten(0, 1), strict=True)
    within = torch.stack([compute_spearman(*pair) for pair in heads])
    assert within.mean() > 0.35


def test_the_shipped_gates_are_small():
    files = list(tiny_path("gates").iterdir())
    assert {path.stem for path in files} == set(gate_kinds.KINDS)
    assert sum(path.stat().st_size for path in files) < 2_000_000
    assert {gate_file.read_gate(path).card.model for path in files} == {"tiny"}


@pytest.mark.parametrize(
    "spec", ["fastkvzip:window=1.5", "fastkvzip:window=nan", "fastkvzip:sinks=-1", "kvzap:tau=1"]
)
def test_wrong_settings_are_refused(spec):
    with pytest.raises(RestoreKVError):
        evictors.make_evictor(spec)


def test_the_card_is_plain_json(tiny_model, tmp_path):
    save_gate(tmp_path / "gate", "kvzap-mlp", tiny_model)
    card = json.loads(seal.read_sealed(tmp_path / "gate", gate_file.FILE)[0]["card"])
    assert card["target"] == "kvzip" and card["figures"] == {"loss": 0.5}
