"""Files that someone else wrote are data: opened once, bounded, checked, and refused with one
sentence.
"""

import json
import math
import os
import stat
import struct
from typing import Any, Literal

import pytest
import safetensors.torch
import torch

from restorekv import files, seal
from restorekv.errors import RestoreKVError

GOOD = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(0, dtype=torch.int8)}


@pytest.fixture
def good(tmp_path):
    path = tmp_path / "good.safetensors"
    safetensors.torch.save_file(GOOD, path, {"k": "ä"})
    return path


def refused(call, *arguments) -> str:
    with pytest.raises(RestoreKVError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message and ";" in message
    return message


def test_a_good_file_is_read_as_safetensors_reads_it(good):
    metadata, tensors = seal.read_tensors(good, "The file")
    assert metadata == {"k": "ä"} and set(tensors) == set(GOOD)
    assert all(
        torch.equal(tensors[name], GOOD[name]) and tensors[name].dtype == GOOD[name].dtype
        for name in GOOD
    )
    assert (
        seal.read_tensor_bytes(good, "The file")
        == good.read_bytes()
        == files.read_bytes(good, "The file")
    )


@pytest.mark.parametrize("key", ["card", "manifest"])  # before and after "checksum" in the header
def test_a_sealed_file_may_hold_a_row_of_zeros(tmp_path, key):
    """The checksum is computed with as many zeros in its place."""
    kind = seal.FileKind("restorekv-test", "1", "a test's file", "write it again")
    path = tmp_path / "sealed.safetensors"
    metadata = {key: json.dumps({"revision": seal.BLANK})}
    seal.write_sealed(path, kind, GOOD, metadata)
    read, tensors = seal.read_sealed(path, kind)
    assert read[key] == metadata[key]
    assert torch.equal(tensors["a"], GOOD["a"])


def test_only_regular_files_are_opened(tmp_path, good):
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to(good)
    for read in (files.read_bytes, seal.read_tensors, files.read_json):
        for path in (fifo, tmp_path, "/dev/zero", "/dev/full"):
            assert "not a regular file" in refused(read, path, "The file")
        assert "does not exist" in refused(read, tmp_path / "none", "The file")
        refused(read, tmp_path / ("x" * 300), "The file")
        refused(read, tmp_path / "a\0b", "The file")
    # Regular, of size 0, and reading it fails.
    refused(seal.read_tensors, "/proc/self/mem", "The file")
    assert seal.read_tensors(link, "The file")[0]


def test_a_large_file_is_refused_before_it_is_read(tmp_path, good, monkeypatch):
    sparse = tmp_path / "sparse"
    sparse.write_bytes(good.read_bytes())
    os.truncate(sparse, 10 << 30)
    for module in (files, seal):
        monkeypatch.setattr(
            module, "read_exactly", lambda *_: pytest.fail("the file was read whole")
        )
    refused(seal.read_tensors, sparse, "The file")
    assert "more than" in refused(files.read_bytes, sparse, "The file")


def test_headers_that_do_not_fit_the_file_are_refused(good):
    raw = good.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def other(**entries) -> bytes:
        text = json.dumps({**header, **entries}).encode()
        return struct.pack("<Q", len(text)) + text + body

    assert len(seal.parse_tensors(other(), "The file")[1]) == 2
    bad = [
        b"",
        raw[:7],
        raw[:-1],
        raw + b"x",
        struct.pack("<Q", 2**63) + raw[8:],
        struct.pack("<Q", 0) + raw[8:],
    ]
    bad += [struct.pack("<Q", 17 << 20) + bytes(18 << 20)]
    bad += [
        other(a=value)
        for value in (
            None,
            [],
            7,
            {},
            {**header["a"], "dtype": "U64x"},
            {**header["a"], "shape": [7]},
        )
    ]
    bad += [
        other(a={**header["a"], "data_offsets": value})
        for value in ([0, 2**40], [-8, 16], [0], "x", [1.5, 24])
    ]
    bad += [other(__metadata__=value) for value in ([], {"k": 7}, "x")]
    for each in bad:
        refused(seal.parse_tensors, each, "The file")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"a":' * 5000 + "1" + "}" * 5000,
        "[" * 41 + "]" * 41,
        "NaN",
        "[-Infinity]",
        "1e999",
        "9" * 6000,
        "9" * 30,
        '"\\ud800"',
        '{"\\udfff": 1}',
        '{"a": 1, "a": 2}',
        b'"\xff"',
        "1 2",
    ],
)
def test_json_that_no_program_should_compute_with_is_refused(text):
    refused(files.parse_json, text, "The record")


