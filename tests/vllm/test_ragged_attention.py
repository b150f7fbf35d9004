"""Attention over a tail and documents, against one softmax over all pairs in float64."""

from types import SimpleNamespace

import pytest
import torch

from restorekv.errors import RestoreKVError
from restorekv.vllm import worker_state
from restorekv.vllm.head_loop import attend_by_head, write_flat_pages
from restorekv.vllm.page_pool import PagePool
from restorekv.vllm.ragged_attention import RaggedAttention, refuse_special_attention
from restorekv.vllm.ragged_documents import PLACEHOLDERS
from restorekv.vllm.step_rows import find_document_rows, measure_log_sum_exp, merge
from tests.helpers.document_pairs import make_document
from tests.helpers.paged_attention import (
    attend_plainly,
    flash_attn_varlen_func,
    read_flat_pages,
)

BLOCK, PAGE, DIM = 16, 4, 8
SKIPPED = PLACEHOLDERS // BLOCK


class PlainBackend:
    """A backend that, like vLLM's own, knows nothing of documents."""

    num_heads, num_kv_heads, head_size, scale = 4, 2, DIM, 0.3

    def forward(self, layer, query, key, value, kv_cache, metadata, output, *scales):
        self.calls = getattr(self, "calls", 0) + 1
        starts = metadata.query_start_loc.tolist()
        for row, pairs in enumerate(metadata.seq_lens.tolist()):
            own = slice(starts[row], starts[row + 1])
            found = self.of_pages(kv_cache, metadata.block_table[row], pairs, query[own])
            output[own] = found[0].to(output.dtype)
        return output

    def of_pages(self, kv_cache, table, pairs, query):
        pages = kv_cache[table[: -(-pairs // BLOCK)].long()].transpose(1, 2)
        keys, values = pages.flatten(0, 1)[:pairs].split(DIM, -1)
        return attend_plainly(query, keys, values, self.scale, True)


class RaggedBackend(RaggedAttention, PlainBackend):
    """A backend with documents, which computes with the emulated FlashAttention."""

    def attend_tail(self, layer, queries, kv_cache, sequences):
        return self.run(queries, kv_cache, sequences, True)

    def attend_pages(self, queries, sequences):
        return self.run(queries, worker_state.get_pool().pages, sequences, False)

    def run(self, queries, pages, sequences, causal):
        keys, values = pages.transpose(1, 2).split(DIM, -1)
        output, lse = flash_attn_varlen_func(
            queries,
            keys,
            values,
            cu_seqlens_q=sequences.starts,
            max_seqlen_q=sequences.max_queries,
            seqused_k=sequences.lengths,
            max_seqlen_k=sequences.longest,
            softmax_scale=self.scale,
            causal=causal,
            block_table=sequences.table,
            return_softmax_lse=True,
            fa_version=2,
        )
        return output.float(), lse.T


class LoopingBackend(RaggedBackend):
    """A backend that attends to the documents named in `looped` head by head."""

    def __init__(self, looped):
        self.looped = looped

    def prefers_loop(self, tokens, document):
        return any(worker_state.get_pool().tables[name] is document for name in self.looped)

    def attend_heads(self, queries, document, number):
        pages = worker_state.get_pool().pages
        return attend_by_head(queries, document, number, pages, read_flat_pages, self.scale)


@pytest.fixture
def pool():
    worker_state.forget_pools()
    yield worker_state.reserve_pool(
        "test", lambda: PagePool(100, PAGE, DIM, torch.float32, "cpu", write_flat_pages)
    )
    worker_state.end_step()
    worker_state.forget_pools()


def make_step(requests, seed=0):
    """Make the inputs of a step of vLLM.

    Args:
        requests: (all tokens so far, those of this step) of every request.
        seed: Of the random numbers.

    Returns:
        The query, the cache and the attention metadata.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-seen // BLOCK) for seen, _ in requests]
    table = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
    first = 1
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(first, first + count)
        first += count
    counts = [count for _, count in requests]
    kv_cache = torch.randn(first, 2, BLOCK, 2 * DIM, generator=generator)
    metadata = SimpleNamespace(
        block_table=table,
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor([seen for seen, _ in requests], dtype=torch.int32),
        num_actual_tokens=sum(counts),
    )
    query = torch.randn(sum(counts), 4, DIM, generator=generator)
    return query, kv_cache, metadata


def run(backend, layer, query, kv_cache, metadata):
    named = SimpleNamespace(layer_name=f"model.layers.{layer}.self_attn.attn")
    output = torch.full_like(query, torch.nan)
    return backend.forward(named, query, None, None, kv_cache, metadata, output)


def expect(backend, layer, document, query, kv_cache, table, seen):
    """Return attention of a request's tokens over tail and document, in one softmax per head."""
    tail = seen - PLACEHOLDERS
    pages = kv_cache[table[SKIPPED : SKIPPED + -(-tail // BLOCK)].long()].transpose(1, 2)
    keys, values = pages.flatten(0, 1)[:tail].split(DIM, -1)
    bounds = [0, *document.lengths[layer].cumsum(0).tolist()]
    output = torch.empty(len(query), 4, DIM, dtype=torch.float64)
    for head in range(2):
        own = slice(bounds[head], bounds[head + 1])
        all_keys = torch.cat([document.keys[layer][own], keys[:, head]])[:, None]
        all_values = torch.cat([document.values[layer][own], values[:, head]])[:, None]
        group = slice(2 * head, 2 * head + 2)
        output[:, group] = attend_plainly(
            query[:, group], all_keys, all_values, backend.scale, True
        )[0]
    return output


@pytest.mark.parametrize("looped", ["", "a", "b", "ab"])
@pytest.mark.parametrize("layer", [0, 1])
def test_plain_and_asking_requests_share_a_step(pool, layer, looped):
    documents = {
        "a": make_document([[1, 37], [6, 0]], DIM, 1),
        "b": make_document([[9, 4], [0, 2]], DIM, 2),
    }
    for name, document in documents.items():
        pool.put(name, document)
    # Two ask a, one of them several tokens; one asks b; one is plain and comes in between.
    asks = ["a", None, "b", "a"]
    requests = [(PLACEHOLDERS + 21, 5), (30, 3), (PLACEHOLDERS + 1, 1), (PLACEHOLDERS + 40, 1)]
    query, kv_cache, metadata = make_step(requests)
    firsts = metadata.block_table[:, 0].tolist()
    worker_state.begin_step({first: name for first, name in zip(firsts, asks, strict=True) if name})
    backend = LoopingBackend(looped)
    found = run(backend, layer, query, kv_cache, metadata)
    starts = metadata.query_start_loc.tolist()
    for row, name in enumerate(asks):
        own = slice(starts[row], starts[row + 1])
        table, seen = metadata.block_table[row], requests[row][0]
        if name is None:
            wanted = backend.of_pages(kv_cache, table, seen, query[own])[0]
        else:
            document = documents[name]
            wanted = expect(backend, layer, document, query[own], kv_cache, table, seen)
        assert (found[own] - wanted).abs().max() < 1e-5, name


def test_steps_share_what_their_documents_have_in_common(pool):
    """The batch is reused until a step asks other documents, or a document moves to other pages."""
    backend = RaggedBackend()
    documents = {"a": make_document([[5, 0]], DIM, 1), "b": make_document([[9, 4]], DIM, 2)}
    for name, document in documents.items():
        pool.put(name, document)

    def check_step(names, seen):
        query, kv_cache, metadata = make_step([(PLACEHOLDERS + seen, 1)] * len(names), seen)
        firsts = metadata.block_table[:, 0].tolist()
        worker_state.begin_step(dict(zip(firsts, names, strict=True)))
        found = run(backend, 0, query, kv_cache, metadata)
        for row, name in enumerate(names):
            own, table = query[row : row + 1], metadata.block_table[row]
            wanted = expect(backend, 0, documents[name], own, kv_cache, table, PLACEHOLDERS + seen)
            assert (found[row] - wanted[0]).abs().max() < 1e-5
        return worker_state.get_last_batch()

    first = check_step(["a", "b"], 3)
    assert check_step(["a", "b"], 4) is first
    assert check_step(["b", "a"], 5) is not first
    second = check_step(["a", "b"], 6)
    pool.drop("a")
    documents["a"] = make_document([[30, 2]], DIM, 3)
    pool.put("a", documents["a"])
    assert check_step(["a", "b"], 7) is not second


def test_a_step_without_documents_is_vllms_own(pool):
    query, kv_cache, metadata = make_step([(30, 3), (7, 7)])
    worker_state.begin_step({12345: "a"})
    backend = RaggedBackend()
    found = run(backend, 0, query, kv_cache, metadata)
    assert found.equal(run(PlainBackend(), 0, query, kv_cache, metadata)) and backend.calls == 1


def test_vllms_own_code_does_not_run_for_questions_alone(pool):
    pool.put("a", make_document([[3, 3]], DIM, 1))
    query, kv_cache, metadata = make_step([(PLACEHOLDERS + 2, 2)])
    worker_state.begin_step({int(metadata.block_table[0, 0]): "a"})
    backend = RaggedBackend()
    assert run(backend, 0, query, kv_cache, metadata).isfinite().all()
    assert not hasattr(backend, "calls")


@pytest.mark.parametrize("setting", ["sinks", "a soft cap", "a sliding window"])
def test_attention_that_is_more_than_a_softmax_is_refused(setting):
    none = {"sinks": False, "a soft cap": False, "ALiBi slopes": False, "a sliding window": False}
    refuse_special_attention(none)
    with pytest.raises(RestoreKVError, match=f"attention has {setting}.*unset RESTOREKV_VLLM"):
        refuse_special_attention({**none, setting: True})


def test_tokens_that_are_placeholders_ask_nothing():
    starts = [0, 20, 21, 51]
    rows = find_document_rows({7: "a", 9: "b"}, [7, 8, 9], starts, [20, 50, PLACEHOLDERS + 2])
    (rows_of_b,) = rows
    assert (rows_of_b.document, rows_of_b.first, rows_of_b.count) == ("b", 49, 2)
    assert (rows_of_b.tail, rows_of_b.table_row) == (2, 2)


@pytest.mark.parametrize("shift", [-7000, -80, -30, 0, 12, 60, 150, 420, 7000])
def test_log_sum_exps_of_a_kernel_without_them(shift):
    """Logits may have any size: sinks are tried until one measures them.

    Biases on keys, such as those of Qwen 2, make logits large in some heads.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 3, 50, generator=generator) * 4
    logits[:, 1:] += shift
    values = torch.randn(50, DIM, generator=generator)

    def attend(sink):
        with_sink = torch.cat([logits, logits.new_full((20, 3, 1), sink)], -1)
        return logits.softmax(-1) @ values, with_sink.softmax(-1)[..., :50] @ values

    output, lse = measure_log_sum_exp(attend)
    wanted = logits.double().logsumexp(-1)
    assert (lse - wanted).abs().max() < 2e-5 + abs(shift) * 2e-7
    assert output.equal(attend(0.0)[0])


def test_merging_is_one_softmax():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 30, generator=generator, dtype=torch.float64) * 9
    values = torch.randn(30, DIM, generator=generator, dtype=torch.float64)
    parts = [
        (logits[:, own].softmax(-1) @ values[own], logits[:, own].logsumexp(-1))
        for own in (slice(0, 11), slice(11, 30))
    ]
    assert torch.allclose(merge(*parts[0], *parts[1]), logits.softmax(-1) @ values, atol=1e-12)
    nothing = torch.full((6,), -torch.inf, dtype=torch.float64)
    assert merge(*parts[0], parts[1][0], nothing).equal(parts[0][0])
    assert torch.allclose(merge(parts[0][0], nothing, *parts[1]), parts[1][0], atol=1e-12)
    # As in a head that was pruned, whose values are all zero.
    zeros = torch.zeros_like(parts[0][0])
    assert merge(zeros, nothing, zeros, nothing).equal(zeros)


def test_a_head_without_a_value_and_without_a_document_is_zero(pool):
    """No log-sum-exp can be measured of values that are all zero."""
    backend = RaggedBackend()
    run_kernel = backend.run
    backend.run = lambda *args: measure_plainly(run_kernel(*args))
    document = make_document([[3, 0]], DIM, 1)
    pool.put("a", document)
    query, kv_cache, metadata = make_step([(PLACEHOLDERS + 2, 2)])
    kv_cache[:, 1, :, DIM:] = 0
    worker_state.begin_step({int(metadata.block_table[0, 0]): "a"})
    found = run(backend, 0, query, kv_cache, metadata)
    assert found[:, 2:].equal(torch.zeros_like(found[:, 2:]))
    assert found[:, :2].isfinite().all()


def measure_plainly(part):
    """Return a part as from `measure_log_sum_exp`: with -inf wherever that cannot measure."""
    output, lse = part
    return output, lse.masked_fill(output.square().sum(-1) == 0, -torch.inf)
