"""The tail's buffers: what moves, what is shared, what is written over, what gradients see."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from restorekv.cache.ragged import RaggedLayer
from restorekv.cache.tail import SPARE
from restorekv.errors import RestoreKVError

HEADS, DIM, RESTORE, SEEN = 2, 4, 3, 11


def pair(columns, batch=1):
    return tuple(torch.randn(batch, HEADS, columns, DIM) for _ in range(2))


def make_layer():
    context = torch.randn(5, DIM), torch.randn(5, DIM)
    offsets, positions = (
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.arange(5, dtype=torch.int32),
    )
    return RaggedLayer(*context, offsets, positions, SEEN, *pair(RESTORE))


def address(layer):
    return layer.keys.data_ptr(), layer.values.data_ptr()


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 5)),
        st.tuples(st.just("crop"), st.integers(0, 9)),
        st.tuples(st.just("to"), st.integers(0, 20)),
        st.tuples(
            st.sampled_from(["rewind", "settle", "swap", "double", "reserve", "learn"]), st.just(2)
        ),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_equals_tensors_that_are_copied_every_time(operations):
    """Whatever is done in whatever order, two layers of one context never see each other's
    writing.
    """
    torch.manual_seed(0)
    mine = make_layer()
    other = mine.fork()
    other.update(*pair(2))
    mine, held = mine.fork(), [x.clone() for x in other.keys_and_values]
    tail, restore = mine.keys_and_values, mine.keys_and_values
    for name, number in operations:
        rows = len(tail[0])
        if name in ("append", "learn"):
            new = pair(number, rows)
            with torch.set_grad_enabled(name == "learn"):
                mine.update(*new)
            tail = tuple(torch.cat(both, 2) for both in zip(tail, new, strict=True))
        elif name == "crop" and 0 < number <= mine.columns:
            mine.crop(-number)
            tail = tuple(x[:, :, : x.shape[2] - number] for x in tail)
        elif name == "to":
            mine.crop(SEEN + number)
            tail = tuple(x[:, :, :number] for x in tail)
        elif name == "rewind":
            mine.reset()
            tail = tuple(x[:1].expand(rows, -1, -1, -1) for x in restore)
        elif name == "settle" and rows == 1:
            mine.commit_tail()
            restore = tail
        elif name == "swap":
            mine.batch_select_indices(torch.arange(rows).flip(0))
            tail = tuple(x.flip(0) for x in tail)
        elif name == "double" and rows < 4:
            mine.batch_repeat_interleave(2)
            tail = tuple(x.repeat_interleave(2, 0) for x in tail)
        elif name == "reserve":
            mine.reserve_columns(mine.columns + 7)
        assert all(x.equal(y) for x, y in zip(mine.keys_and_values, tail, strict=True))
        assert mine.get_seq_length() == SEEN + tail[0].shape[2]
    assert all(x.equal(y) for x, y in zip(other.keys_and_values, held, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_appending_moves_nothing_while_there_is_room(mode):
    with mode():
        layer = make_layer().fork(2)
        layer.update(*pair(6, 2))
        # What may be the only append takes no more than it needs.
        assert layer.buffers[0].shape[2] == RESTORE + 6
        layer.update(*pair(1, 2))
        first = address(layer)
        for _ in range(SPARE - 1):
            layer.update(*pair(1, 2))
        assert address(layer) == first and layer.columns == RESTORE + 6 + SPARE
        layer.reset()
        layer.update(*pair(2, 2))
        assert address(layer) == first and layer.columns == RESTORE + 2


@torch.no_grad()
def test_room_grows_with_the_tail():
    """So that n appends copy a multiple of n columns in all, not of n squared."""
    layer, moved, last = make_layer().fork(), 0, None
    for _ in range(3000):
        layer.update(*pair(1))
        moved += layer.columns if layer.buffers[0].data_ptr() != last else 0
        last = layer.buffers[0].data_ptr()
    assert layer.columns == 3003 and moved < 5 * 3003 and layer.buffers[0].shape[2] < 1.3 * 3003


@torch.no_grad()
def test_reserved_buffers_stay_where_they_are():
    layer = make_layer().fork(3)
    layer.reserve_columns(40)
    first = address(layer)
    for _ in range(3):
        layer.update(*pair(37, 3))
        assert address(layer) == first
        layer.reset()


@torch.no_grad()
def test_what_is_written_after_a_crop_into_the_restore_cache_is_not_restored():
    layer = make_layer()
    restore = [x.clone() for x in layer.keys_and_values]
    layer.update(*pair(4))
    layer.crop(SEEN + 1)
    layer.update(*pair(4))
    layer.reset()
    assert all(x.equal(y) for x, y in zip(layer.keys_and_values, restore, strict=True))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("appended", [0, 3])
def test_a_reset_writes_no_buffer_where_gradients_are_recorded(gradients, appended):
    layer = make_layer().fork(2)
    restore = [x.clone() for x in layer.keys_and_values]
    with torch.no_grad():
        if appended:
            layer.update(*pair(appended, 2))
    buffers = layer.buffers
    with torch.set_grad_enabled(gradients):
        layer.reset()
    assert all(x.equal(y) for x, y in zip(layer.keys_and_values, restore, strict=True))
    assert layer.buffers is (None if gradients else buffers)


@torch.no_grad()
@pytest.mark.parametrize("length", [-RESTORE - 1, SEEN - 1, 1])
def test_a_crop_into_the_context_is_refused(length):
    layer = make_layer()
    with pytest.raises(RestoreKVError, match=f"keeps its text of {SEEN} positions"):
        layer.crop(length)
    assert layer.columns == RESTORE


@torch.no_grad()
@pytest.mark.parametrize("rows, read", [(1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_batch_of_another_size_is_refused(rows, read, gradients):
    """A single row would be written into all rows of the tail without a word."""
    layer = make_layer().fork(rows)
    with (
        torch.set_grad_enabled(gradients),
        pytest.raises(RestoreKVError, match=rf"a batch of {read} .*; pass cache.fork\({read}\)"),
    ):
        layer.update(*pair(4, read))
    assert layer.columns == RESTORE


@torch.no_grad()
def test_held_tensors_are_the_buffers():
    layer = make_layer()
    alone = sum(x.nbytes for x in layer.list_tensors())
    joined = layer.fork()
    with torch.enable_grad():  # makes new tensors instead of buffers
        joined.update(*pair(4))
    added = sum(x.nbytes for x in joined.list_tensors()) - alone
    assert added == 2 * HEADS * (RESTORE + 4) * DIM * 4
    layer.reserve_columns(50)
    assert sum(x.nbytes for x in layer.list_tensors()) - alone == 2 * HEADS * 50 * DIM * 4
    layer.update(*pair(4))
    layer.commit_tail()
    assert (
        sum(x.untyped_storage().nbytes() for x in layer.keys_and_values)
        == 2 * HEADS * (RESTORE + 4) * DIM * 4
    )


CHANGES = {
    "append": lambda layer: layer.update(*pair(1)),
    "ask for a mask": lambda layer: layer.get_mask_sizes(1),
    "reserve": lambda layer: layer.reserve_columns(9),
    "make static": lambda layer: layer.make_static(4, torch.tensor(0)),
    "commit": lambda layer: layer.commit_tail(),
    "reset": lambda layer: layer.reset(),
    "crop": lambda layer: layer.crop(-1),
    "repeat": lambda layer: layer.batch_repeat_interleave(2),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([0])),
    "assign keys": lambda layer: setattr(layer, "keys", layer.keys),
    "assign values": lambda layer: setattr(layer, "values", layer.values),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_locked_tail_refuses_every_change(change):
    layer = make_layer()
    layer.locked = True
    with pytest.raises(RestoreKVError, match="that other questions share"):
        CHANGES[change](layer)
    assert layer.keys is layer.restore_keys and layer.values is layer.restore_values
    fork = layer.fork(2)
    fork.update(*pair(1, 2))
    assert fork.columns == RESTORE + 1 and layer.columns == RESTORE


def test_gradients_pass_through_appends():
    layer, new = make_layer().fork(), [x.requires_grad_() for x in pair(2)]
    with torch.no_grad():
        layer.update(*pair(1))
    layer.update(*new)
    kept = layer.keys
    layer.update(*pair(1))
    assert kept.shape[2] == RESTORE + 3 and layer.buffers is None
    (layer.keys.sum() + 2 * layer.values.sum()).backward()
    assert [x.grad.unique().tolist() for x in new] == [[1.0], [2.0]]


def test_a_tail_of_inference_mode_goes_on_outside_of_it():
    layer = make_layer().fork()
    with torch.inference_mode():
        layer.update(*pair(2))
        layer.update(*pair(1))
    with torch.no_grad():
        layer.update(*pair(1))
    assert layer.columns == RESTORE + 4


@pytest.mark.parametrize("rows", [1, 3])
def test_forks_begin_at_the_restore_cache(rows):
    layer = make_layer()
    with torch.no_grad():
        layer.update(*pair(5))
        fork = layer.fork(rows)
        assert fork.columns == RESTORE and fork.buffers is None and len(fork.keys) == rows
        assert fork.plans is layer.plans and fork.context_keys is layer.context_keys
