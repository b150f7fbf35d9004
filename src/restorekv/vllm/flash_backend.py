"""vLLM's FlashAttention on a GPU, for questions over compressed documents as well.

It has never run: plugin.py does not register it. The code that it shares with the CPU backend is
tested with an emulation of `flash_attn_varlen_func` (tests/vllm/test_ragged_attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from restorekv.errors import RestoreKVError
from restorekv.vllm import worker_state
from restorekv.vllm.document_batch import Sequences
from restorekv.vllm.head_loop import write_flat_pages
from restorekv.vllm.ragged_attention import RaggedAttention

# Versions of FlashAttention that have the pages and return the log-sum-exps that are used here.
KNOWN_VERSIONS = (2, 3)


class RaggedFlashBackend(FlashAttentionBackend):
    """The replacement of FLASH_ATTN. It keeps that name, which vLLM looks up in its own enum."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return RaggedFlashImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return RaggedFlashBuilder


class RaggedFlashBuilder(FlashAttentionMetadataBuilder):
    """A builder that keeps attention out of CUDA graphs, because every step may ask different
    documents.
    """

    _cudagraph_support = AttentionCGSupport.NEVER


class RaggedFlashImpl(RaggedAttention, FlashAttentionImpl):
    """Attention of one layer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        if not worker_state.serves_documents(config):
            return
        if self.vllm_flash_attn_version not in KNOWN_VERSIONS:
            raise RestoreKVError(
                f"Documents need FlashAttention 2 or 3, and vLLM chose version "
                f"{self.vllm_flash_attn_version}; start it with --attention-config "
                "'{\"flash_attn_version\": 2}'."
            )
        if self.kv_cache_dtype.startswith("fp8"):
            raise RestoreKVError(
                "Documents on a GPU need a KV cache in the model's dtype; leave --kv-cache-dtype "
                "at auto."
            )
        special = {
            "sinks": self.sinks is not None,
            "a soft cap": bool(self.logits_soft_cap),
            "ALiBi slopes": self.alibi_slopes is not None,
            "a sliding window": self.sliding_window != (-1, -1),
        }
        device = torch.device("cuda", torch.cuda.current_device())
        self.reserve_documents(config, device, write_flat_pages, special)

    def attend_tail(
        self, layer: Any, queries: Tensor, kv_cache: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        return self._run_kernel(queries, kv_cache, sequences, causal=True)

    def attend_pages(self, queries: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        return self._run_kernel(queries, worker_state.get_pool().pages, sequences, causal=False)

    def _run_kernel(
        self, queries: Tensor, pages: Tensor, sequences: Sequences, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Run FlashAttention over pages (P, H, page_size, 2 * D)."""
        keys, values = pages.transpose(1, 2).split(self.head_size, dim=-1)
        output, lse = fa_utils.flash_attn_varlen_func(
            q=queries,
            k=keys,
            v=values,
            cu_seqlens_q=sequences.starts,
            max_seqlen_q=sequences.max_queries,
            seqused_k=sequences.lengths,
            max_seqlen_k=sequences.longest,
            softmax_scale=self.scale,
            causal=causal,
            block_table=sequences.table,
            return_softmax_lse=True,
            fa_version=self.vllm_flash_attn_version,
        )
        # FlashAttention gives log-sum-exps (heads, tokens).
        return output.float(), lse.transpose(0, 1).float()
