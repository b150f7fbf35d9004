"""The cache file: what is written comes back bit by bit, and anything else is refused and leaves no trace."""

import json
import pickle
import struct

import pytest
import safetensors.torch
import torch

from restorekv.compression import context_file
from restorekv.compression.context_file import Manifest, read, write
from restorekv.errors import CacheFileError
from restorekv.files import HOST
from restorekv.model.prompt import make_context
from tests.compression.test_generate import TEXT, make_cache

MANIFEST = Manifest(
    model="tiny", fingerprint="0", rope={"rope_type": "default"}, template="0", dtype="float32", shape={"layers": 3},
    prefix=2, tokens=10, restore_tokens=4, ratio="1/10", prefix_policy="free", on_small_budget="error",
    allocation="global", restore_from="full", offset=0, evictor="kvzip",
    adapter=None, pairs=1, pairs_of_prefix=1, pairs_held=1, bytes_full=1, bytes_held=1, seconds={}, versions={},
)  # fmt: skip


@pytest.fixture(params=[0, 4])
def written(tiny_model, tiny_tokenizer, tmp_path, request):
    context = make_context(tiny_tokenizer, TEXT)
    cache = make_cache(tiny_model, context, request.param)
    path = tmp_path / "doc.rkv"
    write(path, cache, context, MANIFEST)
    return path, cache, context


def test_round_trip_is_bit_equal(written):
    path, cache, context = written
    again, text, manifest = read(path)
    assert manifest == MANIFEST
    assert text.ids.equal(context.ids) and text.suffix.equal(context.suffix) and text.suffix_text == context.suffix_text
    assert (again.pairs, again.nbytes, again.positions) == (cache.pairs, cache.nbytes, cache.positions)
    for ours, theirs in zip(cache.layers, again.layers, strict=True):
        assert all(a.equal(b) and a.dtype == b.dtype for a, b in zip(ours.tensors(), theirs.tensors(), strict=True))
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["doc.rkv"]


def test_files_hold_the_key_of_earlier_versions(written):
    held = context_file.verify(written[0])
    assert held["on_tight"] == "error" and "on_small_budget" not in held


def test_a_bias_survives(tiny_model, tiny_tokenizer, tmp_path):
    context = make_context(tiny_tokenizer, TEXT)
    cache = make_cache(tiny_model, context)
    for layer in cache.layers:
        layer.bias = torch.randn(layer.bounds[-1])
    write(tmp_path / "doc.rkv", cache, context, MANIFEST)
    again = read(tmp_path / "doc.rkv")[0]
    assert all(a.bias.equal(b.bias) for a, b in zip(cache.layers, again.layers, strict=True))


def test_every_flipped_byte_is_noticed(written):
    """A byte in each kilobyte, and every byte of the length field and the header's first part."""
    path, _, _ = written
    good = path.read_bytes()
    for place in [*range(0, 400), *range(400, len(good), 997), len(good) - 1]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CacheFileError):
            read(path)
    path.write_bytes(good)
    read(path)


def test_truncated_and_lengthened_files(written):
    path, _, _ = written
    good = path.read_bytes()
    for length in [0, 1, 7, 8, 100, len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(CacheFileError, match=r"truncated|cut short"):
            read(path)
    path.write_bytes(good + b"x")
    with pytest.raises(CacheFileError):
        read(path)


def test_foreign_files(tmp_path):
    path = tmp_path / "x.rkv"
    with pytest.raises(CacheFileError, match="There is no file"):
        read(path)
    with pytest.raises(CacheFileError, match="Cannot read"):
        read(tmp_path)
    path.write_bytes(pickle.dumps({"keys": [1.0] * 1000}))
    with pytest.raises(CacheFileError, match="not a restorekv cache"):
        read(path)
    path.write_text("hello, this is text and no cache at all")
    with pytest.raises(CacheFileError, match="not a restorekv cache"):
        read(path)
    safetensors.torch.save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(CacheFileError, match="safetensors file but not a restorekv cache"):
        read(path)
    path.write_bytes(struct.pack("<Q", 2) + b"[]")
    with pytest.raises(CacheFileError, match="not a restorekv cache"):
        read(path)
    path.write_bytes(struct.pack("<Q", 9) + b'{"a": {}}')
    with pytest.raises(CacheFileError, match="not a restorekv cache"):
        read(path)


def test_another_format_version(written):
    path, _, _ = written
    path.write_bytes(path.read_bytes().replace(b'"version":"3"', b'"version":"4"'))
    with pytest.raises(CacheFileError, match="format version 4"):
        read(path)


def test_the_header_is_readable_json(written):
    path, _, _ = written
    header = context_file.read_header(path)
    assert json.loads(header["__metadata__"]["manifest"])["evictor"] == "kvzip"


def test_bad_places(written, tmp_path):
    _, cache, context = written
    with pytest.raises(CacheFileError, match="is a folder"):
        write(tmp_path, cache, context, MANIFEST)
    with pytest.raises(CacheFileError, match="does not exist"):
        write(tmp_path / "no" / "doc.rkv", cache, context, MANIFEST)


def test_what_a_killed_process_left_goes(written):
    path, cache, context = written
    killed = 2**22 + 1  # no process has that number
    path.with_name(f".doc.rkv.{HOST}-{killed}.tmp").write_bytes(b"half of a cache")
    write(path, cache, context, MANIFEST)
    assert [entry.name for entry in path.parent.iterdir()] == ["doc.rkv"]


def test_a_device_is_no_place(written):
    _, cache, context = written
    with pytest.raises(CacheFileError, match="/dev/null is not a regular file"):
        write("/dev/null", cache, context, MANIFEST)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file(written, monkeypatch, failure, step):
    path, cache, context = written
    before = path.read_bytes()

    def fail(*_):
        raise failure

    monkeypatch.setattr(context_file.os, step, fail)
    with pytest.raises(CacheFileError if isinstance(failure, OSError) else type(failure)) as caught:
        write(path, cache, context, MANIFEST)
    if isinstance(failure, OSError):
        assert "No space left on device" in str(caught.value)
    assert path.read_bytes() == before and [entry.name for entry in path.parent.iterdir()] == ["doc.rkv"]
