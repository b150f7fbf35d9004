"""A model's folder is data: no code, no pickle, no special file, no other model, no cache that
others can change.
"""

import io
import json
import os
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open

from restorekv import load_model
from restorekv.errors import ModelError, RestoreKVWarning
from restorekv.model import gguf, gguf_header, gguf_tokenizer, load
from restorekv.model.load import load_tokenizer
from restorekv.model.names import SMOLLM2_ID, find_known_name
from tests.helpers import decoders, gguf_world
from tests.helpers.models import build_model
from tests.hostile.damage import EVIL, RAN, evil_model


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    build_model("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_code_of_a_folder_is_never_run_and_nobody_is_asked(folder, tmp_path, monkeypatch):
    evil_model(tmp_path, folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    for call in (load_model, load_tokenizer):
        with (
            pytest.raises(ModelError, match=r"custom code|evil")
            if call is load_model
            else _any_outcome()
        ):
            call(str(tmp_path / EVIL))
        assert not (tmp_path / RAN).exists()
    assert sys.stdin.tell() == 0


class _any_outcome:  # noqa: N801
    """The tokenizer alone may be readable without the code."""

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        return kind is None or issubclass(kind, ModelError)


def test_every_call_of_transformers_refuses_code_and_models_their_pickles():
    """Of the package, and of what stands beside it in a checkout."""
    root = load.Path(__file__).parents[2]
    calls = 0
    for path in [
        path
        for part in ("src", "benchmarks", "paper", "recipes")
        for path in (root / part).rglob("*.py")
    ]:
        text = path.read_text(encoding="utf-8")
        for piece in text.split("from_pretrained(")[1:]:
            before = text[: text.index(piece)].rsplit("\n", 1)[-1]
            if not any(name in before for name in ("AutoConfig", "AutoTokenizer", "AutoModel")):
                continue
            calls += 1
            given = piece.split("\n\n")[0][:260]
            assert (
                "trust_remote_code=False" in given
                or "NO_CODE" in given
                or "**local" in given
                or "**s" in given
            ), path
    assert calls >= 9


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_folder_with_a_pickle_alone_is_refused(folder, name, monkeypatch):
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.ones(1)}, folder / name)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the pickle was loaded"))
    with pytest.raises(ModelError, match=f"{name} alone, and loading a pickle may run code"):
        load_model(str(folder))
    assert load_tokenizer(str(folder))


def test_a_pickle_beside_safetensors_is_not_loaded(folder, monkeypatch):
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the pickle was loaded"))
    assert load_model(str(folder))


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "config.json",
        "model.safetensors",
        "generation_config.json",
        "chat_template.jinja",
        "x",
    ],
)
def test_special_files_in_a_folder_are_refused_and_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match="neither a file nor a folder"):
        load_model(str(folder))
    with pytest.raises(ModelError, match="neither a file nor a folder"):
        load_tokenizer(str(folder))


def test_a_link_to_a_device_is_a_special_file(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="neither a file nor a folder"):
        load_model(str(folder))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
@pytest.mark.parametrize("name", ["config.json", "chat_template.jinja"])
def test_a_link_to_a_file_of_the_kernel_is_a_special_file(folder, name):
    # Its size is 0 and it has content; /proc/kmsg even waits for what comes next.
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("/proc/self/environ")
    with pytest.raises(ModelError, match="neither a file nor a folder"):
        load_model(str(folder))


def test_an_adapters_folder_loads_no_model_that_its_config_names(folder):
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "someone/else"})
    )
    with pytest.raises(ModelError, match="names another model"):
        load_model(str(folder))


@pytest.mark.parametrize(
    "name", ["", ".", "someone/model", "/tmp/model", "model.gguf", "../tiny", "tiny/", "SMOLLM2"]
)
def test_a_file_may_name_only_what_is_known(name):
    assert find_known_name(name) is None


def test_names_that_are_known():
    assert [find_known_name(name) for name in ("tiny", "gemma3-270m", SMOLLM2_ID)] == [
        "tiny",
        "gemma3-270m",
        "smollm2",
    ]


def point(folder, name: object) -> None:
    """Has an index of weights name a file for all of them."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        weights = dict.fromkeys(file.keys(), name)
    (folder / load.model_folder.INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": weights})
    )


@pytest.mark.parametrize(
    "name", ["weights.bin", "../model.safetensors", "sub/x.safetensors", "none.safetensors", "", 7]
)
def test_an_index_of_weights_names_safetensors_beside_it_and_nothing_else(
    folder, tmp_path, name, monkeypatch
):
    """transformers would load a pickle, read a file elsewhere, or wait for a FIFO."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the pickle was loaded"))
    point(folder, name)
    shutil.copy(folder / "model.safetensors", tmp_path)
    torch.save({"a": torch.ones(1)}, folder / "weights.bin")
    (folder / "sub").mkdir()
    os.mkfifo(folder / "sub" / "x.safetensors")
    with pytest.raises(ModelError, match="which is not a safetensors file next to"):
        load_model(str(folder))
    assert load_tokenizer(str(folder))


