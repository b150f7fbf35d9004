"""What ragged documents need of vLLM: if a new vLLM changes one of these seams, its test fails.

The tests read vLLM's source, which need not run here: that of the installed vLLM, or of a folder
(`RESTOREKV_VLLM_SOURCE=unpacked/vllm pytest tests/vllm/test_seams.py`).
"""

import ast

import pytest

from tests.helpers.vllm_source import (
    find,
    find_source,
    list_fields,
    list_parameters,
    parse,
    write_source,
)

pytestmark = pytest.mark.skipif(find_source() is None, reason="there is no vLLM")
REGISTRY = "v1/attention/backends/registry.py"
CPU = "v1/attention/backends/cpu_attn.py"
FLASH = "v1/attention/backends/flash_attn.py"
CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
SCHEDULER = "v1/core/sched/scheduler.py"
RUNNER = "v1/worker/kv_connector_model_runner_mixin.py"
# What vLLM passes to an attention backend, in this order.
FORWARD = [
    "layer",
    "query",
    "key",
    "value",
    "kv_cache",
    "attn_metadata",
    "output",
    "output_scale",
    "output_block_scale",
]


def test_plugins_are_found_by_their_entry_point():
    texts = {
        node.value
        for node in ast.walk(parse("plugins/__init__.py"))
        if isinstance(node, ast.Constant)
    }
    assert "vllm.general_plugins" in texts


def test_a_backend_can_be_overridden_by_its_name():
    assert list_parameters(REGISTRY, "register_backend")[:2] == ["backend", "class_path"]
    assert {"CPU_ATTN", "FLASH_ATTN"} <= list_fields(REGISTRY, "AttentionBackendEnum")
    assert "_ATTN_OVERRIDES.get(self" in write_source(REGISTRY, "AttentionBackendEnum", "get_path")


def test_the_chosen_backend_is_remembered_in_a_cache_that_can_be_cleared():
    source = write_source("v1/attention/selector.py", "_cached_get_attn_backend")
    assert source.startswith("@cache\ndef _cached_get_attn_backend(")


def test_a_cpu_asks_the_registry_for_its_backend():
    source = write_source("platforms/cpu.py", "CpuPlatform", "get_attn_backend_cls")
    assert "AttentionBackendEnum.CPU_ATTN.get_path()" in source


def test_layers_call_the_backend_outside_of_what_is_compiled():
    source = write_source(
        "model_executor/layers/attention/attention.py", "unified_attention_with_output"
    )
    assert "@maybe_transfer_kv_layer" in source and "self.impl.forward(self, query, key" in source


@pytest.mark.parametrize(
    ("path", "name"), [(CPU, "CPUAttentionBackendImpl"), (FLASH, "FlashAttentionImpl")]
)
def test_a_backend_is_called_with_what_ours_takes(path, name):
    assert list_parameters(path, name, "forward") == FORWARD
    needed = {"num_heads", "num_kv_heads", "head_size", "scale", "alibi_slopes", "logits_soft_cap"}
    assert needed | {"sliding_window", "sinks", "kv_cache_dtype"} <= list_fields(path, name)


@pytest.mark.parametrize(
    ("path", "name"), [(CPU, "CPUAttentionMetadata"), (FLASH, "FlashAttentionMetadata")]
)
def test_a_steps_metadata_say_whose_tokens_are_whose(path, name):
    needed = {"num_actual_tokens", "query_start_loc", "seq_lens", "block_table"}
    assert needed <= list_fields(path, name)


def test_the_cpus_kernel_takes_pages_and_sinks():
    path = "_custom_ops.py"
    assert {
        "query",
        "key_cache",
        "value_cache",
        "output",
        "query_start_loc",
        "seq_lens",
        "scale",
        "causal",
        "alibi_slopes",
        "sliding_window",
        "block_table",
        "softcap",
        "scheduler_metadata",
        "s_aux",
        "k_scale",
        "v_scale",
        "kv_cache_dtype",
    } <= set(list_parameters(path, "cpu_attention_with_kv_cache"))
    assert {
        "num_reqs",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "seq_lens",
        "dtype",
        "query_start_loc",
        "causal",
        "sliding_window_size",
        "isa",
        "enable_kv_split",
        "kv_cache_dtype",
    } <= set(list_parameters(path, "cpu_attn_get_scheduler_metadata"))
    assert list_parameters(path, "cpu_attn_reshape_and_cache")[:6] == [
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "isa",
    ]
    assert list_parameters(CPU, "_get_attn_isa")[:3] == ["dtype", "block_size", "head_size"]


