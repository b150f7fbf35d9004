"""Models in GGUF files: what is loaded, what is kept, and what is said where that cannot be."""

import errno
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Starcoder2Config

from restorekv.errors import ModelError, RestoreKVError, RestoreKVWarning
from restorekv.model import gguf
from restorekv.model.identity import WEIGHT_SOURCES, fingerprint_model
from restorekv.model.load import load_model, load_tokenizer
from restorekv.model.names import get_model_name
from tests.helpers.cli_world import cli
from tests.helpers.models import SHAPE, build_model

pytest.importorskip("gguf", reason="the package gguf is not installed")
from tests.helpers import gguf_world

TEXT = "<|im_start|>the code of  the red house\n\n is seven; who lives?<|im_end|>"
LOAD = (
    "import sys; from restorekv.model.load import load_model; "
    "print(load_model(sys.argv[1])[0].config.name_or_path)"
)


@pytest.fixture(scope="module")
def original():
    return build_model("llama", intermediate_size=64, max_position_embeddings=512)


@pytest.fixture(scope="module")
def file(tmp_path_factory, original, tiny_tokenizer) -> Path:
    return gguf_world.write(
        tmp_path_factory.mktemp("gguf") / "small.gguf", original, tiny_tokenizer
    )


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch) -> Path:
    """A cache folder of each test's own."""
    monkeypatch.setenv("RESTOREKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def no_conversion(monkeypatch):
    def fail(*_):
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf, "convert_file", fail)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_are_those_that_gguf_dequantizes(family, tiny_tokenizer, tmp_path, capsys):
    original = build_model(family, intermediate_size=64)
    file = gguf_world.write(tmp_path / "small.gguf", original, tiny_tokenizer)
    model, _ = load_model(str(file))
    expected = gguf_world.dequantized(file, original)
    assert model.state_dict().keys() == expected.keys()
    for name, weight in model.state_dict().items():
        assert weight.dtype == torch.float32 and weight.equal(torch.tensor(expected[name])), name
    # Quantized indeed.
    assert not model.state_dict()["lm_head.weight"].equal(original.lm_head.weight)
    assert get_model_name(model) == str(file) and WEIGHT_SOURCES[model] == "GGUF Q4_1"
    err = capsys.readouterr().err
    assert err.startswith(f"preparing {file} from its GGUF file") and "%" not in err.split("\n")[0]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_file_that_is_not_quantized_is_the_model(family, tiny_tokenizer, tmp_path):
    original = build_model(family, intermediate_size=64)
    kind = gguf_world.Kind.F32
    model, _ = load_model(
        str(gguf_world.write(tmp_path / "small.gguf", original, tiny_tokenizer, kind))
    )
    assert fingerprint_model(model) == fingerprint_model(original)
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_base_of_the_rope_is_the_files(tiny_tokenizer, tmp_path):
    """transformers leaves it at its default where it does not know the field of an architecture."""
    settings = {**SHAPE, "vocab_size": len(tiny_tokenizer), "head_dim": 8, "rms_norm_eps": 1e-5}
    settings["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    original = AutoModelForCausalLM.from_config(Starcoder2Config(**settings)).eval()
    fields = {"starcoder2.attention.layer_norm_epsilon": original.config.norm_epsilon}
    file = gguf_world.write(
        tmp_path / "small.gguf", original, tiny_tokenizer, gguf_world.Kind.F32, extra=fields
    )
    model, _ = load_model(str(file))
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(model(ids).logits, original(ids).logits, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_is_the_files(file, tiny_tokenizer):
    tokenizer = load_tokenizer(str(file), offline=True)
    assert tokenizer.encode(TEXT) == tiny_tokenizer.encode(TEXT)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (
        len(tokenizer) == len(tiny_tokenizer)
        and tokenizer.chat_template == tiny_tokenizer.chat_template
    )
    assert tokenizer.special_tokens_map == tiny_tokenizer.special_tokens_map
    assert tokenizer.model_max_length == 512


def test_a_second_load_converts_nothing(file, root, monkeypatch, capsys):
    first, _ = load_model(str(file))
    no_conversion(monkeypatch)
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)  # nor needs it the package gguf
    capsys.readouterr()
    second, tokenizer = load_model(str(file), dtype="bfloat16")
    assert second.dtype == torch.bfloat16 and len(tokenizer)
    assert fingerprint_model(second) == fingerprint_model(first)
    assert "preparing" not in capsys.readouterr().err
    assert [path.name for path in root.iterdir() if not path.name.startswith(".")] == [
        f"{gguf.digest_file(file)[:16]}-{gguf.VERSION}"
    ]


def test_a_folder_with_one_file(file, tmp_path, original):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "small.gguf").symlink_to(file)
    model, _ = load_model(str(folder))
    assert get_model_name(model) == str(folder)
    (folder / "other.gguf").write_bytes(b"")
    with pytest.raises(
        ModelError, match=r"holds 2 GGUF files; name one of them: other\.gguf, small\.gguf"
    ):
        load_model(str(folder))
    original.save_pretrained(folder)  # a folder of transformers, whatever else lies there
    assert gguf.find_file(str(folder)) is None