@pytest.mark.parametrize(
    "text",
    [
        "[" + "[]," * 1_000_000 + "0]",
        "[" + "0," * 1_000_001 + "0]",
        "[" + '"",' * 1_000_001 + "0]",
        '{"a": {' + ",".join(f'"{n}": 0' for n in range(600_000)) + "}}",
    ],
)
@pytest.mark.parametrize("kind", [str, bytes])
def test_json_of_too_many_elements_is_refused_before_it_is_parsed(text, kind, monkeypatch):
    monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("it was parsed"))
    assert "elements" in refused(
        files.parse_json, text if kind is str else text.encode(), "The record"
    )


def test_signs_in_texts_are_no_elements():
    value = ["[{,:" * 500_000, '\\",:[', {"a,:": '"'}]
    assert files.parse_json(json.dumps(value), "It") == value
    assert files.parse_json(json.dumps(value).encode(), "It") == value


def test_texts_without_an_end_are_looked_at_once():
    """A stranger may write what begins a text at every second character, and end none."""
    signs = list(files.SIGNS_OF_TEXT.finditer('[1, "' + '\\"' * 100_000))
    assert len(signs) == 3
    refused(files.parse_json, "[" + "," * 2_000_000 + '"' + '\\"' * 1_000_000, "The record")


def test_ordinary_json_is_read():
    value = {"a": [1, -2.5, None, True, "ä\U0001f600", 2**63], "b": {"c": []}}
    assert (
        files.parse_json(json.dumps(value), "It")
        == files.parse_json(json.dumps(value).encode(), "It")
        == value
    )
    assert "more than" in refused(files.parse_json, "[1, 2]", "It", 3)


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, [0, 2**63], [True, 1.5, "1", None]),
        (float, [0, 1.5], [False, "1"]),
        (str | None, ["", None], [1, []]),
        (dict[str, float], [{}, {"a": 1}], [{"a": "1"}, []]),
        (list[dict[str, Any]], [[], [{"a": []}]], [{}, [1]]),
        (tuple[float, float] | None, [[1, 2], None], [[1], [1, "2"], "ab", 7]),
        (tuple[str, ...], [[], ["a"]], [["a", 1], "ab"]),
        (Literal["a", "b"], ["a"], ["c", [], {}]),
        (object, [None, math.pi], []),
    ],
)
def test_types_of_json_values(hint, right, wrong):
    assert all(files.matches_type(value, hint) for value in right)
    assert not any(files.matches_type(value, hint) for value in wrong)


def test_the_first_wrong_entry_of_an_object_is_named():
    hints = {"name": str, "files": [{"sha256": str, "bytes": int}]}
    right = {"name": "a", "files": [{"sha256": "1f", "bytes": 3, "more": None}]}
    assert files.find_wrong_entry(right, hints) is None
    assert files.find_wrong_entry({"name": "a", "files": []}, hints) is None
    for value, wrong in [
        ([], "name"),
        ({"files": []}, "name"),
        ({**right, "name": 1}, "name"),
        ({**right, "files": {}}, "files"),
        ({**right, "files": [{"sha256": "1f"}]}, "files"),
        ({**right, "files": [{"sha256": "1f", "bytes": True}]}, "files"),
    ]:
        assert files.find_wrong_entry(value, hints) == wrong


def test_a_file_that_shrinks_while_it_is_read_is_refused(good):
    with open(good, "rb") as file:
        assert stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        assert "changed" in refused(files.read_exactly, file, good.stat().st_size + 1, "The file")
