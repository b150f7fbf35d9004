"""What a cache file may hold: finite numbers, short texts around a question, usable records.

If a model computes NaN all the same, a question ends with a sentence and never gets a token.
"""

import json

import pytest
import torch

from restorekv import CompressedContext, compress, load_model
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.generation import decoding, fixed_steps
from restorekv.generation.sampling import SamplingConfig, TokenSampler
from restorekv.model.prompt import make_context
from restorekv.size_limits import LARGEST_NUMBER
from restorekv.storage.cache_checks import ContradictionError, check_scales
from tests.helpers.compressing import compress_with
from tests.hostile.damage import File

TEXT = "The red house belongs to Ada. The code of the blue house is 482. " * 6
QUESTION = "Who owns the red house?"


@pytest.fixture(scope="module")
def opened():
    return load_model("tiny")


@pytest.fixture(scope="module")
def good(opened, tmp_path_factory) -> dict[str, bytes]:
    """Valid files by kind: with every dtype of pairs, with a bias, and with a restore cache."""
    kinds = {
        "plain": {"evictor": "snapkv", "adapter": None},
        "restored": {"evictor": "kvzip"},
        "int8": {"evictor": "snapkv", "adapter": None, "kv_dtype": "int8"},
        "fp8": {"evictor": "snapkv", "adapter": None, "kv_dtype": "fp8"},
        "bias": {"evictor": "am-fast", "adapter": None},
    }
    found = {}
    for name, options in kinds.items():
        path = tmp_path_factory.mktemp("good") / "doc.rkv"
        compress_with(*opened, TEXT, ratio=0.2, **options).save(path)
        found[name] = path.read_bytes()
    return found


def loaded(opened, tmp_path, raw: bytes) -> CompressedContext:
    path = tmp_path / "doc.rkv"
    path.write_bytes(raw)
    return CompressedContext.load(path, *opened)


def refused(opened, tmp_path, raw: bytes, match: str) -> None:
    with pytest.raises(CacheFileError, match=match) as caught:
        loaded(opened, tmp_path, raw)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 600


@pytest.mark.parametrize("value", [3e38, -3e38, 65_537.0])
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("plain", "layers.0.keys"),
        ("plain", "layers.1.values"),
        ("restored", "restore_keys"),
        ("bias", "bias"),
        ("restored", "restore_values"),
        ("int8", "keys.scales"),
        ("int8", "values.scales"),
        ("fp8", "keys.scales"),
    ],
)
def test_finite_numbers_that_no_model_computes_are_refused(
    opened, good, tmp_path, kind, part, value
):
    file = File.of(good[kind])
    name = next(
        name for name in sorted(file.tensors) if part in name and file.tensors[name].numel()
    )
    file.tensors[name] = file.tensors[name].clone()
    file.tensors[name].view(-1)[-1] = value
    refused(opened, tmp_path, file.sealed(), "no model computes|no cache has")


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_scale_may_stand_for_the_largest_number_and_no_more(kv_dtype):
    largest = LARGEST_NUMBER / {"int8": 127, "fp8": 448}[kv_dtype]
    check_scales(torch.tensor([[1e-30], [largest]]), kv_dtype)
    for wrong in (0.0, -1.0, largest * 1.001):
        with pytest.raises(ContradictionError):
            check_scales(torch.tensor([[1.0], [wrong]]), kv_dtype)


def largest_number(model, tokenizer, text: str) -> float:
    cache = compress(model, tokenizer, text, evictor="knorm", adapter=None, ratio=1).cache
    return max(
        float(x.abs().max())
        for layer in cache.layers
        for x in (layer.context_keys, layer.context_values)
    )


def test_caches_of_the_tiny_model_lie_far_below_the_bound(opened):
    assert 0.1 < largest_number(*opened, TEXT) < LARGEST_NUMBER / 2000


@pytest.mark.slow
def test_caches_of_smollm2_lie_far_below_the_bound():
    assert 1 < largest_number(*load_model("smollm2"), TEXT) < LARGEST_NUMBER / 2000


