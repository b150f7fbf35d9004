"""The connector's halves without an engine: several workers, of which one cannot read a file."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from restorekv.vllm.document_store import StoredDocument
from restorekv.vllm.ragged_connector import LoadReport, SchedulerHalf
from restorekv.vllm.ragged_documents import PLACEHOLDERS

IDS = tuple(range(PLACEHOLDERS))
DOCUMENT = StoredDocument(Path("a.rkv"), "a", IDS, lengths=torch.full((2, 2), 40))


class OneDocument:
    """A store that has one document, which every prompt asks."""

    model = SimpleNamespace(head_dim=8)
    documents = ()

    def scan(self):
        return False

    def find_document(self, ids, wanted=None):
        return DOCUMENT

    def count_answer_room(self, document, ids):
        return 7


def make_half(workers):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, world_size=workers),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=None,
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    return SchedulerHalf(config, OneDocument())


def make_request(name):
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=[*IDS, 1, 2, 3],
        num_tokens=len(IDS) + 3,
        max_tokens=16,
        kv_transfer_params=None,
        skip_reading_prefix_cache=False,
        sampling_params=None,
    )


def test_a_document_is_there_when_every_worker_has_read_it():
    half = make_half(workers=2)
    request = make_request("one")
    assert half.count_computed_tokens(request, 0) is None
    (load,) = half.make_orders({}).loads
    for count in (1, 1):
        assert half.count_computed_tokens(request, 0) is None
        half.apply_report(LoadReport({("a", load.number): count}))
    assert (
        half.count_computed_tokens(request, 0) == PLACEHOLDERS
        and half.count_computed_tokens(request, 16) == PLACEHOLDERS - 16
    )
    half.note_blocks(request, (7, 8, 9))
    assert half.make_orders({"one": 3}).documents == {7: "a"}
    assert half.make_orders({"other": 3}).documents == {}, (
        "a preempted request's blocks are others'"
    )
    half.forget_request("one")
    assert half.make_orders({"one": 3}).documents == {}


def test_a_load_that_failed_on_one_worker_counts_nowhere():
    """The other worker reports it later; that must not count for the next load."""
    half = make_half(workers=2)
    first = make_request("one")
    assert half.count_computed_tokens(first, 0) is None
    (load,) = half.make_orders({}).loads
    half.apply_report(LoadReport(failed={("a", load.number): "cannot be read"}))
    assert half.count_computed_tokens(first, 0) == PLACEHOLDERS + 3, (
        "promised, and reported as lost"
    )
    assert not first.skip_reading_prefix_cache
    half.note_blocks(first, (0, 1))
    orders = half.make_orders({"one": 3})
    assert orders.drops == ["a"] and orders.refused == {"one": 1}
    half.forget_request("one")
    second = make_request("two")
    assert half.count_computed_tokens(second, 0) is None
    (again,) = half.make_orders({}).loads
    half.apply_report(LoadReport({("a", load.number): 1, ("a", again.number): 1}))
    assert half.count_computed_tokens(second, 0) is None
    half.apply_report(LoadReport({("a", again.number): 1}))
    assert half.count_computed_tokens(second, 0) == PLACEHOLDERS


def test_an_answer_is_shortened_to_the_positions_that_are_left():
    half = make_half(workers=1)
    request = make_request("one")
    half.count_computed_tokens(request, 0)
    assert request.max_tokens == OneDocument().count_answer_room(DOCUMENT, IDS)


def test_reports_of_ranks_are_added():
    first = LoadReport({("a", 1): 1}, {("b", 2): "no"})
    both = first.aggregate(LoadReport({("a", 1): 1, ("c", 3): 1}))
    assert both == LoadReport({("a", 1): 2, ("c", 3): 1}, {("b", 2): "no"})
