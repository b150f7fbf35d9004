"""The cache file: what is written comes back bit by bit, and anything else is refused and leaves no
trace.
"""

import os
import pickle
import struct

import pytest
import safetensors.torch
import torch

from restorekv import CompressedContext, compress
from restorekv.errors import CacheFileError
from restorekv.files import HOST
from restorekv.model.prompt import make_context
from restorekv.model.shape import CacheShape
from restorekv.storage.cache_file import open_cache_file, write_cache_file
from restorekv.storage.manifest import Manifest
from tests.helpers.decoding import TEXT, make_cache
from tests.helpers.models import build_model


def manifest_of(model, cache, context):
    """A manifest that says of the cache what is so."""
    shape, of_prefix = CacheShape.from_model(model), cache.count_prefix_pairs(context.prefix_length)
    full = shape.layers * shape.heads * context.num_tokens * 2 * shape.head_dim * 4
    return Manifest(
        model="tiny",
        fingerprint="0",
        rope={"rope_type": "default"},
        template="0",
        tokens_hash="0",
        dtype="float32",
        shape=vars(shape),
        prefix=context.prefix_length,
        tokens=context.text_tokens,
        restore_tokens=cache.restore_length,
        ratio="1/10",
        prefix_policy="free",
        on_small_budget="error",
        allocation="global",
        restore_from="full",
        offset=0,
        evictor="kvzip",
        adapter=None,
        pairs=cache.pairs_held - of_prefix,
        pairs_of_prefix=of_prefix,
        pairs_held=cache.pairs_held,
        bytes_full=full,
        bytes_held=cache.nbytes,
        seconds={"prefill": 0.5},
        versions={"python": "3"},
        kv_dtype="model",
        streaming_chunk=None,
        separator=context.separator,
        cut=0,
        system="",
        parts=[],
        earlier=0,
    )


@pytest.fixture(params=[0, 4])
def written(tiny_model, tiny_tokenizer, tmp_path, request):
    context = make_context(tiny_tokenizer, TEXT)
    cache = make_cache(tiny_model, context, request.param)
    path = tmp_path / "doc.rkv"
    write_cache_file(path, cache, context, manifest_of(tiny_model, cache, context))
    return path, cache, context


def test_round_trip_is_bit_equal(tiny_model, written):
    path, cache, context = written
    stored = open_cache_file(path)
    again, text = stored.make_cache(), stored.context
    assert stored.manifest == manifest_of(tiny_model, cache, context)
    assert (
        text.ids.equal(context.ids)
        and text.suffix_ids.equal(context.suffix_ids)
        and text.suffix_text == context.suffix_text
    )
    assert (again.pairs_held, again.nbytes, again.seen) == (
        cache.pairs_held,
        cache.nbytes,
        cache.seen,
    )
    for ours, theirs in zip(cache.layers, again.layers, strict=True):
        assert all(
            a.equal(b) and a.dtype == b.dtype
            for a, b in zip(ours.list_tensors(), theirs.list_tensors(), strict=True)
        )
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["doc.rkv"]


def test_the_same_cache_is_the_same_bytes(tiny_model, written):
    """The safetensors library alone would shuffle the metadata."""
    path, cache, context = written
    first = path.read_bytes()
    for _ in range(4):
        write_cache_file(path, cache, context, manifest_of(tiny_model, cache, context))
        assert path.read_bytes() == first


def test_a_model_of_any_folder_makes_files_that_load(tiny_tokenizer, tmp_path):
    model = build_model("llama")
    model.config.name_or_path = "/models/my\u00a0own model"  # a no-break space, as macOS types it
    small = compress(model, tiny_tokenizer, TEXT, evictor="knorm", adapter=None)
    small.save(tmp_path / "doc.rkv")
    again = CompressedContext.load(tmp_path / "doc.rkv", model, tiny_tokenizer)
    assert again.manifest == small.manifest
    assert again.manifest.model == "'/models/my\\xa0own model'"


