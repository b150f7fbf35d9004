"""Fast KVzip and KVzap against kvpress 0.5.5, from one file in the published format, by `make
conformance`.

Tiny random models and random gates in float32. kvpress reads the published files with its own
loaders, restorekv with `convert`. A context without a prefix lets all columns be compared.
"""

import copy
import io

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from restorekv.compression.allocate import mark_highest
from restorekv.compression.eviction import Eviction
from restorekv.evictors import gate_file, published_gate
from restorekv.evictors.published_gate import convert_gate
from restorekv.model.load import load_model
from restorekv.model.prompt import Context
from tests.helpers.models import build_model

kvpress = pytest.importorskip(
    "kvpress", reason="kvpress is not installed; `make conformance` installs and uses it"
)
fastkvzip, kvzap = kvpress.presses.fastkvzip_press, kvpress.presses.kvzap_press
pytestmark = pytest.mark.kvpress

REPOSITORY = "Jang-Hyun/Fast-KVzip"


def make_context(length, prefix=0):
    ids = torch.randint(3, 320, (1, prefix + length), generator=torch.Generator().manual_seed(1))
    return Context(ids, prefix, torch.zeros(1, 0, dtype=torch.long))


def note(worst, kind, found, exact):
    """The largest error of any element relative to it; fails above 1e-4."""
    error = float(((found - exact).abs() / exact.abs()).max())
    worst[kind] = max(worst.get(kind, 0.0), error)
    assert error <= 1e-4


@pytest.fixture(params=["qwen3", "llama"])
def folder(request, tiny_tokenizer, tmp_path, monkeypatch):
    """A tiny model on disk; what both sides fetch from the hub lies beside it."""
    copy.deepcopy(tiny_tokenizer).save_pretrained(tmp_path / "Tiny")
    build_model(request.param).save_pretrained(tmp_path / "Tiny")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        fastkvzip, "hf_hub_download", lambda repo_id, filename, repo_type: f"hub/{filename}"
    )
    monkeypatch.setattr(
        published_gate, "hf_hub_download", lambda repo_id, filename: f"hub/{filename}"
    )
    return tmp_path


def load_both():
    model, _ = load_model("Tiny")
    return AutoModelForCausalLM.from_pretrained("Tiny", attn_implementation="sdpa").eval(), model


def randomise(modules, seed=0, scale=0.5):
    """Every parameter away from its starting value."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in torch.nn.ModuleList(modules).parameters():
        parameter.data.normal_(generator=generator).mul_(scale)


def publish_fast_kvzip(folder):
    """A pickle as the authors write them, with figures beside the weights that a numpy of before
    2.0 has pickled.
    """
    gates = [fastkvzip.FastKVzipGate(index, 32, 2, 2, torch.float32) for index in range(3)]
    randomise(gates)
    place = folder / "hub" / "tiny"
    place.mkdir(parents=True)
    content = {"module": [gate.state_dict() for gate in gates], "loss": np.arange(3.0)}
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=False)
    old = stream.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    (place / "q2_dim16_sink16.pt").write_bytes(old)


def publish_kvzap(folder, kind):
    """A repository as NVIDIA's."""
    hidden = None if kind == "linear" else 24
    gate = kvzap.KVzapModel(
        kvzap.KVzapConfig(input_dim=32, output_dim=2, hidden_dim=hidden, n_modules=3)
    )
    randomise([gate])
    gate.save_pretrained(folder / f"nvidia/KVzap-{kind}-Tiny")


@torch.no_grad()
def prefilled_with(press, model, context):
    with press(model):
        model.model(input_ids=context.ids, past_key_values=DynamicCache())


class FastKVzip(kvpress.FastKVzipPress):
    def compress_post(self, model):
        self.seen = torch.stack(self.score_val)[:, 0]
        super().compress_post(model)


@pytest.mark.parametrize("length", [50, 150, 400])
def test_fast_kvzip(folder, length, worst):
    publish_fast_kvzip(folder)
    theirs, model = load_both()
    gate_file.write_gate(folder / "gate", convert_gate(REPOSITORY, model))
    context, window = make_context(length), int(0.02 * length)
    found = Eviction.make(f"fastkvzip:gate={folder / 'gate'}").prepare(model, None, context).scores
    for compression in (0.3, 0.9):
        press = FastKVzip(compression)
        prefilled_with(press, theirs, context)
        free = slice(4, length - window)
        note(worst, f"{model.config.model_type} fastkvzip", found[..., free], press.seen[..., free])
        assert (press.seen[..., :4] == 1).all() and (press.seen[..., -window:] == 1).all()
        kept = torch.ones_like(found, dtype=torch.bool)
        for index, layer in enumerate(theirs.model.layers):
            _, heads, columns = layer.self_attn.masked_key_indices
            kept[index, heads, columns] = False
        own = mark_highest(found, found.numel() - int(found.numel() * compression))
        assert int(kept.sum()) == int(own.sum())
        # Layer 0 scores equal tokens equally; kvpress breaks such ties anyhow.
        torch.testing.assert_close(
            found[kept ^ own], found[own].min().expand(int((kept ^ own).sum()))
        )


@pytest.mark.parametrize("prefix", [2, 9])
def test_fast_kvzip_counts_window_and_sinks_with_the_prefix(folder, prefix, worst):
    publish_fast_kvzip(folder)
    theirs, model = load_both()
    gate_file.write_gate(folder / "gate", convert_gate(REPOSITORY, model))
    context = make_context(99, prefix)
    found = Eviction.make(f"fastkvzip:gate={folder / 'gate'}").prepare(model, None, context).scores
    press = FastKVzip(0.5)
    prefilled_with(press, theirs, context)
    pinned, exact = found > 1, press.seen[..., prefix:]
    assert pinned.equal(exact == 1)
    note(
        worst, f"{model.config.model_type} fastkvzip, with a prefix", found[~pinned], exact[~pinned]
    )


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_kvzap(folder, kind, worst):
    publish_kvzap(folder, kind)
    theirs, model = load_both()
    source = f"nvidia/KVzap-{kind}-Tiny"
    gate_file.write_gate(folder / "gate", convert_gate(source, model))
    context = make_context(150)
    found = Eviction.make(f"kvzap:gate={folder / 'gate'}").prepare(model, None, context).scores
    press = kvpress.KVzapPress(0.5, model_type=kind)
    seen, score = [], press.score
    press.score = lambda *args, **kwargs: seen.append(score(*args, **kwargs)) or seen[-1]
    prefilled_with(press, theirs, context)
    exact = torch.cat(seen)
    note(worst, f"{model.config.model_type} kvzap {kind}", found, exact)
    assert found.argmax() == exact.argmax()