def test_an_index_of_good_weights_is_used(folder):
    point(folder, "part.safetensors")
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    assert load_model(str(folder))


@pytest.mark.parametrize("content", ["[]", "{", '{"weight_map": []}', "[" * 100_000])
def test_a_damaged_index_of_weights_gives_a_sentence(folder, content):
    (folder / load.model_folder.INDEX).write_text(content)
    with pytest.raises(ModelError, match=r"fetch it again|make it again"):
        load_model(str(folder))


def test_the_hubs_index_of_weights_names_safetensors_alone(folder, monkeypatch):
    point(folder, "weights.bin")
    where = load.model_folder.INDEX
    monkeypatch.setattr(load.model_folder, "find_adapter_config_file", lambda *_, **__: None)
    monkeypatch.setattr(
        load.model_folder, "cached_file", lambda name, file, **_: str(folder / file)
    )
    with pytest.raises(ModelError, match=rf"{where} names 'weights.bin'"):
        load_model("someone/model")


@pytest.mark.parametrize(
    "entries",
    [
        {"fast_tokenizer_files": ["../tokenizer.5.0.json"]},
        {"vocab_file": "../outside"},
        {"vocab_file": "/etc"},
        {"tokenizer_file": 7},
        {"fast_tokenizer_files": [[]]},
    ],
)
def test_a_tokenizer_names_no_file_elsewhere(folder, tmp_path, entries):
    path = folder / load.model_folder.TOKENIZER_CONFIG
    (folder / "tokenizer.json").rename(tmp_path / "tokenizer.5.0.json")
    (tmp_path / "outside").write_text("{}")
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    for call in (load_model, load_tokenizer):
        with pytest.raises(ModelError, match="which is not in its folder; remove that entry"):
            call(str(folder))


def test_a_place_on_the_authors_machine_does_not_matter(folder):
    path = folder / load.model_folder.TOKENIZER_CONFIG
    entries = {
        "tokenizer_file": "/home/author/tokenizer.json",
        "vocab_file": None,
        "fast_tokenizer_files": [],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    if decoders.IS_OLD:  # those versions look for the author's place
        with pytest.raises(ModelError, match="Cannot load the model"):
            load_tokenizer(str(folder))
        return
    assert load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["chat_template.jinja", "merges.txt", "tokenizer.model"])
def test_huge_files_of_text_are_not_read(folder, name):
    (folder / name).touch()
    os.truncate(folder / name, 10 << 30)
    with pytest.raises(ModelError, match="10,737,418,240 bytes, more than"):
        load_model(str(folder))


# GGUF files.


def test_tokens_longer_than_any_are_refused_before_every_place_in_them_is_tried():
    fields = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.unknown_token_id": 0}
    for tokens in (["<unk>", "x" * 257], ["<unk>", *["x" * 256] * ((1 << 16) + 1)]):
        with pytest.raises(ValueError, match="longer tokens than any that is known"):
            gguf_tokenizer.build_tokenizer({**fields, "tokenizer.ggml.tokens": tokens}, 2048)


