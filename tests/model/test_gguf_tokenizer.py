"""Tokenizers of GGUF files: split, merged and put together again as those they were written
from.
"""

import io
import json

import pytest
from transformers import AutoTokenizer

from restorekv.model.gguf_tokenizer import SPLITS, build_tokenizer

TEXTS = (
    "The market's code is 46; isn't it?\n\n1. Leon (64)\n\n\n22) x",
    "  two  spaces \t tab\r\nand   3 more   ",
    "na\u00efve caf\u00e9 \u2014 \u6f22\u5b57 e\u0301 12345.67",
)
ALPHABET = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256))]
# How byte-level vocabularies write bytes.
ALPHABET += [chr(256 + number) for number in range(256 - len(ALPHABET))]
BREAK, SPACE = "\u010a", "\u0120"  # "\n" and " " among them


def fields(pre: str, merges: list[str], **more: object) -> dict[str, object]:
    """A byte-level vocabulary: all bytes, what is merged, an end token."""
    tokens = ["<end>", *ALPHABET, *(merge.replace(" ", "") for merge in merges)]
    own = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "eos_token_id": 0,
        **more,
    }
    own["token_type"] = [3] + [1] * (len(tokens) - 1)
    return {f"tokenizer.ggml.{key}": value for key, value in own.items()}


MERGES = [f"{BREAK} {BREAK}", f"{SPACE} {SPACE}", "1 2", f"{SPACE} 1"]


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        # Digits stand alone before anything else is split: the line breaks before them stay
        # together.
        ("smollm", "a\n\n12", ["a", BREAK * 2, "1", "2"]),
        ("smollm", "a  1", ["a", SPACE * 2, "1"]),
        ("smollm", "a 1", ["a", SPACE, "1"]),
        ("gpt-2", "a\n\n12", ["a", BREAK, BREAK, "12"]),
        ("gpt-2", "a  1", ["a", SPACE, SPACE + "1"]),
        ("llama-bpe", "a\n\n12", ["a", BREAK * 2, "12"]),
        ("llama-bpe", "a 1", ["a", SPACE, "1"]),
        ("qwen2", "a\n\n12", ["a", BREAK * 2, "1", "2"]),
        ("smollm", "1<end>2", ["1", "<end>", "2"]),
    ],
)
def test_text_is_split_as_the_file_says(pre, text, tokens):
    tokenizer = build_tokenizer(fields(pre, MERGES), 100)
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", SPLITS)
def test_every_text_comes_back_and_survives_the_disk(pre, tmp_path):
    tokenizer = build_tokenizer(fields(pre, MERGES, bos_token_id=0, add_bos_token=True), 100)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == 0 and again.encode(text) == ids
        expected = (
            text.replace("e\u0301", "\u00e9")
            if pre in ("qwen2", "deepseek-r1-qwen", "megrez")
            else text
        )
        assert again.decode(ids, skip_special_tokens=True) == expected


def test_no_start_token_unless_the_file_asks_for_one():
    assert build_tokenizer(fields("smollm", MERGES, bos_token_id=0), 100).encode("a") == [
        ALPHABET.index("a") + 1
    ]


def test_the_start_token_of_llama_3_needs_no_field():
    """Files of Llama 3 have none, and llama.cpp and Meta's tokenizer begin a text with it."""
    made = fields("llama-bpe", MERGES, bos_token_id=0)
    assert build_tokenizer(made, 100).tokenize("a", add_special_tokens=True) == ["<end>", "a"]
    made["tokenizer.ggml.add_bos_token"] = False
    assert build_tokenizer(made, 100).tokenize("a", add_special_tokens=True) == ["a"]


def test_user_defined_tokens_are_whole_and_not_special():
    made = fields("gpt-2", MERGES)
    made["tokenizer.ggml.tokens"] = [*made["tokenizer.ggml.tokens"], "<think> so"]
    made["tokenizer.ggml.token_type"] = [*made["tokenizer.ggml.token_type"], 4]
    tokenizer = build_tokenizer(made, 100)
    assert tokenizer.tokenize("a<think> sob") == ["a", "<think> so", "b"]
    assert (
        tokenizer.decode(tokenizer.encode("a<think> so"), skip_special_tokens=True) == "a<think> so"
    )


def test_sentencepiece_vocabularies_are_read_as_sentencepiece_does(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    lines = [line for text in TEXTS for line in text.replace("\r", "").split("\n")] * 2 + [
        "who lives in the house?"
    ] * 9
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    oracle = spm.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = range(oracle.get_piece_size())
    kinds = [
        3 if oracle.is_control(i) else 2 if oracle.is_unknown(i) else 6 if oracle.is_byte(i) else 1
        for i in pieces
    ]
    own = {
        "model": "llama",
        "tokens": [oracle.id_to_piece(i) for i in pieces],
        "token_type": kinds,
        "scores": [oracle.get_score(i) for i in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    tokenizer = build_tokenizer(
        {f"tokenizer.ggml.{key}": value for key, value in own.items()}, 1000
    )
    assert json.loads(tokenizer.backend_tokenizer.to_str())["model"]["byte_fallback"]
    for text in (*TEXTS, "who lives in the house?", " the  house", "\U0001f600 unseen"):
        assert tokenizer.encode(text) == [1, *oracle.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