FIELDS = {
    "separator": ("x" * 300_000, "300,000 characters as its separator"),
    "model": ("m" * 5000, "5,000 characters as its model"),
    "system": ("s" * (2 << 20), "characters as its system"),
    "suffix_text": ("x " * 5000, "after every question"),
    "offset": (2**31 - 2000, "which no context has"),
    "earlier": (2**31, "which no context has"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_around_the_prompt_are_bounded(opened, good, tmp_path, name):
    file = File.of(good["plain"])
    file.manifest[name], match = FIELDS[name]
    refused(opened, tmp_path, file.sealed(), match)


def test_an_offset_beyond_the_models_positions_is_refused(opened, good, tmp_path):
    file = File.of(good["plain"])
    file.manifest["offset"] = 1_000_000
    refused(opened, tmp_path, file.sealed(), "moves questions to position")


def test_ids_after_a_question_are_bounded(opened, good, tmp_path):
    file = File.of(good["plain"])
    file.tensors["suffix_ids"] = torch.ones(1, 100_000, dtype=torch.int32)
    refused(opened, tmp_path, file.sealed(), "after every question")


def test_a_manifest_of_many_elements_is_refused_before_it_is_parsed(
    opened, good, tmp_path, monkeypatch
):
    file = File.of(good["plain"])
    text = json.dumps(file.manifest)[:-1] + ', "x": [' + ",".join(["[]"] * 200_000) + "]}"
    raw, parse = file.sealed(text), json.loads

    def parsed(text: str, **how: object) -> object:
        assert not text.startswith('{"model"'), "the manifest was parsed"
        return parse(text, **how)

    monkeypatch.setattr(json, "loads", parsed)
    refused(opened, tmp_path, raw, "more than 100,000 elements")


def test_a_template_that_no_file_could_hold_is_refused_at_once(tiny_tokenizer):
    with pytest.raises(RestoreKVError, match="use a shorter template"):
        make_context(tiny_tokenizer, "A text.", separator="x" * 3000)


@pytest.mark.parametrize(
    "change",
    [
        {"restore_tokens": None},
        {"restore_tokens": "2"},
        {"restore_tokens": 0},
        {"restore_tokens": True},
        {"hash": None},
        {"hash": "\x1b[2J"},
        {"evictor": []},
        {"hash": "a" * 5000},
        {"surplus": 1},
        {"ratio_range": "x"},
    ],
)
def test_the_record_of_an_adapter_is_whole_or_refused(opened, good, tmp_path, change):
    file = File.of(good["restored"])
    for name, value in change.items():
        if value is None:
            del file.manifest["adapter"][name]
        else:
            file.manifest["adapter"][name] = value
    refused(opened, tmp_path, file.sealed(), "adapter")


def test_a_good_file_grows(opened, good, tmp_path):
    assert loaded(opened, tmp_path, good["restored"]).append(TEXT).manifest.parts


@pytest.mark.parametrize("gate", ["gate=/dev/zero", "gagate=,te=/dev/zero", " gate=/dev/zero"])
def test_no_gate_is_opened_because_a_file_names_it(opened, good, tmp_path, gate, monkeypatch):
    from restorekv.evictors import gate_file

    file = File.of(good["plain"])
    file.manifest["evictor"] = f"fastkvzip:{gate}"
    monkeypatch.setattr(
        gate_file,
        "read_gate",
        lambda path: pytest.fail(f"{path} was read") if "zero" in str(path) else 1,
    )
    with pytest.raises((RestoreKVError, AttributeError)):
        loaded(opened, tmp_path, file.sealed()).append(TEXT)


@pytest.fixture
def broken(opened, good, tmp_path):
    """A cache with numbers that became NaN after they were checked, as if the model overflowed."""
    context = loaded(opened, tmp_path, good["plain"])
    for layer in context.cache.layers:
        layer.context_values.fill_(float("nan"))
    return context


WAYS = {
    "greedy": lambda c: c.ask(QUESTION, 3),
    "batch": lambda c: c.ask([QUESTION, "Why?"], 3),
    "sampling": lambda c: c.ask(QUESTION, 3, temperature=1.0),
    "log-probabilities": lambda c: c.ask(QUESTION, 3, logprobs=2, details=True),
    "penalty": lambda c: c.ask(QUESTION, 3, repetition_penalty=1.2),
    "stream": lambda c: list(c.ask(QUESTION, 3, stream=True)),
    "graph": lambda c: c.ask(QUESTION, 3, graph=True),
    "chat": lambda c: c.chat().ask(QUESTION, 3),
    "chat, sampling": lambda c: list(c.chat().ask(QUESTION, 3, stream=True, temperature=1.0)),
    "generate": lambda c: c.generate(QUESTION, max_new_tokens=3),
    "generate, sampling": lambda c: c.generate(QUESTION, max_new_tokens=3, do_sample=True),
    "generate, beams": lambda c: c.generate(QUESTION, max_new_tokens=3, num_beams=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_logits_that_are_no_numbers_give_a_sentence_and_no_token(broken, way):
    with pytest.raises(RestoreKVError, match="not finite"):
        WAYS[way](broken)


def test_a_step_of_fixed_work_marks_what_it_cannot_choose(opened):
    logits = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [1.0, float("inf")]])
    ids, marked = fixed_steps.find_likeliest(logits)
    assert marked.tolist() == [[1], [-1], [-1]] and ids.min() >= 0
    with pytest.raises(RestoreKVError, match="not finite"):
        decoding.sample_ids(logits, [])


def test_one_row_without_numbers_fails_alone(tiny_tokenizer):
    """The server then ends the question of this row, and no other question of the batch."""
    rows = [
        TokenSampler(SamplingConfig(), tiny_tokenizer, torch.ones(1, 1, dtype=torch.long), 0)
        for _ in range(2)
    ]
    assert rows[0].sample(torch.tensor([0.0, 1.0])) == 1
    with pytest.raises(RestoreKVError, match="not finite"):
        rows[1].sample(torch.tensor([0.0, float("nan")]))
    assert rows[0].sample(torch.tensor([1.0, 0.0])) == 0


def test_a_conversation_longer_than_the_model_is_refused_before_it_is_read(
    opened, good, tmp_path, monkeypatch
):
    document, path = loaded(opened, tmp_path, good["plain"]), tmp_path / "chat.json"
    chat = document.chat()
    chat.ask(QUESTION, 2)
    chat.save(path)
    assert len(type(chat).load(path, document).turns) == 1
    content = json.loads(path.read_text())
    content["turns"][0]["read"] = [5] * 200_000
    path.write_text(json.dumps(content))
    monkeypatch.setattr(
        "restorekv.generation.chat.prefill", lambda *_, **__: pytest.fail("it was read")
    )
    with pytest.raises(CacheFileError, match=r"200,00\d tokens, and the model's"):
        type(chat).load(path, document)
