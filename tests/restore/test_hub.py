"""Publishing and fetching adapters with the hub's real client, against a hub on this machine."""

import json
import socket
import warnings

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file

from restorekv.errors import AdapterError, RestoreKVWarning
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.hub_world import local_hub, point_client_at
from tests.helpers.models import build_model

REPO = "me/restore-qwen3"
ALL = {
    "README.md",
    "restorekv.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "restore_embeddings.safetensors",
}
ROWS = [{"source": "houses", "examples": 7, "contexts": 3, "license": "CC BY 4.0"}]


@pytest.fixture
def model():
    model = build_model("qwen3")
    model.config._name_or_path = "Qwen/Qwen3-tiny"
    return model


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with local_hub(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def trained(model, seed=0, **record):
    adapter = RestoreAdapter.create(model, 4, rank=2, seed=seed)
    with torch.no_grad():
        for parameter in adapter.lora:
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(seed))
    adapter.record_training(
        evictor="kvzip", prefix_policy="free", ratio_range=(0.025, 0.25), **record
    )
    return adapter


def test_what_is_pushed_comes_back(model, hub, tmp_path):
    adapter = trained(model, settings={"lr": 2e-4, "targets": ("q_proj",)}, data=ROWS)
    adapter.record_results(
        [{"benchmark": "suite", "ratio": 0.05, "base": 70.1, "restored": 92.7, "full": 96.8}]
    )
    assert adapter.push_to_hub(REPO).endswith(f"{REPO}/commit/{1:040x}")
    assert set(hub.files(REPO)) == ALL and not hub.private[REPO] and len(hub.commits[REPO]) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = RestoreAdapter.from_pretrained(
            model, REPO, evictor="kvzip", cache_dir=tmp_path / "elsewhere"
        )
    assert again.card == adapter.card and again.identity() == adapter.identity()
    assert list((tmp_path / "elsewhere").glob("models--me--*")) and not list(
        (tmp_path / "cache").glob("models--*")
    )
    card = ModelCard(hub.files(REPO)["README.md"].decode())
    assert card.data.license == "apache-2.0" and card.data.base_model == "Qwen/Qwen3-tiny"
    assert f'adapter="{REPO}"' in card.text


def test_a_second_push_replaces_and_revisions_stay(model, hub):
    first, second = trained(model), trained(model, seed=1)
    first.push_to_hub(REPO)
    second.push_to_hub(REPO, commit_message="Train longer", dtype=torch.bfloat16)
    assert hub.messages == ["Upload a restore adapter", "Train longer"]
    newest = RestoreAdapter.from_pretrained(model, REPO)
    assert newest.embeddings.equal(second.embeddings) and newest.card.dtype == "bfloat16"
    old = RestoreAdapter.from_pretrained(model, REPO, revision=f"{1:040x}")
    assert old.identity() == first.identity()
    with pytest.raises(AdapterError, match="at revision 'none'"):
        RestoreAdapter.from_pretrained(model, REPO, revision="none")


def test_a_revision_of_a_folder_is_refused(model, tmp_path):
    trained(model).save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match="no revision 'v2'"):
        RestoreAdapter.from_pretrained(model, tmp_path, revision="v2")


def test_only_the_adapters_files_go_up_and_come_down(model, hub, tmp_path):
    trained(model).push_to_hub(REPO)
    hub.files(REPO)["optimizer.pt"] = b"not wanted"
    RestoreAdapter.from_pretrained(model, REPO)
    fetched = {path.name for path in (tmp_path / "cache").rglob("snapshots/*/*")}
    assert fetched == ALL


def test_private_is_private_or_refused(model, hub):
    trained(model).push_to_hub(REPO, private=True)
    assert hub.private[REPO]
    trained(model).push_to_hub("me/open")
    commits = len(hub.commits["me/open"])
    with pytest.raises(AdapterError, match="exists and is public"):
        trained(model).push_to_hub("me/open", private=True)
    assert len(hub.commits["me/open"]) == commits


def test_a_card_written_on_the_hub_stays(model, hub):
    trained(model).push_to_hub(REPO)
    hub.files(REPO)["README.md"] += b"My own words.\n"
    edited = hub.files(REPO)["README.md"]
    with pytest.warns(RestoreKVWarning, match="stays as it is"):
        trained(model, seed=1).push_to_hub(REPO)
    assert hub.files(REPO)["README.md"] == edited
    assert json.loads(hub.files(REPO)["restorekv.json"])["sha256"]


def test_a_local_base_model_warns(model, hub):
    model.config._name_or_path = "/home/me/models/mine"
    with pytest.warns(RestoreKVWarning, match="others cannot load"):
        trained(model).push_to_hub(REPO)
    assert ModelCard(hub.files(REPO)["README.md"].decode()).data.base_model is None


@pytest.mark.parametrize(
    ("repo", "token", "words"),
    [
        (
            REPO,
            "bad",
            r"refuses me/restore-qwen3 \(401: Invalid username or password\); log in with `hf "
            r"auth login`",
        ),
        ("others/name", None, r"403: You don't have the rights .*; log in"),
        ("no good name", None, "is not a name for a repository on the hub"),
        ("a/b/c", None, "is not a name for a repository on the hub"),
    ],
)
def test_refusals_are_one_sentence(model, hub, repo, token, words):
    with pytest.raises(AdapterError, match=words) as caught:
        trained(model).push_to_hub(repo, token=token)
    assert "\n" not in str(caught.value) and ". " not in str(caught.value)
    assert repo not in hub.commits


def test_without_a_network(model, monkeypatch, tmp_path):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        point_client_at(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path)
        with pytest.raises(AdapterError, match=r"cannot be reached .*check the network"):
            trained(model).push_to_hub(REPO)


def test_offline_mode(model, monkeypatch, hub):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(AdapterError, match="cannot be reached"):
        trained(model).push_to_hub(REPO)


def test_front_matter_that_the_hub_refuses(model, hub, monkeypatch):
    monkeypatch.setattr(
        "restorekv.restore.model_card.make_front_matter", lambda *_: ModelCardData(license="my-own")
    )
    with pytest.raises(
        AdapterError, match=r"refuses the card of me/restore-qwen3 .*fix its README"
    ):
        trained(model).push_to_hub(REPO)
    assert hub.files(REPO) == {}


def test_a_pushed_file_is_safetensors_of_float32(model, hub, tmp_path):
    adapter = trained(model)
    adapter.push_to_hub(REPO)
    (tmp_path / "weights").write_bytes(hub.files(REPO)["adapter_model.safetensors"])
    names = load_file(tmp_path / "weights").keys()
    assert {
        name.removeprefix("base_model.model.") for name in names
    } == adapter.lora_parameters.keys()
