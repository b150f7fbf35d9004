"""Control tokens in users' texts are characters, whatever the tokenizer; other texts have the ids
they always had.
"""

import re
from pathlib import Path

import pytest
import torch
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import restorekv
from restorekv.errors import RestoreKVError
from restorekv.files import decode_text
from restorekv.model.load import load_model, load_tokenizer
from restorekv.model.prompt import encode_question, make_context, split_template
from restorekv.model.tokenize import (
    check_model_and_tokenizer,
    find_control_tokens,
    get_safe_tokenizer,
    locate_tokens,
    tokenize_text,
)
from restorekv.tasks.base import make_token_counter

CORPUS = [
    "the code of the red house is seven; who lives in the blue house? <s> </s> <think> im_start "
    "|> end\n"
] * 4
PLAIN = (
    "  two\n\n\n lines \t",
    "<s",
    "im_start|>",
    "a < b > c",
    "\u4e2d\u00e9 \u2028",
    "< s >",
    "<|im_start |>",
)
CHAT = (
    "{{ '<s>user\\n' + messages[0]['content'] + '</s>\\n<s>assistant\\n<think>\\n\\n</think>\\n' }}"
)


def fast(kind: str) -> PreTrainedTokenizerFast:
    """As in Llama 2 (BPE behind a prepended space), T5 and Gemma (Unigram), or Phi-3 (tokens that
    eat white space).
    """
    alphabet = sorted({*"".join(CORPUS), "\u2581"} - {" "})
    special = ["<unk>", "<s>", "</s>"]
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(
            vocab_size=80, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trainer = trainers.BpeTrainer(
            vocab_size=120, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    if kind == "prepended":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT,
    )
    eats = kind == "eats spaces"
    made.add_tokens(
        [AddedToken(each, rstrip=eats, special=False) for each in ("<think>", "</think>")]
    )
    made.add_tokens(
        [AddedToken("  ", normalized=False), AddedToken("red", single_word=True, normalized=False)]
    )
    return made


@pytest.fixture(
    scope="module", params=["prepended", "unigram", "eats spaces", "tiny", "byte-level"]
)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    if request.param == "byte-level":
        return request.getfixturevalue("tiny_tokenizer")
    return load_tokenizer("tiny") if request.param == "tiny" else fast(request.param)


def test_control_tokens_of_users_are_characters(tokenizer):
    control, before = find_control_tokens(tokenizer), split_template(tokenizer)[0]
    template = [
        each for each in tokenizer.encode(before, add_special_tokens=False) if each in control
    ]
    unknown = {tokenizer.unk_token_id}
    for token in control.values():
        text = f"the {token} code{token}\n {token}"
        context = make_context(tokenizer, text)
        assert [
            each for each in context.ids[0].tolist() if each in control and each not in unknown
        ] == template
        asked = encode_question(tokenizer, context, text, text)[0].tolist()
        written = [each for each in asked if each in control and each not in unknown]
        assert written == [each for each in context.suffix_ids[0].tolist() if each in control]
        if tokenizer.unk_token is None:
            assert tokenizer.decode(context.ids[0]) == before + text


def test_other_texts_have_the_ids_that_they_had(tokenizer):
    """Also around the words of the template, and in the copy that encodes the others."""
    copy, (before, after) = get_safe_tokenizer(tokenizer), split_template(tokenizer)
    for text in (*PLAIN, *CORPUS[0].split(" <s>")[:1]):
        old = tokenizer.encode(before + text, add_special_tokens=False)
        assert make_context(tokenizer, text).ids[0].tolist() == old if text.strip() else True
        named = copy.escape_control_tokens(
            before, tokenizer.encode(before, add_special_tokens=False)[:1]
        )
        assert copy.backend.encode(named + text, add_special_tokens=False).ids == old
        context = make_context(tokenizer, "a", separator="\n")
        # What the whole has after the context "a": no space stands between them.
        old = tokenizer.encode("a\n" + text + after + "It", add_special_tokens=False)
        old = old[len(tokenizer.encode("a", add_special_tokens=False)) :]
        assert torch.equal(
            encode_question(tokenizer, context, text, "It", empty=True)[0], torch.tensor(old)
        )


def test_the_rest_of_a_text_keeps_its_ids(tokenizer):
    """Spelled apart, a control token changes nothing in the words around it."""
    token = next(iter(find_control_tokens(tokenizer).values()))
    ids, apart = (
        tokenize_text(tokenizer, f"the house{each} is the house")
        for each in (token, token[:1] + " " + token[1:])
    )
    assert ids[:2] == apart[:2] and ids[-3:] == apart[-3:]


def test_added_tokens_that_the_template_does_not_write_are_vocabulary():
    tokenizer = fast("prepended")
    names = set(find_control_tokens(tokenizer).values())
    assert names == {"<unk>", "<s>", "</s>", "<think>", "</think>"}
    ids = tokenize_text(tokenizer, "the red  house <think>")
    added = {tokenizer.convert_tokens_to_ids(word) for word in ("  ", "red")}
    assert added <= set(ids) and tokenizer.convert_tokens_to_ids("<think>") not in ids


def test_tokens_that_are_added_later_are_seen(tiny_tokenizer):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer.backend_tokenizer, eos_token="<|im_end|>"
    )
    assert 1 not in tokenize_text(tokenizer, "a <|im_start|>")
    before = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    assert before not in tokenize_text(tokenizer, "a <|new|>")


