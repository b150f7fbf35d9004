"""The connector's two sides without an engine, with several workers, one of which cannot read a
file.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from restorekv.vllm.document_store import StoredDocument
from restorekv.vllm.ragged_connector import RaggedConnectorScheduler, RaggedWorkerMetadata
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


def make_scheduler(workers):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=32),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, world_size=workers),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=None,
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    return RaggedConnectorScheduler(config, OneDocument())


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
    scheduler = make_scheduler(workers=2)
    request = make_request("one")
    assert scheduler.admit_request(request, 0) is None
    (load,) = scheduler.make_orders({}).loads
    for count in (1, 1):
        assert scheduler.admit_request(request, 0) is None
        scheduler.apply_report(RaggedWorkerMetadata({("a", load.number): count}))
    assert (
        scheduler.admit_request(request, 0) == PLACEHOLDERS
        and scheduler.admit_request(request, 16) == PLACEHOLDERS - 16
    )
    scheduler.note_blocks(request, (7, 8, 9))
    assert scheduler.make_orders({"one": 3}).documents == {7: "a"}
    assert scheduler.make_orders({"other": 3}).documents == {}, (
        "a preempted request's blocks are others'"
    )
    scheduler.forget_request("one")
    assert scheduler.make_orders({"one": 3}).documents == {}


def test_a_load_that_failed_on_one_worker_counts_nowhere():
    """The other worker reports the failed load later; that must not count for the next load."""
    scheduler = make_scheduler(workers=2)
    first = make_request("one")
    assert scheduler.admit_request(first, 0) is None
    (load,) = scheduler.make_orders({}).loads
    scheduler.apply_report(RaggedWorkerMetadata(failed={("a", load.number): "cannot be read"}))
    assert scheduler.admit_request(first, 0) == PLACEHOLDERS + 3, "promised, and reported as lost"
    assert not first.skip_reading_prefix_cache
    scheduler.note_blocks(first, (0, 1))
    orders = scheduler.make_orders({"one": 3})
    assert orders.drops == ["a"] and orders.refused == {"one": 1}
    scheduler.forget_request("one")
    second = make_request("two")
    assert scheduler.admit_request(second, 0) is None
    (again,) = scheduler.make_orders({}).loads
    scheduler.apply_report(RaggedWorkerMetadata({("a", load.number): 1, ("a", again.number): 1}))
    assert scheduler.admit_request(second, 0) is None
    scheduler.apply_report(RaggedWorkerMetadata({("a", again.number): 1}))
    assert scheduler.admit_request(second, 0) == PLACEHOLDERS


def test_an_answer_is_shortened_to_the_positions_that_are_left():
    scheduler = make_scheduler(workers=1)
    request = make_request("one")
    scheduler.admit_request(request, 0)
    assert request.max_tokens == OneDocument().count_answer_room(DOCUMENT, IDS)


def test_reports_of_ranks_are_added():
    first = RaggedWorkerMetadata({("a", 1): 1}, {("b", 2): "no"})
    both = first.aggregate(RaggedWorkerMetadata({("a", 1): 1, ("c", 3): 1}))
    assert both == RaggedWorkerMetadata({("a", 1): 2, ("c", 3): 1}, {("b", 2): "no"})
