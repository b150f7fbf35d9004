"""Pages of documents and the ledger that says which of them stay."""

import random

import pytest
import torch

from restorekv.errors import RestoreKVError
from restorekv.vllm.head_loop import write_flat_pages
from restorekv.vllm.page_pool import PagePool, PoolLedger, Residency, count_pages
from tests.helpers.document_pairs import make_document

PAGE, DIM = 4, 8


def make_pool(pages):
    return PagePool(pages, PAGE, DIM, torch.float32, "cpu", write_flat_pages)


def read_back(pool, table, layer, head, pairs):
    """Return the keys and values of a head from its pages."""
    pages = table.tables[layer][head, : -(-pairs // PAGE)].long()
    rows = pool.pages[pages].flatten(0, 2)[:pairs]
    return rows.split(DIM, -1)


def check_contents(pool, name, document):
    table = pool.tables[name]
    for layer, lengths in enumerate(document.lengths.tolist()):
        first = 0
        for head, pairs in enumerate(lengths):
            keys, values = read_back(pool, table, layer, head, pairs)
            assert keys.equal(document.keys[layer][first : first + pairs])
            assert values.equal(document.values[layer][first : first + pairs])
            first += pairs


def test_heads_of_any_lengths_lie_in_their_pages():
    pool = make_pool(20)
    documents = {
        "a": make_document([[1, 9], [4, 0]], DIM, 1),
        "b": make_document([[0, 0], [5, 2]], DIM, 2),
    }
    for name, document in documents.items():
        pool.put(name, document)
    for name, document in documents.items():
        check_contents(pool, name, document)
    assert pool.tables["a"].lengths[1].tolist() == [4, 1] and pool.tables["a"].longest == [9, 4]
    assert pool.tables["a"].empty[0] is None and pool.tables["a"].empty[1].tolist() == [False, True]
    used = sum(count_pages(document.lengths, PAGE) for document in documents.values())
    assert used == (1 + 3 + 1 + 1) + (1 + 1 + 2 + 1) == 20 - len(pool.free)


def test_what_lies_behind_the_last_pair_is_no_nan():
    pool = make_pool(3)
    pool.pages.fill_(torch.nan)
    pool.put("a", make_document([[5]], DIM))
    assert pool.pages[pool.tables["a"].pages].isfinite().all()


def test_a_document_without_room_takes_nothing():
    pool = make_pool(3)
    pool.put("a", make_document([[5]], DIM))
    with pytest.raises(RestoreKVError, match="needs 2 pages and 1 are free"):
        pool.put("b", make_document([[8]], DIM))
    pool.drop("a")
    pool.drop("a")
    pool.put("b", make_document([[8]], DIM))
    assert sorted(pool.free) == [2]


def test_documents_come_and_go():
    """No document is overwritten, whatever was put and dropped before."""
    chance = random.Random(0)
    pool = make_pool(60)
    held = {}
    for number in range(200):
        document = make_document([[chance.randrange(20) for _ in range(3)]] * 2, DIM, number)
        while count_pages(document.lengths, PAGE) > len(pool.free):
            name = chance.choice(sorted(held))
            pool.drop(name)
            del held[name]
        pool.put(str(number), document)
        held[str(number)] = document
        for name in chance.sample(sorted(held), 1):
            check_contents(pool, name, held[name])
    taken = sum(count_pages(document.lengths, PAGE) for document in held.values())
    assert taken + len(pool.free) == 60


def load_all(ledger):
    drops, loads = ledger.take_orders()
    for name in loads:
        ledger.finish_load(name)
    return drops, loads


def test_a_document_is_loaded_once_and_asked_by_many():
    ledger = PoolLedger(10)
    assert ledger.pin_or_load("first", "a", 4) is Residency.LOADING
    assert ledger.pin_or_load("second", "a", 4) is Residency.LOADING
    assert load_all(ledger) == ([], ["a"])
    assert [ledger.pin_or_load(name, "a", 4) for name in ("first", "second", "third")] == (
        [Residency.RESIDENT] * 3
    )
    assert ledger.take_orders() == ([], [])


def test_the_least_recently_asked_goes_and_what_is_asked_stays():
    ledger = PoolLedger(10)
    for name in ("a", "b"):
        ledger.pin_or_load(name + "'s", name, 5)
        load_all(ledger)
    assert ledger.pin_or_load("c's", "c", 5) is Residency.NO_ROOM
    ledger.release("b's")
    ledger.release("a's")
    ledger.pin_or_load("another", "a", 5)
    ledger.release("another")
    assert ledger.pin_or_load("c's", "c", 5) is Residency.LOADING
    assert load_all(ledger) == (["b"], ["c"])
    assert ledger.pin_or_load("b's", "b", 11) is Residency.TOO_LARGE


def test_a_document_that_could_not_be_read_gives_its_room_back():
    ledger = PoolLedger(4)
    ledger.pin_or_load("one", "a", 4)
    ledger.take_orders()
    ledger.forget("a")
    assert ledger.free == 4 and ledger.take_orders() == (["a"], [])
    assert ledger.pin_or_load("two", "a", 4) is Residency.LOADING


def test_who_waits_long_gets_room():
    """A document that is asked all the time keeps others out for at most MAX_OVERTAKES requests."""
    ledger = PoolLedger(4)
    ledger.pin_or_load("first", "a", 4)
    load_all(ledger)
    running = ["first"]
    assert ledger.pin_or_load("patient", "b", 4) is Residency.NO_ROOM
    for number in range(1000):
        if ledger.pin_or_load(str(number), "a", 4) is Residency.RESIDENT:
            running.append(str(number))
        if ledger.pin_or_load("patient", "b", 4) is Residency.LOADING:
            break
        if number % 2 and running:
            ledger.release(running.pop(0))
    else:
        pytest.fail("the document never got room")
    assert number <= 4 * PoolLedger.MAX_OVERTAKES


def test_one_who_gives_up_waiting_holds_up_nobody():
    ledger = PoolLedger(4)
    ledger.pin_or_load("first", "a", 4)
    load_all(ledger)
    ledger.pin_or_load("patient", "b", 4)
    for number in range(PoolLedger.MAX_OVERTAKES):
        assert ledger.pin_or_load(str(number), "a", 4) is Residency.RESIDENT
    assert ledger.pin_or_load("late", "a", 4) is Residency.NO_ROOM
    ledger.release("patient")
    assert ledger.pin_or_load("late", "a", 4) is Residency.RESIDENT


@pytest.mark.parametrize("seed", range(20))
def test_the_ledger_never_promises_more_than_there_is(seed):
    """Workers that follow the orders never run out of pages, and pinned documents stay."""
    chance = random.Random(seed)
    ledger = PoolLedger(30)
    sizes = {f"document {number}": chance.randint(1, 20) for number in range(8)}
    there, pinned, loading = set(), {}, []
    for step in range(400):
        request = f"request {chance.randrange(12)}"
        action = chance.random()
        if action < 0.6:
            name = pinned.get(request) or chance.choice(sorted(sizes))
            found = ledger.pin_or_load(request, name, sizes[name])
            if found in (Residency.RESIDENT, Residency.LOADING):
                pinned[request] = name
            if found is Residency.RESIDENT:
                assert name in there
        elif action < 0.8:
            ledger.release(request)
            pinned.pop(request, None)
        else:
            drops, loads = ledger.take_orders()
            for name in drops:
                assert name not in pinned.values() or name in loads  # asked again since
                there.discard(name)
            loading += loads
            for name in loading:
                there.add(name)
                ledger.finish_load(name)
            loading = []
            assert sum(sizes[name] for name in there) <= 30, step


def test_pages_are_counted_up():
    assert count_pages(torch.tensor([[0, 1], [4, 5]]), 4) == 1 + 1 + 1 + 2


def test_new_small_documents_do_not_keep_a_large_one_out():
    """Documents that are absent wait too, once another has waited long."""
    ledger = PoolLedger(4)
    assert ledger.pin_or_load("first", "small 0", 1) is Residency.LOADING
    load_all(ledger)
    assert ledger.pin_or_load("patient", "large", 4) is Residency.NO_ROOM
    running = ["first"]
    for number in range(1, 1000):
        if ledger.pin_or_load(str(number), f"small {number}", 1) is Residency.LOADING:
            running.append(str(number))
            load_all(ledger)
        if len(running) > 2:
            ledger.release(running.pop(0))
        if ledger.pin_or_load("patient", "large", 4) is Residency.LOADING:
            break
        # Nothing new begins any more; what runs ends.
        if ledger.waiting["large"] >= PoolLedger.MAX_OVERTAKES and running:
            ledger.release(running.pop(0))
    else:
        pytest.fail("the large document never got room")
    assert number <= 4 * PoolLedger.MAX_OVERTAKES


def test_a_document_that_is_put_twice_takes_its_pages_once():
    pool, document = make_pool(20), make_document([[1, 9]], DIM, 1)
    free = len(pool.free)
    pool.put("a", document)
    taken = free - len(pool.free)
    pool.put("a", document)
    assert len(pool.free) == free - taken and taken > 0
    pool.drop("a")
    assert len(pool.free) == free
