"""A full cache that lies elsewhere: the same results, and one layer of it at hand."""

import errno
import re
import tempfile
import weakref
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from restorekv import CompressionConfig
from restorekv.compression.eviction import Eviction
from restorekv.errors import RestoreKVError
from restorekv.evictors.knorm import Knorm
from restorekv.evictors.kvpress_bridge import FromKVPress
from restorekv.model import offload
from restorekv.model.attention import dispatch
from restorekv.model.offload import FileStore, HostStore
from restorekv.model.prefill import prefill, read_only_view
from restorekv.model.prompt import Context
from restorekv.pipeline import compress
from restorekv.restore.adapter import RestoreAdapter
from tests.helpers.models import build_model

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives there. "
    * 4
)
SMAPS = Path("/proc/self/smaps")
METHODS = ["kvzip:chunk=50", "snapkv", "h2o", "knorm", "keydiff", "expected-attention"]


@pytest.fixture(params=[FileStore, HostStore])
def kind(request, monkeypatch):
    """Either store; the GPU's, without its streams, works on a CPU too."""
    monkeypatch.setattr(offload, "FileStore", request.param)
    return request.param


def ids(count):
    return torch.randint(3, 320, (1, count), generator=torch.Generator().manual_seed(1))


def test_a_shelved_prefill_is_a_prefill(tiny_model, kind):
    plain = prefill(tiny_model, ids(75), 20)
    found = prefill(tiny_model, ids(75), 20, offload.make_offloaded_cache(tiny_model, 80))
    assert found.get_seq_length() == 75
    for _ in range(2):  # asking twice, and out of turn, gives the same
        for ours, theirs in zip(reversed(found.layers), reversed(plain.layers), strict=True):
            assert ours.keys.shape == theirs.keys.shape and ours.device == theirs.device
            torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-6)
    more = ids(81)[:, 75:]
    with torch.no_grad():
        expected = tiny_model.model(more, past_key_values=read_only_view(plain)).last_hidden_state
        read = tiny_model.model(more, past_key_values=read_only_view(found)).last_hidden_state
    torch.testing.assert_close(read, expected, rtol=1e-4, atol=1e-4)
    assert found.get_seq_length() == 75