def test_a_bias_survives(tiny_model, tiny_tokenizer, tmp_path):
    context = make_context(tiny_tokenizer, TEXT)
    cache = make_cache(tiny_model, context)
    for layer in cache.layers:
        layer.bias = torch.randn(layer.bounds[-1])
    write_cache_file(tmp_path / "doc.rkv", cache, context, manifest_of(tiny_model, cache, context))
    again = open_cache_file(tmp_path / "doc.rkv").make_cache()
    assert all(a.bias.equal(b.bias) for a, b in zip(cache.layers, again.layers, strict=True))


def test_every_flipped_byte_is_noticed(written):
    """A byte in each kilobyte, and every byte of the length field and the header's first part."""
    path, _, _ = written
    good = path.read_bytes()
    for place in [*range(400), *range(400, len(good), 997), len(good) - 1]:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CacheFileError):
            open_cache_file(path)
    path.write_bytes(good)
    open_cache_file(path)


def test_truncated_and_lengthened_files(written):
    path, _, _ = written
    good = path.read_bytes()
    for length in [0, 1, 7, 8, 100, len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:length])
        with pytest.raises(CacheFileError, match=r"cut short"):
            open_cache_file(path)
    path.write_bytes(good + b"x")
    with pytest.raises(CacheFileError):
        open_cache_file(path)


def test_foreign_files(tmp_path):
    path = tmp_path / "x.rkv"
    with pytest.raises(CacheFileError, match="does not exist"):
        open_cache_file(path)
    with pytest.raises(CacheFileError, match="not a regular file"):
        open_cache_file(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CacheFileError, match="not a regular file"):
        open_cache_file(tmp_path / "fifo")
    strangers = [pickle.dumps({"keys": [1.0] * 1000}), b"hello, this is text and no cache at all"]
    strangers += [struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a": {}}']
    for raw in strangers:
        path.write_bytes(raw)
        with pytest.raises(CacheFileError, match=r"not a safetensors file|cut short"):
            open_cache_file(path)
    safetensors.torch.save_file({"weight": torch.ones(3)}, path)
    with pytest.raises(CacheFileError, match="safetensors file but not a restorekv cache"):
        open_cache_file(path)


def test_a_file_that_is_mostly_hole_is_not_read(tmp_path):
    path = tmp_path / "x.rkv"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 2) + b"{}")
        file.truncate(10 << 30)
    with pytest.raises(CacheFileError, match="too long"):
        open_cache_file(path)


def test_another_format_version(written):
    path, _, _ = written
    path.write_bytes(path.read_bytes().replace(b'"version":"6"', b'"version":"3"'))
    with pytest.raises(
        CacheFileError,
        match="format version '3', this restorekv reads 6; compress the context again",
    ):
        open_cache_file(path)


def test_bad_places(tiny_model, written, tmp_path):
    _, cache, context = written
    manifest = manifest_of(tiny_model, cache, context)
    with pytest.raises(CacheFileError, match="is a folder"):
        write_cache_file(tmp_path, cache, context, manifest)
    with pytest.raises(CacheFileError, match="does not exist"):
        write_cache_file(tmp_path / "no" / "doc.rkv", cache, context, manifest)


def test_what_a_killed_process_left_goes(tiny_model, written):
    path, cache, context = written
    manifest = manifest_of(tiny_model, cache, context)
    killed = 2**22 + 1  # no process has that number
    path.with_name(f".doc.rkv.{HOST}-{killed}.tmp").write_bytes(b"half of a cache")
    write_cache_file(path, cache, context, manifest)
    assert [entry.name for entry in path.parent.iterdir()] == ["doc.rkv"]


def test_a_device_is_no_place(tiny_model, written):
    _, cache, context = written
    manifest = manifest_of(tiny_model, cache, context)
    with pytest.raises(CacheFileError, match="/dev/null is not a regular file"):
        write_cache_file("/dev/null", cache, context, manifest)


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()]
)
@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file(tiny_model, written, monkeypatch, failure, step):
    path, cache, context = written
    manifest = manifest_of(tiny_model, cache, context)
    before = path.read_bytes()

    def fail(*_):
        raise failure

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(CacheFileError if isinstance(failure, OSError) else type(failure)) as caught:
        write_cache_file(path, cache, context, manifest)
    if isinstance(failure, OSError):
        assert "No space left on device" in str(caught.value)
    assert path.read_bytes() == before and [entry.name for entry in path.parent.iterdir()] == [
        "doc.rkv"
    ]