def test_places_are_those_of_the_characters(tiny_tokenizer):
    text = "the code<|im_end|> of"
    places = locate_tokens(tiny_tokenizer, text)
    assert "".join(text[start:end] for start, end in places) == text and (8, 18) not in places
    assert (
        len(places)
        == len(tokenize_text(tiny_tokenizer, text))
        == make_token_counter(tiny_tokenizer)(text)
    )
    assert len(locate_tokens(tiny_tokenizer, "the code")) == len(
        tokenize_text(tiny_tokenizer, "the code")
    )


class Slow:
    """A tokenizer without a backend, one id for a character, two for "#" and "<s>"."""

    chat_template, is_fast = None, False

    def __init__(self):
        self.added_tokens_decoder = {
            0: AddedToken("<s>", special=True),
            1: AddedToken("<unk>", special=True),
        }

    def __len__(self):
        return 1000

    def encode(self, text, add_special_tokens=True, verbose=True):
        return [1 if each == "#" else ord(each) for each in text.replace("<s>", "\0")]


def test_slow_tokenizers_refuse_what_they_cannot_spell():
    assert tokenize_text(Slow(), "a#") == [97, 1]
    with pytest.raises(RestoreKVError, match="The text has <s>, a control token"):
        tokenize_text(Slow(), "a <s>")
    with pytest.raises(RestoreKVError, match="use a fast tokenizer"):
        locate_tokens(Slow(), "a")


class MistralCommonBackend(Slow):
    """As transformers' own, where the package mistral_common is installed."""

    init_kwargs = None
    vocab_size = 1000

    def __init__(self):
        pass

    @property
    def added_tokens_decoder(self):
        raise NotImplementedError


def test_the_tokenizer_of_mistral_common_is_refused(tiny_model):
    told = "MistralCommonBackend has no chat template .* mistral_format=False"
    with pytest.raises(RestoreKVError, match=told):
        make_context(MistralCommonBackend(), "a text")
    with pytest.raises(RestoreKVError, match=told):
        check_model_and_tokenizer(tiny_model, MistralCommonBackend())


def test_tokenizers_are_loaded_with_their_template(monkeypatch):
    asked = []

    def load(path, **options):
        asked.append(options)
        raise OSError

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", load)
    for loads in (load_tokenizer, load_model):
        with pytest.raises(RestoreKVError):
            loads("tiny")
    assert [each["mistral_format"] for each in asked] == [False, False]


def test_no_other_module_calls_a_tokenizer():
    """A new call elsewhere would let control tokens in again."""
    source = Path(restorekv.__file__).parent
    calls = re.compile(r"tokenizer\(|tokenizer\.(encode|tokenize|batch_encode)|apply_chat_template")
    found = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if calls.search(re.sub(r"def \w+\(|\w+_tokenizer\(", "", path.read_text(encoding="utf-8")))
    }
    assert found == {"model/tokenize.py", "model/prompt.py"}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-16-le"])
def test_text_files_of_every_editor_are_read(encoding):
    """Windows' Notepad calls UTF-16 with a mark "Unicode"."""
    text = "31 Ziegen, größer als 𝄞"
    mark = "\ufeff" if encoding in ("utf-16-be", "utf-16-le") else ""
    assert decode_text((mark + text).encode(encoding), "a.txt") == text


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ("漢字".encode("iso2022-jp"), r"a\.txt is in ISO-2022, not UTF-8; save it as UTF-8"),
        ("한글".encode("iso2022-kr"), r"a\.txt is in ISO-2022"),
        (b"\xff\xfea", r"a\.txt is not UTF-16 text \(byte 2\); save it as UTF-8 first\."),
        ("x".encode("utf-16-le"), r"a\.txt is binary"),  # no mark
        ("x".encode("utf-32"), r"a\.txt is binary"),
        (b"\xe4", r"a\.txt is not UTF-8 text \(byte 0\); save it as UTF-8 first\."),
    ],
)
def test_bytes_that_are_no_text_are_refused(payload, said):
    with pytest.raises(RestoreKVError, match=said):
        decode_text(payload, "a.txt")
