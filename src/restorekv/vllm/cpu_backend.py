"""vLLM's attention on a CPU, for questions over compressed documents as well.

The CPU kernel returns no log-sum-exp. `measure_log_sum_exp` computes it from a second output, with
a sink: an extra logit in the softmax's denominator. One call has every query twice, without a sink
and with one, so that the kernel reads the pairs once for both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    _get_attn_isa,
)

from restorekv.vllm import worker_state
from restorekv.vllm.document_batch import Sequences
from restorekv.vllm.head_loop import (
    PageReader,
    attend_by_head,
    find_reader,
    prefers_loop,
    read_transposed_pages,
)
from restorekv.vllm.page_pool import PageTable
from restorekv.vllm.ragged_attention import RaggedAttention
from restorekv.vllm.step_rows import measure_log_sum_exp

NO_SINK = -1e30  # a logit that adds exp(-1e30) = 0 to the softmax's denominator


class RaggedCPUBackend(CPUAttentionBackend):
    """The replacement of CPU_ATTN. It keeps that name, which vLLM looks up in its own enum."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return RaggedCPUImpl


class RaggedCPUImpl(RaggedAttention, CPUAttentionBackendImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        self.page_isa = _get_attn_isa(
            config.model_config.dtype, worker_state.get_page_size(config), self.head_size
        )
        special = {
            "sinks": self.sinks is not None,
            "a soft cap": bool(self.logits_soft_cap),
            "ALiBi slopes": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != -1,
        }
        self.reserve_documents(config, torch.device("cpu"), self._write_pages, special)
        # None if the kernel's layout of pages is unknown.
        self.reader: PageReader | None = None
        if worker_state.serves_documents(config):
            size = worker_state.get_page_size(config)
            trial = torch.zeros(2, 1, size, 2 * self.head_size, dtype=config.model_config.dtype)
            self.reader = find_reader([read_transposed_pages], trial, self._write_pages)

    def attend_tail(
        self, layer: Any, queries: Tensor, kv_cache: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        return measure_log_sum_exp(
            lambda sink: self._run_kernel(
                queries,
                _split_pages(kv_cache),
                sequences,
                sink,
                causal=True,
                kv_heads=self.num_kv_heads,
                isa=layer.isa,
                kv_cache_dtype=self.kv_cache_dtype,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
            )
        )

    def attend_pages(self, queries: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        return measure_log_sum_exp(
            lambda sink: self._run_kernel(
                queries,
                _split_pages(worker_state.get_pool().pages),
                sequences,
                sink,
                causal=False,
                kv_heads=1,
                isa=self.page_isa,
                kv_cache_dtype="auto",
                k_scale=1.0,
                v_scale=1.0,
            )
        )

    def prefers_loop(self, tokens: int, document: PageTable) -> bool:
        return self.reader is not None and prefers_loop(tokens, document)

    def attend_heads(
        self, queries: Tensor, document: PageTable, number: int
    ) -> tuple[Tensor, Tensor]:
        assert self.reader is not None
        pages = worker_state.get_pool().pages
        return attend_by_head(queries, document, number, pages, self.reader, self.scale)

    def _run_kernel(
        self,
        queries: Tensor,
        halves: tuple[Tensor, ...],
        sequences: Sequences,
        sink: float,
        *,
        causal: bool,
        kv_heads: int,
        isa: str,
        kv_cache_dtype: str,
        k_scale: float,
        v_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Run vLLM's kernel; return outputs (N, heads, D) without a sink, and with one."""
        count, heads, dim = queries.shape
        # The kernel expects the query heads of a KV head side by side, so both copies go there.
        groups = queries.view(count, kv_heads, 1, heads // kv_heads, dim)
        twice = groups.expand(-1, -1, 2, -1, -1).reshape(count, 2 * heads, dim)
        if "cpu" not in sequences.schedule:
            # How the kernel divides the work. It depends on the sequences alone, and they are used
            # again: the tail's by all layers of a step, a document's by later steps.
            sequences.schedule["cpu"] = ops.cpu_attn_get_scheduler_metadata(
                num_reqs=len(sequences.lengths),
                num_heads=2 * heads,
                num_kv_heads=kv_heads,
                head_dim=self.head_size,
                seq_lens=sequences.lengths,
                dtype=queries.dtype,
                query_start_loc=sequences.starts,
                causal=causal,
                sliding_window_size=-1,
                isa=isa,
                enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
                kv_cache_dtype=kv_cache_dtype,
            )
        output = torch.empty_like(twice)
        ops.cpu_attention_with_kv_cache(
            query=twice,
            key_cache=halves[0],
            value_cache=halves[1],
            output=output,
            query_start_loc=sequences.starts,
            seq_lens=sequences.lengths,
            scale=self.scale,
            causal=causal,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=sequences.table,
            softcap=0,
            scheduler_metadata=sequences.schedule["cpu"],
            s_aux=_make_sinks(sink, kv_heads, heads // kv_heads),
            k_scale=k_scale,
            v_scale=v_scale,
            kv_cache_dtype=kv_cache_dtype,
        )
        plain, sunk = output.view(count, kv_heads, 2, -1, dim).unbind(2)
        return plain.reshape(queries.shape), sunk.reshape(queries.shape)

    def _write_pages(self, pages: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Write pairs in the layout that the kernel reads with this CPU's instructions."""
        key_half, value_half = _split_pages(pages)
        ops.cpu_attn_reshape_and_cache(
            keys.contiguous(), values.contiguous(), key_half, value_half, slots, self.page_isa
        )


@cache
def _make_sinks(sink: float, kv_heads: int, groups: int) -> Tensor:
    """Return logits of sinks: a KV head's first copy of queries has none, the second has `sink`."""
    head_sinks = [NO_SINK] * groups + [sink] * groups
    return torch.tensor(head_sinks * kv_heads)


def _split_pages(pages: Tensor) -> tuple[Tensor, ...]:
    """Return the keys' and the values' half of pages (P, H, page_size, 2 * D)."""
    count, heads, size, _ = pages.shape
    return pages.view(count, heads, size * 2, -1).chunk(2, dim=2)
