"""Attention head by head, and the layouts of pages from which it can read."""

import pytest
import torch

from restorekv.vllm.head_loop import (
    MIN_TOKENS,
    MIN_WORK,
    attend_by_head,
    find_reader,
    prefers_loop,
    read_transposed_pages,
    write_flat_pages,
)
from restorekv.vllm.page_pool import PagePool
from tests.helpers.document_pairs import make_document
from tests.helpers.paged_attention import attend_plainly, read_flat_pages

PAGE, DIM = 8, 16


def write_transposed(pages, keys, values, slots):
    """Write as vLLM's CPU kernel for vector instructions does."""
    count, _, size, width = pages.shape
    halves = pages.view(count, 2, -1)
    of_keys = halves[:, 0].view(count, width // 2, size)
    of_values = halves[:, 1].view(count, size, width // 2)
    of_keys[slots // size, :, slots % size] = keys[:, 0]
    of_values[slots // size, slots % size] = values[:, 0]


def write_backwards(pages, keys, values, slots):
    """Write in a layout that nobody knows."""
    write_flat_pages(pages, keys.flip(-1), values, slots)


LAYOUTS = {read_flat_pages: write_flat_pages, read_transposed_pages: write_transposed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reader", LAYOUTS)
def test_a_layout_is_known_by_what_was_written(reader, dtype):
    pages = torch.zeros(2, 1, PAGE, 2 * DIM, dtype=dtype)
    assert find_reader(list(LAYOUTS), pages, LAYOUTS[reader]) is reader
    assert find_reader(list(LAYOUTS), pages, write_backwards) is None


@pytest.mark.parametrize("reader", LAYOUTS)
def test_it_is_one_softmax_over_every_head(reader):
    lengths = [[1, 37, 8], [16, 5, 0]]
    pool = PagePool(40, PAGE, DIM, torch.float32, "cpu", LAYOUTS[reader])
    document = make_document(lengths, DIM)
    table = pool.put("a", document)
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(3 * 5, 2, DIM, generator=generator)
    for layer, of_heads in enumerate(lengths):
        output, lse = attend_by_head(queries, table, layer, pool.pages, reader, 0.3)
        first = 0
        for head, pairs in enumerate(of_heads):
            own = slice(first, first + pairs)
            first += pairs
            if not pairs:
                continue
            rows = slice(5 * head, 5 * head + 5)
            keys = document.keys[layer][own][:, None]
            values = document.values[layer][own][:, None]
            wanted, wanted_lse = attend_plainly(queries[rows], keys, values, 0.3, False)
            assert (output[rows] - wanted).abs().max() < 1e-5
            assert (lse[rows] - wanted_lse.T).abs().max() < 1e-5


def test_it_is_for_many_tokens_over_many_pairs():
    pool = PagePool(4000, PAGE, DIM, torch.float32, "cpu", write_flat_pages)
    long, short = MIN_WORK // MIN_TOKENS, 4
    tables = {}
    for pairs in (long, short):
        tables[pairs] = pool.put(str(pairs), make_document([[pairs, pairs]], DIM))
    assert prefers_loop(MIN_TOKENS, tables[long])
    assert not prefers_loop(MIN_TOKENS - 1, tables[long])
    assert not prefers_loop(MIN_TOKENS, tables[short])
    assert prefers_loop(MIN_WORK // short, tables[short])