@pytest.mark.parametrize("evictor", METHODS)
def test_compress_gives_the_same(tiny_tokenizer, evictor, kind):
    model = build_model("qwen3")
    adapter = RestoreAdapter.create(model, 4, rank=2)
    plain = compress(model, tiny_tokenizer, TEXT, evictor=evictor, ratio=0.3, adapter=adapter)
    found = compress(
        model,
        tiny_tokenizer,
        TEXT,
        evictor=evictor,
        ratio=0.3,
        adapter=adapter,
        config=CompressionConfig(offload=True),
    )
    assert {**vars(found.manifest), "seconds": 0} == {**vars(plain.manifest), "seconds": 0}
    for ours, theirs in zip(found.cache.layers, plain.cache.layers, strict=True):
        assert ours.positions.equal(theirs.positions)
        for one, other in zip(ours.list_tensors(), theirs.list_tensors(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert found.ask("Which code?", 8) == plain.ask("Which code?", 8)


@pytest.mark.parametrize("bound", [0, dispatch.MAX_COPY_BYTES])
def test_a_restore_pass_with_gradients_reads_it(tiny_tokenizer, kind, monkeypatch, bound):
    """Joined with the pass's own pairs or, beyond `bound` bytes a layer, referred to."""
    monkeypatch.setattr(dispatch, "MAX_COPY_BYTES", bound)
    model, found = build_model("qwen3"), []
    adapter = RestoreAdapter.create(model, 4, rank=2)
    for offloading in (False, True):
        prepared = Eviction.make("knorm", adapter, offload=offloading).prepare(
            model, tiny_tokenizer, TEXT
        )
        adapter.zero_grad()
        sum(x.square().sum() for pair in prepared.restore_cache for x in pair).backward()
        gradients = [
            parameter.grad.clone()
            for parameter in adapter.parameters()
            if parameter.grad is not None
        ]
        found.append([*gradients, *(x.detach() for pair in prepared.restore_cache for x in pair)])
    assert len(found[0]) > 6 and any(x.any() for x in gradients)
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


MAP = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (?P<inode>\d+)")


def list_inodes():
    """The files that this process maps."""
    found = (MAP.match(line) for line in SMAPS.read_text().splitlines())
    return {each["inode"] for each in found if each}


def resident(earlier):
    """Bytes of our temporary files that are in this process, but for those mapped earlier, which
    may be freed at any time.
    """
    found, ours = 0, False
    for line in SMAPS.read_text().splitlines():
        if header := MAP.match(line):
            named = "restorekv-" in line or line.endswith("(deleted)")
            ours = named and header["inode"] not in earlier
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@pytest.mark.skipif(not SMAPS.exists(), reason="tells what Linux tells of a process")
@pytest.mark.parametrize("evictor", ["kvzip:chunk=500", "snapkv", "knorm"])
def test_one_layer_is_in_the_process(evictor, tiny_tokenizer, monkeypatch):
    """While the text is read, while scores are made and while the last cache is gathered."""
    model = build_model("qwen3", num_hidden_layers=5)
    context = Context(ids(1000), 3, torch.zeros(1, 0, dtype=torch.long))
    layer, seen, earlier = 2 * 2 * 1000 * 16 * 4, [], list_inodes()
    # Before another layer's turn, when all that was read or written of one is there.
    unload = FileStore.unload

    def note_and_unload(store):
        seen.append(resident(earlier))
        unload(store)

    monkeypatch.setattr(FileStore, "unload", note_and_unload)
    adapter = RestoreAdapter.create(model, 4, rank=2)
    with torch.no_grad():
        prepared = Eviction.make(evictor, adapter, offload=True).prepare(
            model, tiny_tokenizer, context
        )
        assert len(prepared.full.layers[0].store.maps) == 5
        prepared.evict(0.3, consume=True)
    assert not prepared.full.layers[0].store.maps
    assert len(seen) > 10 and 0 < max(seen) <= layer + 4 * 4096


def test_two_layers_are_on_the_device():
    """Whatever is read and in whatever order, the one that was asked for and the next."""
    model = build_model("qwen3", num_hidden_layers=6)
    store = HostStore(6, (2, 40, 16), torch.float32, torch.device("cpu"))
    full = prefill(model, ids(40), 9, offload.Cache(layers=store.layers))
    assert set(store.on_device) == {5, 0}
    for index in (0, 1, 2, 5, 3):
        full.layers[index].keys  # noqa: B018
        assert set(store.on_device) == {index, (index + 1) % 6}
    full.layers[4].keys = None
    assert 4 not in store.on_device and full.layers[4].room is None


def test_the_shorter_pair_goes_before_the_next_layer_comes(monkeypatch):
    model, gone = build_model("qwen3", num_hidden_layers=3), []
    store = HostStore(3, (2, 40, 16), torch.float32, torch.device("cpu"))
    full = prefill(model, ids(30), into=offload.Cache(layers=store.layers))
    full.layers[1].keys  # noqa: B018
    old, fetch = weakref.ref(store.on_device[1][0]), HostStore.copy_to_device
    monkeypatch.setattr(
        HostStore,
        "copy_to_device",
        lambda self, layer: gone.append((layer.index, old())) or fetch(self, layer),
    )
    store.on_device.pop(2)
    full.layers[1].update(torch.zeros(1, 2, 10, 16), torch.zeros(1, 2, 10, 16))
    assert gone == [(2, None)] and full.layers[1].keys.shape[2] == 40


def test_a_store_is_written_by_update_alone(tiny_model, kind):
    full = prefill(tiny_model, ids(9), into=offload.make_offloaded_cache(tiny_model, 9))
    with pytest.raises(ValueError, match="update alone"):
        full.layers[0].keys = torch.zeros(1)


def test_too_little_room_is_told_before_any_work(tiny_model, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(
        offload.shutil, "disk_usage", lambda folder: namedtuple("Usage", "free")(10)
    )
    monkeypatch.setattr("restorekv.compression.full_cache.prefill", None)
    with pytest.raises(RestoreKVError, match=f"{tempfile.gettempdir()} has less; set TMPDIR"):
        compress(tiny_model, tiny_tokenizer, TEXT, config=CompressionConfig(offload=True))


def test_room_that_is_not_there_is_told_before_any_work(tiny_model, tiny_tokenizer, monkeypatch):
    """What is said to be free need not be: others write, a quota ends. Every layer's file is
    reserved at once.
    """
    wanted, left = [], [2]

    def reserve(file, start, nbytes):
        wanted.append((start, nbytes))
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(offload.os, "posix_fallocate", reserve, raising=False)
    monkeypatch.setattr(offload.mmap, "mmap", lambda file, nbytes: None)
    monkeypatch.setattr("restorekv.compression.full_cache.prefill", None)
    with pytest.raises(RestoreKVError, match=f"{tempfile.gettempdir()} has less; set TMPDIR"):
        compress(tiny_model, tiny_tokenizer, TEXT, config=CompressionConfig(offload=True))
    assert len(wanted) == 3 and len(set(wanted)) == 1


@pytest.mark.skipif(
    not hasattr(offload.os, "posix_fallocate"), reason="this system reserves no blocks"
)
def test_the_files_have_their_blocks_before_they_are_written(monkeypatch):
    sizes, mapped = [], offload.mmap.mmap

    def mapping(number, nbytes):
        sizes.append(offload.os.fstat(number).st_blocks * 512)
        return mapped(number, nbytes)

    monkeypatch.setattr(offload.mmap, "mmap", mapping)
    store = FileStore(3, (2, 5000, 16), torch.float32, torch.device("cpu"))
    assert len(sizes) == len(store.maps) == 3 and min(sizes) >= store.nbytes


def test_a_scorer_with_a_cache_of_its_own_does_not_offload(tiny_model, tiny_tokenizer, monkeypatch):
    """kvpress's presses; the package need not be there to tell."""
    assert not FromKVPress.offloads
    monkeypatch.setattr(Knorm, "offloads", False)
    monkeypatch.setattr("restorekv.compression.full_cache.prefill", None)
    with pytest.raises(
        RestoreKVError, match="knorm makes a full cache of its own in memory; leave out offload"
    ):
        compress(
            tiny_model,
            tiny_tokenizer,
            TEXT,
            evictor="knorm",
            config=CompressionConfig(offload=True),
        )


def test_am_fast_does_not_offload(tiny_model, tiny_tokenizer):
    with pytest.raises(RestoreKVError, match="leave out offload"):
        compress(
            tiny_model,
            tiny_tokenizer,
            TEXT,
            evictor="am-fast",
            config=CompressionConfig(offload=True),
        )
