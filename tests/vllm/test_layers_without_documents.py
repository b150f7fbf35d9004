"""Attention layers under RESTOREKV_VLLM=1, with the connector of documents and without it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends import cpu_attn

from restorekv.errors import RestoreKVError
from restorekv.vllm import cpu_backend, ragged_config, transfer_config, worker_state


@pytest.fixture
def make_layer(monkeypatch):
    """A function that makes a layer with a sliding window for a vLLM with a kv_transfer_config."""

    def make(transfer):
        config = SimpleNamespace(
            instance_id="one",
            kv_transfer_config=transfer,
            device_config=SimpleNamespace(device_type="cpu"),
            model_config=SimpleNamespace(dtype=torch.float32),
        )
        for module in (cpu_backend, cpu_attn):
            monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
        return cpu_backend.RaggedCPUImpl(
            num_heads=4,
            head_size=32,
            scale=1.0,
            num_kv_heads=2,
            alibi_slopes=None,
            sliding_window=16,
            kv_cache_dtype="auto",
        )

    worker_state.forget_pools()
    yield make
    worker_state.forget_pools()


@pytest.mark.parametrize("kind", ["none", "portable"])
def test_without_the_connector_any_attention_is_served_and_no_memory_reserved(
    make_layer, tmp_path, kind
):
    transfer = None if kind == "none" else SimpleNamespace(**transfer_config(tmp_path))
    make_layer(transfer)
    assert not worker_state.has_pool("one")


def test_with_the_connector_a_sliding_window_is_refused(make_layer, tmp_path):
    with pytest.raises(RestoreKVError, match="has a sliding window"):
        make_layer(SimpleNamespace(**ragged_config(tmp_path)))
    assert not worker_state.has_pool("one")
