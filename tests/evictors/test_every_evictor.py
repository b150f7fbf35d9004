"""Every evictor in the table: scores, exact budgets, a restore pass, a training step, a file, and
no peeking.
"""

import warnings
from dataclasses import replace

import pytest
import torch

from restorekv import CompressionConfig, evictors
from restorekv.compression.eviction import Eviction
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evictors import EVICTORS
from restorekv.model.prompt import make_context
from restorekv.model.shape import CacheShape
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from restorekv.train.config import TrainConfig
from restorekv.train.examples import TrainingContext
from restorekv.train.loop import train_adapter
from tests.helpers.gates import random_layers, save_gate
from tests.helpers.models import build_model

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives there. "
    * 2
)
QUESTION = "Who lives in the blue house?"
GATES = {"fastkvzip": "fastkvzip", "kvzap": "kvzap-linear"}
# Tested in tests/conformance, where kvpress is.
NAMES = [name for name in EVICTORS if name != "kvpress"]
CONFIG = TrainConfig(
    restore_tokens=2, rank=2, lr=1e-2, warmup=0, steps=1, max_new_tokens=4, ratio_min=0.1
)


def spec_of(name, model, folder):
    return (
        f"{name}:gate={save_gate(folder / 'gate.safetensors', GATES[name], model)}"
        if name in GATES
        else name
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("allocation", ["global", "adakv"])
def test_scores_budget_restore_file_and_answer(
    tiny_model, tiny_tokenizer, tmp_path, name, allocation
):
    model, spec = tiny_model, spec_of(name, tiny_model, tmp_path)
    adapter = RestoreAdapter.create(model, 2, rank=2)
    prepared = Eviction.make(spec, adapter, allocation=allocation).prepare(
        model, tiny_tokenizer, TEXT
    )
    shape, context = CacheShape.from_model(model), prepared.context
    assert prepared.scores.shape == (shape.layers, shape.heads, context.text_tokens)
    assert prepared.scores.dtype == torch.float32 and not prepared.scores.isnan().any()
    for ratio in ("0.5", "0.07"):
        budget = prepared.make_budget(ratio)
        assert prepared.config.count_pairs(prepared.evict(ratio), context) == budget.total
    made = compress(
        model,
        tiny_tokenizer,
        TEXT,
        evictor=spec,
        ratio=0.3,
        adapter=adapter,
        config=CompressionConfig(allocation=allocation),
    )
    assert (
        made.manifest.evictor == evictors.make_evictor(spec).identity(model)
        and made.manifest.allocation == allocation
    )
    made.save(tmp_path / "doc.rkv")
    again = CompressedContext.load(tmp_path / "doc.rkv", model, tiny_tokenizer)
    assert again.ask(QUESTION, 4) == made.ask(QUESTION, 4)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_input_gives_the_same_bits(tiny_tokenizer, tmp_path, name):
    model = build_model("qwen3")
    spec, state = spec_of(name, model, tmp_path), torch.random.get_rng_state()
    first, second = (Eviction.make(spec).prepare(model, tiny_tokenizer, TEXT) for _ in range(2))
    assert first.scores.equal(second.scores)
    assert torch.random.get_rng_state().equal(state)
    for one, other in zip(first.full.layers, second.full.layers, strict=True):
        assert one.keys.equal(other.keys) and one.keys.shape[-2] == first.context.num_tokens


@pytest.mark.parametrize("name", NAMES)
def test_a_training_step_reaches_the_adapter(tiny_tokenizer, tmp_path, name):
    model = build_model("llama")
    spec = spec_of(name, model, tmp_path)
    adapter = train_adapter(
        model,
        tiny_tokenizer,
        [TrainingContext(TEXT, (QUESTION,), (None,))],
        replace(CONFIG, evictor=spec),
        tmp_path / "run",
    )
    assert adapter.card.evictor == evictors.make_evictor(spec).identity(model)
    assert any(
        value.abs().max() > 0 for key, value in adapter.lora_parameters.items() if "lora_B" in key
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compress(
            model,
            tiny_tokenizer,
            TEXT,
            evictor=spec,
            ratio=0.25,
            adapter=tmp_path / "run" / "adapter",
        )


@pytest.mark.parametrize("name", NAMES)
def test_specs_come_back(name):
    evictor = evictors.make_evictor(name)
    assert evictor.spec == name and evictors.make_evictor(evictor.spec) == evictor


@pytest.mark.parametrize("name", NAMES)
def test_a_counted_prefix_is_given_up_first(tiny_model, tiny_tokenizer, tmp_path, name):
    spec = spec_of(name, tiny_model, tmp_path)
    prefix, context = 9, make_context(tiny_tokenizer, TEXT)
    context = replace(context, prefix_length=prefix)  # more than the four columns that always stay
    prepared = Eviction.make(spec, prefix_policy="counted").prepare(
        tiny_model, tiny_tokenizer, context
    )
    for layer in prepared.evict(0.5).layers:
        assert not ((layer.positions >= 4) & (layer.positions < prefix)).any()
        assert sum(int(position) < 4 for position in layer.positions) == 4 * layer.heads


def test_a_gate_is_known_by_what_is_in_it(tiny_tokenizer, tmp_path):
    model = build_model("qwen3")
    path = save_gate(tmp_path / "one.safetensors", "fastkvzip", model)
    spec = f"fastkvzip:gate={path}"
    examples = [TrainingContext(TEXT, (QUESTION,), (None,))]
    adapter = train_adapter(
        model, tiny_tokenizer, examples, replace(CONFIG, evictor=spec), tmp_path / "run"
    )
    (tmp_path / "two.safetensors").write_bytes((tmp_path / "one.safetensors").read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same = f"fastkvzip:gate={tmp_path / 'two.safetensors'}"
        first = compress(model, tiny_tokenizer, TEXT, evictor=same, ratio=0.25, adapter=adapter)
    save_gate(
        tmp_path / "one.safetensors", "fastkvzip", model, random_layers("fastkvzip", model, seed=1)
    )
    with pytest.warns(RestoreKVWarning, match="trained with the evictor"):
        other = compress(model, tiny_tokenizer, TEXT, evictor=spec, ratio=0.25, adapter=adapter)
    assert first.manifest.evictor == adapter.card.evictor != other.manifest.evictor


@pytest.mark.parametrize("settings", [{"kernel": -1}, {"kernel": 4}, {"sinks": -1}, {"window": 0}])
def test_settings_that_snapkv_cannot_use_are_refused(settings):
    with pytest.raises(RestoreKVError, match="snapkv takes"):
        EVICTORS["snapkv"](**settings)