def test_a_gguf_file_that_changes_while_it_is_read_is_not_kept(
    tmp_path, tiny_tokenizer, monkeypatch
):
    monkeypatch.setenv("RESTOREKV_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "m.gguf"
    gguf_world.write(file, build_model("llama"), tiny_tokenizer, Kind.F32)
    convert = gguf.convert_file

    def change(*given) -> None:
        convert(*given)
        file.write_bytes(file.read_bytes() + bytes(8))

    monkeypatch.setattr(gguf, "convert_file", change)
    with pytest.raises(ModelError, match="changed while it was read"):
        gguf.prepare_folder(file, "m")
    assert not [path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def listed(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + content


def header(
    fields: list[bytes], tensors: int = 0, count: int | None = None, rest: bytes = bytes(64)
) -> bytes:
    count = len(fields) if count is None else count
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + b"".join(fields) + rest


NAME = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
TENSOR = text(b"t")
LIES = {
    "an array of 2^40": header([text(b"a") + listed(4, 2**40)]),
    "an array of 2^18": header([text(b"a") + listed(4, 2**18)], rest=bytes(2**20)),
    "an array of 2^18 texts": header([text(b"tokenizer.x") + listed(8, 2**18)], rest=bytes(2**10)),
    "an array of arrays": header([text(b"a") + listed(9, 2, bytes(64))]),
    "2^21 elements in three arrays": header(
        [text(b"tokenizer.%d" % n) + listed(0, 2**20, bytes(2**20)) for n in range(3)]
    ),
    "a text of 2^40 bytes": header([text(b"a") + struct.pack("<IQ", 8, 2**40)]),
    "a key of 2^40 bytes": header([struct.pack("<Q", 2**40)]),
    "2^40 fields": header([NAME], count=2**40),
    "2^40 tensors": header([NAME], tensors=2**40),
    "a field twice": header([NAME, NAME]),
    "an unknown type": header([text(b"a") + struct.pack("<I", 77)]),
    "2^30 dimensions": header([NAME], 1, rest=TENSOR + struct.pack("<I", 2**30) + bytes(99)),
    "a product of 2^80": header(
        [NAME], 1, rest=TENSOR + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0) + bytes(99)
    ),
    "a tensor of 0": header([NAME], 1, rest=TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0) + bytes(99)),
    "a tensor behind the end": header(
        [NAME], 1, rest=TENSOR + struct.pack("<IQIQ", 1, 8, 0, 2**40) + bytes(99)
    ),
    "an unknown type of tensor": header(
        [NAME], 1, rest=TENSOR + struct.pack("<IQIQ", 1, 8, 99, 0) + bytes(99)
    ),
    "an alignment of 0": header([NAME, text(b"general.alignment") + struct.pack("<II", 4, 0)]),
    "2^30 layers": header([NAME, text(b"llama.block_count") + struct.pack("<II", 4, 2**30)]),
    "2^30 wide": header([NAME, text(b"llama.embedding_length") + struct.pack("<II", 4, 2**30)]),
    "version 9": b"GGUF" + struct.pack("<IQQ", 9, 0, 0),
    "nothing": b"GGUF",
}


@pytest.mark.parametrize("lie", LIES)
def test_what_a_gguf_file_counts_is_not_believed(tmp_path, lie, monkeypatch):
    import gguf as package

    monkeypatch.setattr(package, "GGUFReader", lambda path: pytest.fail("the file was parsed"))
    (tmp_path / "m.gguf").write_bytes(LIES[lie])
    with pytest.raises(ModelError, match="is damaged") as caught:
        gguf.load_header(tmp_path / "m.gguf")
    assert str(caught.value).isprintable()


def test_good_gguf_files_pass_in_both_orders_of_bytes(tmp_path, tiny_tokenizer):
    gguf_world.write(tmp_path / "m.gguf", build_model("llama"), tiny_tokenizer, Kind.F32)
    gguf_header.check_header(tmp_path / "m.gguf")
    big = (
        b"GGUF"
        + struct.pack(">IQQ", 3, 0, 1)
        + struct.pack(">Q", 1)
        + b"a"
        + struct.pack(">II", 4, 7)
        + bytes(64)
    )
    (tmp_path / "big.gguf").write_bytes(big)
    gguf_header.check_header(tmp_path / "big.gguf")


@pytest.mark.parametrize("within", [True, False])
def test_a_fifo_named_like_a_model_is_refused(tmp_path, within):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="not a regular file"):
        load_model(str(tmp_path if within else tmp_path / "m.gguf"))


# The cache of prepared models.


@pytest.fixture
def prepared(tmp_path, tiny_tokenizer, monkeypatch):
    """A GGUF file and the folder made from it."""
    root = tmp_path / "cache"
    monkeypatch.setenv("RESTOREKV_CACHE", str(root))
    file = tmp_path / "m.gguf"
    gguf_world.write(file, build_model("llama"), tiny_tokenizer, Kind.F32)
    return file, gguf.prepare_folder(file, "m")


def test_a_prepared_model_is_private_and_trusted(prepared):
    file, folder = prepared
    assert not any(
        path.stat().st_mode & gguf.WRITABLE_BY_OTHERS
        for path in (folder.parent, folder, *folder.iterdir())
    )
    assert gguf.load_marker(folder) and gguf.prepare_folder(file, "m") == folder


@pytest.mark.parametrize("which", ["folder", "file", "marker"])
def test_what_others_can_change_is_made_again(prepared, which):
    file, folder = prepared
    path = {"folder": folder, "file": folder / "config.json", "marker": folder / gguf.MARKER}[which]
    path.chmod(path.stat().st_mode | 0o022)
    assert gguf.load_marker(folder) is None
    assert gguf.prepare_folder(file, "m") == folder
    assert gguf.load_marker(folder) and not path.stat().st_mode & gguf.WRITABLE_BY_OTHERS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to others")
def test_what_belongs_to_another_user_is_made_again(prepared):
    file, folder = prepared
    os.chown(folder / "config.json", 12345, 12345)
    assert gguf.load_marker(folder) is None
    assert gguf.prepare_folder(file, "m") == folder and (folder / "config.json").stat().st_uid == 0


def test_a_link_in_the_cache_is_replaced_and_not_followed(prepared, tmp_path):
    file, folder = prepared
    elsewhere = tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert gguf.load_marker(folder) is None
    assert (
        gguf.prepare_folder(file, "m") == folder
        and not folder.is_symlink()
        and (elsewhere / gguf.MARKER).exists()
    )


def test_a_cache_folder_that_others_can_change_is_not_used(prepared):
    file, folder = prepared
    folder.parent.chmod(0o777)
    gguf.make_temporary_folder.cache_clear()
    with pytest.warns(RestoreKVWarning, match="Others can change the cache folder"):
        assert gguf.prepare_folder(file, "m").parent != folder.parent
    folder.parent.chmod(0o1777)
    assert gguf.prepare_folder(file, "m") == folder
    gguf.make_temporary_folder.cache_clear()