@pytest.mark.parametrize("damage", ["cut", "changed", "unmarked", "foreign"])
def test_a_damaged_cache_is_made_again(file, damage, monkeypatch):
    load_model(str(file))
    folder = gguf.prepare_folder(file, "small")
    if damage == "cut":
        os.truncate(folder / "model.safetensors", 1000)
    elif damage == "changed":
        content = bytearray((folder / "config.json").read_bytes())
        content[10] ^= 1
        (folder / "config.json").write_bytes(content)
    elif damage == "unmarked":
        (folder / gguf.MARKER).unlink()
    else:
        (folder / gguf.MARKER).write_text(json.dumps([1, 2]))
    load_model(str(file))
    no_conversion(monkeypatch)
    assert load_model(str(file))


def test_a_killed_conversion_leaves_no_half_folder(file, root):
    code = (
        "import os, signal, sys; from restorekv.model import gguf; from restorekv.model.load "
        "import load_model\n"
        "def killed(file, header, folder):\n"
        "    folder.mkdir(); (folder / 'config.json').write_text('{}'); os.kill(os.getpid(), "
        "signal.SIGKILL)\n"
        "gguf.convert_file = killed; load_model(sys.argv[1])"
    )
    killed = subprocess.run([sys.executable, "-c", code, file], capture_output=True)
    assert killed.returncode == -signal.SIGKILL
    assert [
        path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")
    ] == []
    assert [path for path in root.iterdir() if path.is_dir()] != []
    load_model(str(file))
    # And what it left is swept up.
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError("no")])
def test_a_conversion_that_stops_leaves_nothing(file, root, monkeypatch, error):
    def stop(file, header, folder):
        folder.mkdir()
        raise error

    monkeypatch.setattr(gguf, "convert_file", stop)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else ModelError):
        load_model(str(file))
    assert [path for path in root.iterdir() if path.is_dir()] == []


def test_two_processes_at_once(file, root):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen([sys.executable, "-c", LOAD, file], **pipes) for _ in range(2)]
    told = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0] and [out.strip() for out, _ in told] == [
        str(file)
    ] * 2
    assert sum("preparing" in err for _, err in told) == 1
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1


