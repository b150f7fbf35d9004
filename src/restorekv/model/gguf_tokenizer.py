"""The tokenizer that the fields of a GGUF file describe.

The one that transformers makes is wrong: for SmolLM2, 5.2 adds CodeLlama's extra tokens and a wrong
end token, and 5.23 splits text like GPT-2, so that "\\n\\n1." becomes other tokens than in
training.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

# values of tokenizer.ggml.token_type
NORMAL = 1
CONTROL = 3
USER_DEFINED = 4
SPACE = "\u2581"  # SentencePiece's
# The most letters that a token of SentencePiece may have, and all tokens together: every place in a
# token is tried as the seam of a merge. Gemma's longest tokens have some 50 letters, and all
# 262,144 together have 2 million.
LETTERS = 1 << 8
ALL_LETTERS = 1 << 24
# Words with an optional leading character, runs of {digits} digits, punctuation, line breaks, other
# white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = WORDS.format(digits="{1,3}")
QWEN2 = WORDS.format(digits="")
# How a byte-level vocabulary splits text, by tokenizer.ggml.pre (the names are llama.cpp's).
SPLITS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), "gpt2"),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        "digits",
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe"), LLAMA3
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2),
}

# Byte-level vocabularies that put BOS before a text unless the file says otherwise; Llama 3's says
# nothing.
WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")


def build_tokenizer(fields: Mapping[str, Any], longest: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer from the file's `tokenizer.*` fields, for texts of `longest` tokens.

    Raises ValueError, with the reason, for an unknown kind of vocabulary or of splitting.
    """
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    kind = own.get("model")
    tokens = own.get("tokens") or []
    if kind not in ("gpt2", "llama") or not tokens:
        raise ValueError(
            f"its tokenizer is of the kind {kind!r}, and only gpt2 and llama are known here"
        )
    if kind == "llama":
        tokenizer = _build_sentencepiece(own, tokens)
    else:
        tokenizer = _build_byte_level(own, tokens)
    control = []
    user_defined = []
    # Types are optional; without them no token is special here.
    for token, its_type in zip(tokens, own.get("token_type") or (), strict=False):
        if its_type == CONTROL:
            control.append(AddedToken(token, normalized=False, special=True))
        elif its_type == USER_DEFINED:
            user_defined.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(user_defined)
    special = {}
    # The file numbers special tokens; transformers wants their texts.
    for name, field in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = own.get(f"{field}_token_id")
        if number is not None:
            special[f"{name}_token"] = tokens[number]
    # SentencePiece adds BOS unless told otherwise, most byte-level vocabularies only if told so.
    adds_bos = own.get("add_bos_token", kind == "llama" or own.get("pre") in WITH_BOS)
    if "bos_token" in special and adds_bos:
        bos = special["bos_token"]
        # A text begins with BOS; of a pair, both texts do.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, own["bos_token_id"])],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=longest,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _build_byte_level(own: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Build BPE over bytes, each written as one character, as in GPT-2, Llama 3 and Qwen."""
    split = SPLITS.get(str(own.get("pre")))
    if split is None:
        raise ValueError(f"how its tokenizer splits text, {own.get('pre')!r}, is not known here")
    # A merge is two tokens with a space between them, which no byte-level token has.
    merges = [tuple(merge.split(" ")) for merge in own.get("merges") or ()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        # Llama 3 makes one token of a word that is a token, even if merges would not.
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == LLAMA3)
    )
    if split == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    if split in ("gpt2", "digits"):  # GPT-2's own regex, which is part of ByteLevel
        steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        if split == "digits":
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    else:
        steps = [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(own: Mapping[str, Any], tokens: Sequence[str]) -> Tokenizer:
    """Build BPE over characters with bytes as a fallback, as in Llama 2, Mistral and Phi-3."""
    kinds = own.get("token_type") or [NORMAL] * len(tokens)
    scores = own.get("scores") or [0.0] * len(tokens)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    lengths = [len(token) for number, token in enumerate(tokens) if kinds[number] == NORMAL]
    if max(lengths, default=0) > LETTERS or sum(lengths) > ALL_LETTERS:
        raise ValueError("its tokenizer has longer tokens than any that is known")
    # The file has no merges, but scores that order them: every split of a token into two tokens is
    # a merge, and those that make the tokens with the best scores come first.
    ranked = []
    for number, token in enumerate(tokens):
        if kinds[number] != NORMAL:
            continue
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in vocabulary and second in vocabulary:
                ranked.append((-scores[number], number, (first, second)))
    merges = [pair for *_, pair in sorted(ranked)]
    unknown = tokens[own.get("unknown_token_id") or 0]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    # SentencePiece writes spaces as its own character.
    spaces = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if own.get("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
