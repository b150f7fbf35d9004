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
from restorekv.vllm.document_batch import DocumentBatch, Sequences, make_starts
from restorekv.vllm.page_pool import PagePool, PageTable, PageWriter
from restorekv.vllm.ragged_documents import PLACEHOLDERS
from restorekv.vllm.step_rows import find_document_rows, index_tokens, merge


@dataclass(frozen=True)
class StepPlan:
    """The tokens of a step that ask documents, and what they attend to; it serves all layers.

    tokens (R,): these tokens, those of one document together; plain: whether the step has other
    tokens, too; tail: what every request has in vLLM's pool; batch: the documents.
    """

    tokens: Tensor
    plain: bool
    tail: Sequences
    batch: DocumentBatch


_NOT_PLANNED = object()


class RaggedAttention:
    """A mixin that adds documents to an AttentionImpl of vLLM.

    It comes before that class among the bases, and uses its attributes.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int

    def reserve_documents(
        self, config: Any, device: torch.device, writer: PageWriter, special: Mapping[str, bool]
    ) -> None:
        """Reserve the documents' pool, before vLLM measures what is free for its own.

        Without the connector of documents, do nothing: the layer then works as vLLM's own.

        Args:
            config: vLLM's configuration.
            device: Where attention is computed.
            writer: Puts pairs into pages.
            special: Features that make attention more than a softmax over all pairs: by name,
                whether the layer has it.

        Raises:
            RestoreKVError: The layer has one of these features.
        """
        if not worker_state.serves_documents(config):
            return
        refuse_special_attention(special)

        def make_pool() -> PagePool:
            return PagePool(
                pages=worker_state.count_pool_pages(config, self.head_size),
                page_size=worker_state.get_page_size(config),
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
            kv_cache: The layer's part of vLLM's cache.
            sequences: One per request.

        Returns:
            Outputs (R, Hq, D) and log-sum-exps (R, Hq) of the scaled logits, float32.
        """

    @abstractmethod
    def attend_pages(self, queries: Tensor, sequences: Sequences) -> tuple[Tensor, Tensor]:
        """Attend to all pairs in pages of the documents' pool; each page has one KV head.

        Args:
            queries: (N, G, D), the G query heads of a KV head.
            sequences: One per document and KV head.

        Returns:
            Outputs (N, G, D) and log-sum-exps (N, G) of the scaled logits, float32.
        """

    def prefers_loop(self, tokens: int, document: PageTable) -> bool:
        """Return whether `attend_heads` is faster for a document that `tokens` of a step ask."""
        return False

    def attend_heads(
        self, queries: Tensor, document: PageTable, number: int
    ) -> tuple[Tensor, Tensor]:
        """Attend to all pairs of a document head by head; only if `prefers_loop` says so.

        Args:
            queries: (H * R, G, D), the R tokens of every KV head together.
            document: Where it lies.
            number: The number of the layer.

        Returns:
            Outputs (H * R, G, D) and log-sum-exps (H * R, G) of the scaled logits, float32.
        """
        raise NotImplementedError

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
        """Attend as vLLM's own backend does, and also to documents if requests ask them."""
        # vLLM passes no metadata while it measures memory.
        plan = None if attn_metadata is None else self._get_plan(kv_cache, attn_metadata)
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
            # vLLM calls layers by their names; documents number theirs.
            number = worker_state.find_layer_number(layer.layer_name)
            document, document_lse = self._attend_documents(queries, plan, number)
            merged = merge(tail, tail_lse, document, document_lse)
            output.view(-1, self.num_heads, self.head_size)[plan.tokens] = merged.to(output.dtype)
        return output

    def _get_plan(self, kv_cache: Tensor, metadata: Any) -> StepPlan | None:
        """Return the step's plan, which its first layer makes; None if it asks no document."""
        plan = getattr(metadata, "restorekv_plan", _NOT_PLANNED)
        if plan is _NOT_PLANNED:
            documents = worker_state.get_step()
            plan = self._make_plan(documents, kv_cache, metadata) if documents else None
            # All layers of a step share `metadata`, so the first layer plans for all.
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
            starts=make_starts(row_counts, device),
            lengths=torch.tensor(row_tails, dtype=torch.int32, device=device),
            # A request begins with PLACEHOLDERS ids that name the document: whole blocks whose
            # pairs are never attended to.
            table=metadata.block_table[table_rows, PLACEHOLDERS // block_size :].contiguous(),
            max_queries=max(row_counts),
            longest=max(row_tails),
            schedule={},
        )
        # Requests that ask one document are attended together, as more queries of its heads.
        counts: dict[str, int] = {}
        for row in rows:
            counts[row.document] = counts.get(row.document, 0) + row.count
        tokens = index_tokens(rows)
        return StepPlan(
            tokens=tokens.to(device),
            # The padding of a CUDA graph is not a token.
            plain=len(tokens) < metadata.num_actual_tokens,
            tail=tail,
            batch=self._make_batch(counts, device),
        )

    def _make_batch(self, counts: Mapping[str, int], device: torch.device) -> DocumentBatch:
        """Return the batch for documents with these numbers of tokens; reuse the last step's if it
        fits.
        """
        pool = worker_state.get_pool()
        documents = [pool.tables[name] for name in counts]
        batch = worker_state.get_last_batch()
        if batch is None or not batch.is_of(documents, list(counts.values())):
            by_head = [
                self.prefers_loop(count, document)
                for count, document in zip(counts.values(), documents, strict=True)
            ]
            batch = DocumentBatch(
                documents, list(counts.values()), self.num_kv_heads, device, by_head
            )
            worker_state.keep_batch(batch)
        return batch

    def _attend_documents(
        self, queries: Tensor, plan: StepPlan, number: int
    ) -> tuple[Tensor, Tensor]:
        """Attend to the documents' pairs of layer `number`.

        Returns:
            Outputs (R, Hq, D) and log-sum-exps (R, Hq), float32.
        """
        count = len(queries)
        groups = self.num_heads // self.num_kv_heads
        batch = plan.batch
        # Query heads of one KV head stand together: (R, Hq, D) -> (R * H, G, D).
        by_head = queries.reshape(count * self.num_kv_heads, groups, self.head_size)[batch.order]
        outputs = []
        sums = []
        if batch.paged:
            sequences, empty = batch.of_layer(number)
            output, lse = self.attend_pages(by_head[: batch.paged], sequences)
            if empty is not None:
                # The page of an empty head has one pair of zeros, which must get no weight.
                lse[empty] = -torch.inf
            outputs.append(output)
            sums.append(lse)
        for document, own in batch.looped:
            output, lse = self.attend_heads(by_head[own], document, number)
            empty = document.empty[number]
            if empty is not None:
                lse.view(self.num_kv_heads, -1)[empty] = -torch.inf
            outputs.append(output)
            sums.append(lse)
        # The usual step has one part, which need not be copied.
        all_outputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        all_sums = sums[0] if len(sums) == 1 else torch.cat(sums)
        return (
            # Back into the order of the tokens.
            all_outputs[batch.inverse_order].view(count, self.num_heads, self.head_size),
            all_sums[batch.inverse_order].view(count, self.num_heads),
        )


def refuse_special_attention(special: Mapping[str, bool]) -> None:
    """Raise RestoreKVError if attention has one of these features, given by name."""
    for name, used in special.items():
        if used:
            raise RestoreKVError(
                f"The model's attention has {name}, with which documents are not served; unset "
                "RESTOREKV_VLLM to serve the model without documents."
            )