def test_whoever_is_second_uses_what_is_there(file, root, monkeypatch):
    """On a disk without locks two may convert; the second finds the place taken."""
    convert = gguf.convert_file

    def slow(file, header, folder):
        monkeypatch.setattr(gguf, "convert_file", convert)
        header = gguf.load_header(file)
        gguf.make_folder(
            file,
            "faster",
            gguf.find_cache_folder() / f"{gguf.digest_file(file)[:16]}-{gguf.VERSION}",
        )
        convert(file, header, folder)

    monkeypatch.setattr(gguf, "convert_file", slow)
    assert load_model(str(file))
    assert len([path for path in root.iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize("place", ["unwritable", "homeless"])
def test_without_a_cache_folder_the_model_is_prepared_for_this_process(
    file, place, monkeypatch, tmp_path
):
    gguf.make_temporary_folder.cache_clear()
    if place == "unwritable":
        (tmp_path / "taken").write_text("")
        monkeypatch.setenv("RESTOREKV_CACHE", str(tmp_path / "taken" / "cache"))
    else:
        monkeypatch.delenv("RESTOREKV_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

        def homeless(self):
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.warns(
        RestoreKVWarning, match="prepared again in every process; set RESTOREKV_CACHE"
    ):
        load_model(str(file))
    no_conversion(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_model(str(file))
    gguf.make_temporary_folder.cache_clear()


def test_a_full_disk_is_one_sentence(file, root, monkeypatch):
    def full(self, folder, **_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    with pytest.raises(
        ModelError, match=r"Cannot keep .*No space left on device.*free some space there or set"
    ):
        load_model(str(file))
    assert [path for path in root.iterdir() if path.is_dir()] == []


def test_the_command_line_tells_of_it_once_and_shows_no_bars(file, tmp_path):
    (tmp_path / "text").write_text("the code of the red house is seven; " * 8)

    def compress():
        return cli(
            "compress",
            tmp_path / "text",
            "--model",
            file,
            "--ratio",
            0.5,
            "-o",
            tmp_path / "doc.rkv",
        )

    first, second = compress(), compress()
    assert (first.code, second.code, second.err) == (0, 0, "")
    assert first.err.count("\n") == 1 and first.err.startswith(f"preparing {file}")
    answer = cli("ask", tmp_path / "doc.rkv", "who?", "--model", file, "--max-new-tokens", 2)
    assert answer.code == 0
    assert str(file) in cli("inspect", tmp_path / "doc.rkv").out.replace("\n", "").replace(
        " ", ""
    ).replace("│", "")


def cut(path: Path, file: Path, size: int) -> Path:
    path.write_bytes(file.read_bytes()[:size])
    return path


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_short(file, tmp_path, share):
    short = cut(tmp_path / "short.gguf", file, max(int(file.stat().st_size * share), 4))
    with pytest.raises(
        ModelError, match=r"short\.gguf is damaged \(it is cut short, or .+\); fetch it again\.$"
    ) as caught:
        load_model(str(short))
    assert "\n" not in str(caught.value)


def test_what_is_no_gguf_file(file, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="is a file but not a GGUF file"):
        load_model(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelError, match=r"There is no GGUF file .*nowhere\.gguf; check the path"):
        load_model(str(tmp_path / "nowhere.gguf"))


def test_a_file_that_may_not_be_read(file, monkeypatch):
    opened = os.open

    def open_others(path, *rest, **named):
        if Path(path) == file:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", open_others)
    with pytest.raises(
        RestoreKVError,
        match=r"small\.gguf cannot be read \(Permission denied\); check its permissions",
    ):
        load_model(str(file))


def test_without_the_package_gguf(file, monkeypatch, capsys):
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"needs the package gguf; run pip install 'restorekv\[gguf\]'"
    ):
        load_model(str(file))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "plamo"}, "GGUF model with architecture plamo is not supported"),
        (
            {"without": "model.layers.1.mlp.up_proj.weight"},
            r"it lacks model\.layers\.1\.mlp\.up_proj\.weight",
        ),
        (
            {"extra": {"llama.vocab_size": 319}},
            r"it lacks lm_head\.weight or has it in a shape that its header",
        ),
        ({"extra": {"tokenizer.ggml.model": "bert"}}, "its tokenizer is of the kind 'bert'"),
        (
            {"extra": {"tokenizer.ggml.pre": "odd"}},
            "how its tokenizer splits text, 'odd', is not known here",
        ),
        (
            {"extra": {"split.count": 3}},
            "it is one of 3 parts; join them with llama-gguf-split --merge",
        ),
        (
            {"extra": {"llama.rope.scaling.type": "yarn"}},
            "transformers does not read its RoPE scaling",
        ),
        (
            {"extra": {"llama.rope.scaling.factor": 4.0}},
            "transformers does not read its RoPE scaling",
        ),
        (
            {"extra": {"llama.rope.scale_linear": 4.0}},
            "transformers does not read its RoPE scaling",
        ),
        (
            {"order": gguf_world.gguf.GGUFEndian.BIG},
            "its bytes are in the order of another kind of machine; fetch the file for yours",
        ),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_files_that_cannot_be_read_rightly(changes, said, original, tiny_tokenizer, tmp_path, root):
    odd = gguf_world.write(tmp_path / "odd.gguf", original, tiny_tokenizer, **changes)
    with pytest.raises(
        ModelError, match=rf"Cannot use the GGUF file .*odd\.gguf: {said}.*\.$"
    ) as caught:
        load_model(str(odd))
    assert "\n" not in str(caught.value)
    assert [path for path in root.iterdir() if path.is_dir()] == []


def test_biases_that_transformers_does_not_read_are_refused(tiny_tokenizer, tmp_path):
    """Headers do not say that a Llama has them, as IBM's Granite Code models do."""
    model = build_model(
        "llama", intermediate_size=64, max_position_embeddings=512, attention_bias=True
    )
    biased = gguf_world.write(tmp_path / "biased.gguf", model, tiny_tokenizer)
    with pytest.raises(
        ModelError, match=r"of its [\d,]+ weights and leaves out the others, such as"
    ):
        load_model(str(biased))