def test_flash_attention_returns_log_sum_exps():
    needed = {
        "q",
        "k",
        "v",
        "cu_seqlens_q",
        "max_seqlen_q",
        "seqused_k",
        "max_seqlen_k",
        "softmax_scale",
        "causal",
        "block_table",
        "return_softmax_lse",
        "fa_version",
    }
    path = "vllm_flash_attn/flash_attn_interface.py"
    assert needed <= set(list_parameters(path, "flash_attn_varlen_func"))


def test_a_connector_is_called_with_what_ours_takes():
    taken = {
        "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
        "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
        "update_connector_output": ["connector_output"],
        "build_connector_meta": ["scheduler_output"],
        "request_finished": ["request", "block_ids"],
        "bind_connector_metadata": ["connector_metadata"],
        "clear_connector_metadata": [],
        "build_connector_worker_meta": [],
        "get_block_ids_with_load_errors": [],
        "start_load_kv": ["forward_context"],
        "get_finished": ["finished_req_ids"],
        "wait_for_layer_load": ["layer_name"],
        "wait_for_save": [],
        "requires_piecewise_for_cudagraph": ["extra_config"],
        "shutdown": [],
    }
    for name, parameters in taken.items():
        assert list_parameters(CONNECTOR, "KVConnectorBase_V1", name) == parameters, name
    assert list_parameters(CONNECTOR, "KVConnectorWorkerMetadata", "aggregate") == ["other"]


def test_a_connector_need_not_do_more():
    """vLLM leaves exactly these methods abstract, and our connectors have all of them."""
    abstract = set()
    for node in find(CONNECTOR, "KVConnectorBase_V1").body:
        if isinstance(node, ast.FunctionDef) and any(
            ast.unparse(each) == "abstractmethod" for each in node.decorator_list
        ):
            abstract.add(node.name)
    assert abstract == {
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
    }


def test_a_request_may_have_to_wait():
    """If a connector answers None, vLLM asks it again at the next step."""
    for node in ast.walk(parse(SCHEDULER)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "ext_tokens is None":
            body = ast.unparse(node)
            assert "skip_request(request_queue)" in body and "continue" in body
            return
    pytest.fail("the scheduler does not know that a connector's answer may be None")


def test_prompts_that_do_not_read_caches_get_nothing_from_a_connector():
    for node in ast.walk(parse(SCHEDULER)):
        if isinstance(node, ast.If) and ast.unparse(node.test) == (
            "request.skip_reading_prefix_cache"
        ):
            assert "ext_tokens, load_kv_async = (0, False)" in ast.unparse(node)
            return
    pytest.fail("the scheduler does not look at skip_reading_prefix_cache")


def test_orders_of_a_step_are_bound_before_it_and_cleared_after_it():
    source = write_source(RUNNER, "KVConnectorModelRunnerMixin", "_get_kv_connector_output")
    order = [
        source.index(part)
        for part in (
            "bind_connector_metadata(",
            "yield output",
            "get_block_ids_with_load_errors(",
            "build_connector_worker_meta(",
            "clear_connector_metadata(",
        )
    ]
    assert order == sorted(order)


def test_requests_have_what_the_connector_reads():
    needed = {
        "request_id",
        "prompt_token_ids",
        "kv_transfer_params",
        "skip_reading_prefix_cache",
        "sampling_params",
        "max_tokens",
    }
    assert needed <= list_fields("v1/request.py", "Request")
    find("v1/request.py", "Request", "num_tokens")
    sampling = {"prompt_logprobs", "prompt_logprob_token_ids", "repetition_penalty"}
    assert sampling <= list_fields("sampling_params.py", "SamplingParams")


def test_the_config_has_what_is_refused_or_read():
    needed = {
        ("config/vllm.py", "VllmConfig"): {
            "kv_transfer_config",
            "cache_config",
            "parallel_config",
            "model_config",
            "device_config",
            "speculative_config",
            "lora_config",
            "instance_id",
        },
        ("config/model.py", "ModelConfig"): {"dtype", "runner_type"},
        ("config/kv_transfer.py", "KVTransferConfig"): {
            "kv_connector",
            "kv_connector_extra_config",
            "kv_load_failure_policy",
        },
        ("config/parallel.py", "ParallelConfig"): {
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "world_size",
        },
    }
    for (path, name), fields in needed.items():
        assert fields <= list_fields(path, name), name
