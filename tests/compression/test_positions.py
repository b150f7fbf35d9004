"""A context that the model has no positions for is refused, cut or stretched, never silently."""

import copy
import json
import re
import warnings

import pytest
import torch
from transformers import PretrainedConfig

from restorekv.compression.eviction import Eviction
from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError, RestoreKVWarning, TextTooLongError
from restorekv.many_contexts import compose
from restorekv.model.load import load_model
from restorekv.model.position_limits import (
    RESERVED_POSITIONS,
    PositionLimit,
    fit_context,
    refuse_beyond_limit,
)
from restorekv.model.prompt import encode_question, make_context
from restorekv.model.rope import NO_LIMIT, count_positions, get_rope_settings
from restorekv.storage.portable import load_portable
from tests.helpers import decoders
from tests.helpers.cli_world import cli
from tests.helpers.compressing import compress_with
from tests.helpers.hybrids import HYBRIDS
from tests.helpers.models import build_model

POSITIONS = 512
TEXT = "the code of the red house is seven. " * 80
SMALL = {"evictor": "knorm", "ratio": 0.3, "adapter": None}
UNSTRETCHABLE = [
    kind for kind in ("nemotron_h", "granitemoehybrid", "gemma4_text") if kind in HYBRIDS
]


@pytest.fixture(scope="module")
def model():
    return build_model("llama", max_position_embeddings=POSITIONS)


def test_a_long_context_is_refused(model, tiny_tokenizer):
    with pytest.raises(
        RestoreKVError, match=r"512 positions have room for \d+ and a question; shorten it, cut"
    ):
        compress_with(model, tiny_tokenizer, TEXT, **SMALL)
    with pytest.raises(RestoreKVError, match="one of refuse, cut, not 'stretch'"):
        compress_with(model, tiny_tokenizer, "the code", on_long_text="stretch", **SMALL)


