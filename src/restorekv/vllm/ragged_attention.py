"""Attention of a step whose requests may ask compressed documents, for any of vLLM's backends.

A step without a document is computed by vLLM's own code and nothing else. Tokens that ask a
document attend to two parts: the tail, which is what vLLM's pool holds after the placeholders
(question, answer), and the document's pairs in the `PagePool`. Both parts are computed by the
backend's own kernel; in the second one every KV head of a document is a sequence, so that heads may
differ in length. The parts are merged by their log-sum-exps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from restorekv.errors import RestoreKVError
from restorekv.vllm import worker_state
from restorekv.vllm.page_pool import PagePool, PageTable, PageWriter
from restorekv.vllm.ragged_documents import PLACEHOLDERS
from restorekv.vllm.step_rows import (
    find_document_rows,
    index_heads_as_sequences,
    index_tokens,
    merge,
)


@dataclass(frozen=True)
class Sequences:
    """Queries and pages of one call of a kernel over N sequences.

    starts (N + 1,) int32: the first query of every sequence, then their number; lengths (N,) int32:
    pairs that the last query of a sequence sees; table (N, W) int32: pages; most_queries, longest:
    the largest difference of `starts` and the largest of `lengths`, known to the host.
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    most_queries: int
    longest: int
    # What a kernel prepares for these sequences; they serve all layers of a step.
    schedule: dict[str, Any]


@dataclass(frozen=True)
class StepPlan:
    """What the tokens of a step attend to; the same for all layers but for the documents' tables.

    tokens (R,): of the step, those of one document together; plain: whether the step has other
    tokens, too; order (R * H,): how pairs of token and KV head are sorted by document, head, token;
    counts: tokens of every document.
    """

    tokens: Tensor
    plain: bool
    tail: Sequences
    documents: list[PageTable]
    counts: list[int]
    starts: Tensor
    order: Tensor


_NOT_PLANNED = object()