def test_a_cut_is_recorded_and_leaves_room_for_a_question(model, tiny_tokenizer, tmp_path, recwarn):
    whole = make_context(tiny_tokenizer, TEXT)
    small = compress_with(model, tiny_tokenizer, TEXT, on_long_text="cut", **SMALL)
    assert small.manifest.cut == whole.text_tokens - small.manifest.tokens > 0
    assert torch.equal(small.context.ids, whole.ids[:, : small.context.num_tokens])
    assert (
        small.context.num_tokens
        + min(RESERVED_POSITIONS, POSITIONS // 4)
        + small.context.suffix_ids.shape[-1]
        == POSITIONS
    )
    small.ask("Who lives in the red house?", max_new_tokens=2)
    # Up to 512 tokens might have come.
    for _ in zip(range(3), small.chat().ask("Who?", stream=True), strict=False):
        pass
    assert not [each for each in recwarn if issubclass(each.category, RestoreKVWarning)]
    with pytest.warns(RestoreKVWarning, match="beyond the model's 512 positions"):
        small.ask("Who?", max_new_tokens=200)
    small.save(tmp_path / "doc.rkv")
    assert (
        CompressedContext.load(tmp_path / "doc.rkv", model, tiny_tokenizer).manifest.cut
        == small.manifest.cut
    )


def test_what_just_fits_is_whole(model, tiny_tokenizer):
    context = make_context(tiny_tokenizer, TEXT)
    most = POSITIONS - POSITIONS // 4 - context.prefix_length - context.suffix_ids.shape[-1]
    for tokens, cut in ((most, 0), (most + 1, 1)):
        part = make_context(
            tiny_tokenizer, context.ids[0, context.prefix_length : context.prefix_length + tokens]
        )
        fitted, left = fit_context(model, part, "cut")
        assert (fitted.text_tokens, left) == (min(tokens, most), cut)
    assert fit_context(model, part, "cut", offset=10)[1] == 11
    with pytest.raises(RestoreKVError, match="no room for a text"):
        fit_context(model, part, "cut", offset=2**62)


def test_a_long_model_keeps_a_fixed_number_of_positions_free(tiny_tokenizer):
    model = build_model("llama", max_position_embeddings=2048)
    context = make_context(tiny_tokenizer, [5] * 2048)
    room = 2048 - context.prefix_length - context.suffix_ids.shape[-1]
    assert fit_context(model, context, "cut")[0].text_tokens == room - RESERVED_POSITIONS


def test_what_grows_or_is_composed_beyond_the_positions_is_refused(model, tiny_tokenizer):
    """It is refused like a text that is compressed at once; within the positions, nothing warns."""
    half = TEXT[: len(TEXT) // 4]
    small = compress_with(model, tiny_tokenizer, half, **SMALL)
    tokens = small.manifest.tokens
    parts = POSITIONS // tokens
    fix = r"the model has 512; take less text, or compress .* \(load_model\(\.\.\., rope=\d\)\)"
    assert compose([small] * parts).manifest.tokens == parts * tokens
    with pytest.raises(TextTooLongError, match=f"The composed context needs .* {fix}"):
        compose([small] * (parts + 1))
    grown = small
    for _ in range(parts - 1):
        grown = grown.append(half)
    with pytest.raises(TextTooLongError, match=f"The grown context needs .* {fix}"):
        grown.append(half)
    # A conversation can be folded.
    chat = small.chat()
    with pytest.raises(TextTooLongError, match=r"The conversation needs .* fold it first"):
        chat.ask("Who lives in the red house? " * 40, 2)
    assert not chat.turns


def test_a_question_beyond_the_positions_is_refused(model, tiny_tokenizer):
    """It would take memory quadratic in its tokens, and give a bad answer."""
    small = compress_with(model, tiny_tokenizer, TEXT[: len(TEXT) // 4], **SMALL)
    fits = "Who lives in the red house?"
    long = "house " * 600
    for questions in (long, [fits, long], [long, fits]):
        with pytest.raises(TextTooLongError, match=r"with the question needs .* ask less, or"):
            small.ask(questions, 2)


def test_every_way_to_ask_counts_the_positions_of_the_text(model, tiny_tokenizer, tmp_path):
    """Also if an engine sees fewer: a portable cache has m columns, like that of a shorter text."""
    options = {**SMALL, "allocation": "per-head"}
    small = compress_with(model, tiny_tokenizer, TEXT[: len(TEXT) // 4], **options)
    plain = small.portable()
    plain.save(tmp_path / "doc.safetensors")
    loaded = load_portable(tmp_path / "doc.safetensors", model)
    first = small.cache.get_seq_length()
    around = len(encode_question(tiny_tokenizer, small.context, "x")[0])
    asking = {
        "ask": lambda question: small.ask(question, 2),
        "generate": lambda question: small.generate(question, max_new_tokens=2),
        "generate to a length": lambda question: small.generate(question, max_length=POSITIONS),
        "inputs": lambda question: small.inputs(question),
        "plain inputs": lambda question: small.inputs(question, plain=True),
        "portable": lambda question: plain.ask(model, tiny_tokenizer, question, 2),
        "portable file": lambda question: loaded.ask(model, tiny_tokenizer, ["Who?", question], 2),
    }
    # Each capital letter is a token.
    too_long = "x" + "Q" * (POSITIONS + 1 - first - around)
    for ask in asking.values():
        with pytest.raises(TextTooLongError, match="The context with the question needs 513 pos"):
            ask(too_long)
        with warnings.catch_warnings():
            warnings.simplefilter("error", RestoreKVWarning)
            assert ask(too_long[:-3]) is not None
    fits = too_long[:-2]
    for ask in (
        lambda: small.generate(fits, max_new_tokens=9),
        lambda: small.generate(fits, max_length=POSITIONS + 8),
        lambda: plain.ask(model, tiny_tokenizer, fits, 9),
        lambda: loaded.ask(model, tiny_tokenizer, [fits], 9),
    ):
        with pytest.warns(RestoreKVWarning, match="longest answer allowed reaches beyond .* 512"):
            ask()


def test_preparing_a_long_context_is_told(model, tiny_tokenizer):
    with pytest.warns(
        RestoreKVWarning, match="The context reaches beyond the model's 512 positions"
    ):
        Eviction.make("knorm").prepare(model, tiny_tokenizer, TEXT)


@pytest.mark.parametrize(
    ("rope", "own", "positions"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 512, 2048),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 512, 1024),
        # Llama 3.2's factor is 32, over four times fewer positions than it has.
        (
            {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 128},
            512,
            512,
        ),
        ({"rope_type": "default"}, 512, 512),
        ({"rope_type": "default"}, None, NO_LIMIT),
        ({}, 0, NO_LIMIT),
    ],
)
def test_positions_of_a_config(rope, own, positions):
    config = PretrainedConfig()
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    if own is not None:
        config.max_position_embeddings = own
    assert count_positions(config) == positions


def test_yarn_from_the_command_line(model, tiny_tokenizer, tmp_path):
    folder, text, out = tmp_path / "model", tmp_path / "text", tmp_path / "doc.rkv"
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    text.write_text(TEXT)
    command = [
        "compress",
        text,
        "--model",
        folder,
        "--evictor",
        "knorm",
        "--adapter",
        "none",
        "-o",
        out,
    ]
    refused = cli(*command)
    assert refused.code == 1 and "--yarn 2" in refused.err and not out.exists()
    # The factor that the message names is enough, also where a smaller one was tried.
    text.write_text(TEXT * 8)
    refused = cli(*command, "--yarn", "2")
    factor = re.search(r"--yarn (\d+)", refused.err)[1]
    assert int(factor) > 2 and cli(*command, "--yarn", factor).code == 0
    text.write_text(TEXT)
    out.unlink()
    cut = cli(*command, "--on-long-text", "cut", "--json", tmp_path / "cut.json")
    assert cut.code == 0 and "tokens were cut" in cut.out, cut
    assert json.loads((tmp_path / "cut.json").read_text())["cut"] > 0
    assert "tokens were cut" in cli("inspect", out).out
    stretched = cli(*command, "--yarn", 4, "--json", tmp_path / "yarn.json")
    assert stretched.code == 0, stretched
    figures = json.loads((tmp_path / "yarn.json").read_text())
    assert figures["cut"] == 0 and figures["rope"]["factor"] == 4.0
    assert cli("ask", out, "Who?", "--model", folder, "--max-new-tokens", 2).code == 0
    assert "YaRN's factor must be more than 1" in cli(*command, "--yarn", 0.5).err


def test_yarn_stretches_the_layers_that_see_the_whole_text(tiny_tokenizer, tmp_path):
    """Each kind of layers has its own RoPE, and only that of full attention is stretched, as in
    transformers.
    """
    plain = build_model("gemma3", max_position_embeddings=POSITIONS)
    plain.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    config = copy.deepcopy(plain.config)
    original = {"original_max_position_embeddings": POSITIONS}
    config.rope_parameters["full_attention"] |= {"rope_type": "yarn", "factor": 4.0, **original}
    config.max_position_embeddings = 4 * POSITIONS
    expected = type(plain)(config)
    expected.load_state_dict(plain.state_dict())
    ids = torch.arange(40)[None] + 5
    for rope in (4, {"rope_type": "yarn", "factor": 4.0, **original}):
        stretched, _ = load_model(str(tmp_path), rope=rope)
        assert count_positions(stretched.config) == 4 * POSITIONS
        assert torch.equal(stretched(ids).logits, expected.eval()(ids).logits)
        assert not torch.equal(stretched(ids).logits, plain(ids).logits)
    stretched.save_pretrained(tmp_path / "stretched")
    tiny_tokenizer.save_pretrained(tmp_path / "stretched")
    # The oldest versions of transformers cannot read what they wrote of such a model.
    with pytest.raises(RestoreKVError, match=r"stretched already|original_max_position_embeddings"):
        load_model(str(tmp_path / "stretched"), rope=2)
    with pytest.raises(RestoreKVError, match="no RoPE of the kind 'far'"):
        load_model(str(tmp_path), rope={"full_attention": {}, "far": {}})


def test_yarn_needs_a_plain_model(model, tiny_tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    stretched, _ = load_model(str(tmp_path), rope=2)
    assert count_positions(stretched.config) == 2 * POSITIONS
    stretched.save_pretrained(tmp_path)
    with pytest.raises(RestoreKVError, match="stretched already"):
        load_model(str(tmp_path), rope=2)


@pytest.mark.parametrize("kind", UNSTRETCHABLE)
def test_yarn_is_for_plain_rope(kind, tiny_tokenizer, tmp_path):
    """Layers without RoPE, and those with Gemma 4's kind, would not be stretched."""
    settings = {**HYBRIDS[kind], "max_position_embeddings": POSITIONS, "sliding_window": 16}
    plain = decoders.build(kind, **settings)
    plain.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    with pytest.raises(RestoreKVError, match="YaRN does not stretch; leave out rope"):
        load_model(str(tmp_path), rope=4)
    context = make_context(tiny_tokenizer, "the code of the red house " * POSITIONS)
    with pytest.raises(TextTooLongError, match="or use another model"):
        fit_context(plain, context)
    limit = PositionLimit.from_config(plain.config)
    with pytest.raises(TextTooLongError, match="or compress all of it with another model"):
        refuse_beyond_limit(limit, POSITIONS + 1, "The conversation", "fold it first")


def test_the_kind_of_a_rope_may_be_named_as_in_older_configs(model, tiny_tokenizer, tmp_path):
    """Model cards write "type"; without a kind, a factor stretches nothing."""
    model.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    expected, _ = load_model(str(tmp_path), rope=2)
    rope = {"factor": 2.0, "original_max_position_embeddings": POSITIONS}
    stretched, _ = load_model(str(tmp_path), rope={"type": "yarn", **rope})
    assert get_rope_settings(stretched.config) == get_rope_settings(expected.config)
    ids = torch.arange(40)[None] + 5
    assert torch.equal(stretched(ids).logits, expected(ids).logits)
    with pytest.raises(RestoreKVError, match="kind 'default' has no factor; name the kind"):
        load_model(str(tmp_path), rope=rope)
    with pytest.raises(RestoreKVError, match="must be more than 1 and at most 64, not 'yarn'"):
        load_model(str(tmp_path), rope="yarn")