class RaggedAttention:
    """Goes before an AttentionImpl of vLLM, whose attributes it uses."""

    num_heads: int
    num_kv_heads: int
    head_size: int

    def reserve_documents(
        self, config: Any, device: torch.device, writer: PageWriter, special: Mapping[str, bool]
    ) -> None:
        """Reserve the documents' pool, before vLLM measures what is free for its own.

        Without the connector of documents, do nothing: the layer then is vLLM's own.

        Args:
            config: vLLM's.
            device: of the attention.
            writer: puts pairs into pages.
            special: whether the layer has what makes attention more than a softmax over all
                pairs, by name.

        Raises:
            RestoreKVError: the layer has something of that.
        """
        if not worker_state.serves_documents(config):
            return
        refuse_special_attention(special)

        def make_pool() -> PagePool:
            return PagePool(
                pages=worker_state.count_pool_pages(config, self.head_size),
                page_size=worker_state.page_size(config),
                head_dim=self.head_size,
                dtype=config.model_config.dtype,
                device=device,
                writer=writer,
            )

        worker_state.reserve_pool(config.instance_id, make_pool)

    @abstractmethod
    def attend_tail(
        self, layer: Any, queries: Tensor, kv_cache: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Attend causally to pages of vLLM's pool.

        Args:
            layer: vLLM's.
            queries: (R, Hq, D).
            kv_cache: of the layer.
            sequences: one per request.

        Returns:
            Outputs (R, Hq, D) and log-sum-exps (R, Hq) of the scaled logits, float32.
        """

    @abstractmethod
    def attend_pages(self, queries: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Attend to all pairs of pages of the documents' pool, which have one KV head.

        Args:
            queries: (N, G, D), the G query heads of a KV head.
            sequences: one per document and KV head.

        Returns:
            Outputs (N, G, D) and log-sum-exps (N, G) of the scaled logits, float32.
        """

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend as vLLM's own backend does, and to documents where a request asks one."""
        plan = None if attn_metadata is None else self._plan_of(kv_cache, attn_metadata)
        if plan is None or plan.plain:
            # The outputs of tokens that ask documents are overwritten below.
            super().forward(  # type: ignore[misc]
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        if plan is not None:
            queries = query.view(-1, self.num_heads, self.head_size)[plan.tokens]
            tail, tail_lse = self.attend_tail(layer, queries, kv_cache, plan.tail)
            number = worker_state.layer_number(layer.layer_name)
            document, document_lse = self._attend_documents(queries, plan, number)
            merged = merge(tail, tail_lse, document, document_lse)
            output.view(-1, self.num_heads, self.head_size)[plan.tokens] = merged.to(output.dtype)
        return output

    def _plan_of(self, kv_cache: Tensor, metadata: Any) -> StepPlan | None:
        """Return the step's plan, which its first layer makes; None if it asks no document."""
        plan = getattr(metadata, "restorekv_plan", _NOT_PLANNED)
        if plan is _NOT_PLANNED:
            documents = worker_state.current_step()
            plan = self._make_plan(documents, kv_cache, metadata) if documents else None
            metadata.restorekv_plan = plan
        return plan  # type: ignore[return-value]

    def _make_plan(
        self, documents: Mapping[int, str], kv_cache: Tensor, metadata: Any
    ) -> StepPlan | None:
        rows = find_document_rows(
            documents,
            metadata.block_table[:, 0].tolist(),
            metadata.query_start_loc.tolist(),
            metadata.seq_lens.tolist(),
        )
        if not rows:
            return None
        device = metadata.block_table.device
        block_size = kv_cache.shape[2]
        row_counts = [row.count for row in rows]
        row_tails = [row.tail for row in rows]
        table_rows = torch.tensor([row.table_row for row in rows], device=device)
        tail = Sequences(
            starts=_starts(row_counts, device),
            lengths=torch.tensor(row_tails, dtype=torch.int32, device=device),
            table=metadata.block_table[table_rows, PLACEHOLDERS // block_size :].contiguous(),
            most_queries=max(row_counts),
            longest=max(row_tails),
            schedule={},
        )
        of_document: dict[str, int] = {}
        for row in rows:
            of_document[row.document] = of_document.get(row.document, 0) + row.count
        counts = list(of_document.values())
        per_head = [count for count in counts for _ in range(self.num_kv_heads)]
        tokens = index_tokens(rows)
        pool = worker_state.pool()
        return StepPlan(
            tokens=tokens.to(device),
            plain=len(tokens) < metadata.num_actual_tokens,
            tail=tail,
            documents=[pool.tables[name] for name in of_document],
            counts=counts,
            starts=_starts(per_head, device),
            order=index_heads_as_sequences(counts, self.num_kv_heads).to(device),
        )

    def _attend_documents(
        self, queries: Tensor, plan: StepPlan, number: int
    ) -> tuple[Tensor, Tensor]:
        """Attend to the documents' pairs of layer `number`.

        Returns:
            Outputs (R, Hq, D) and log-sum-exps (R, Hq), float32.
        """
        count = len(queries)
        groups = self.num_heads // self.num_kv_heads
        by_head = queries.reshape(count * self.num_kv_heads, groups, self.head_size)
        tables = [document.tables[number] for document in plan.documents]
        width = max(table.shape[1] for table in tables)
        sequences = Sequences(
            starts=plan.starts,
            lengths=torch.cat([document.lengths[number] for document in plan.documents]),
            table=torch.cat(
                [torch.nn.functional.pad(table, (0, width - table.shape[1])) for table in tables]
            ),
            most_queries=max(plan.counts),
            longest=max(document.longest[number] for document in plan.documents),
            schedule={},
        )
        sorted_output, sorted_lse = self.attend_pages(by_head[plan.order].contiguous(), sequences)
        self._hide_empty_heads(sorted_lse, plan, number)
        output = sorted_output.new_empty(sorted_output.shape)
        output[plan.order] = sorted_output
        lse = sorted_lse.new_empty(sorted_lse.shape)
        lse[plan.order] = sorted_lse
        return (
            output.view(count, self.num_heads, self.head_size),
            lse.view(count, self.num_heads),
        )

    def _hide_empty_heads(self, lse: Tensor, plan: StepPlan, number: int) -> None:
        """Give heads without a pair, whose page has one of zeros, no weight."""
        first = 0
        for document, count in zip(plan.documents, plan.counts, strict=True):
            end = first + count * self.num_kv_heads
            empty = document.empty[number]
            if empty is not None:
                lse[first:end][empty.repeat_interleave(count)] = -torch.inf
            first = end


def refuse_special_attention(special: Mapping[str, bool]) -> None:
    """Raise RestoreKVError if attention has something `special`, by name."""
    for name, used in special.items():
        if used:
            raise RestoreKVError(
                f"The model's attention has {name}, with which documents are not served; unset "
                "RESTOREKV_VLLM to serve the model without documents."
            )


def _starts(counts: list[int], device: torch.device) -> Tensor:
    """Return where sequences of these lengths begin, and where the last one ends."""
    return torch.tensor([0, *counts], device=device).cumsum(0).int()
