"""Builds the tokenizer that the fields of a GGUF file describe.

That of transformers is wrong: for SmolLM2, 5.2 adds CodeLlama's extra tokens and a wrong end token,
and 5.23 splits text like GPT-2, so that "\\n\\n1." becomes other tokens than in training.
"""

from collections.abc import Mapping, Sequence

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
# Of a token of SentencePiece, and of all together: every place in a token is tried as that of a
# merge. Gemma's longest have some 50 letters, and its 262,144 have 2 million.
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


def build_tokenizer(fields: Mapping[str, object], longest: int) -> PreTrainedTokenizerFast:
    """Builds it from the file's `tokenizer.*` fields, for texts of up to `longest` tokens.

    Raises ValueError, with the reason, for an unknown kind of vocabulary or of splitting.
    """
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    kind = own.get("model")
    tokens = own.get("tokens") or []
    if kind not in ("gpt2", "llama") or not tokens:
        raise ValueError(
            f"its tokenizer is of the kind {kind!r}, and only gpt2 and llama are known here"
        )
    tokenizer = (
        _build_sentencepiece(own, tokens) if kind == "llama" else _build_byte_level(own, tokens)
    )
    for each, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [
            token
            for token, its in zip(tokens, own.get("token_type") or (), strict=False)
            if its == each
        ]
        added = [AddedToken(token, normalized=False, special=special) for token in chosen]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)
    ids = {
        name: own.get(f"{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    special = {
        f"{name}_token": tokens[number] for name, number in ids.items() if number is not None
    }
    if "bos_token" in special and own.get("add_bos_token", kind == "llama"):
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ids["bos"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=longest,
        chat_template=fields.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _build_byte_level(own: Mapping[str, object], tokens: Sequence[str]) -> Tokenizer:
    """Builds BPE over bytes, each written as one printable character, as in GPT-2, Llama 3 and
    Qwen.
    """
    split = SPLITS.get(own.get("pre"))
    if split is None:
        raise ValueError(f"how its tokenizer splits text, {own.get('pre')!r}, is not known here")
    merges = [tuple(merge.split(" ")) for merge in own.get("merges") or ()]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split == LLAMA3)
    )
    if split == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    first = {"gpt2": None, "digits": pre_tokenizers.Digits(individual_digits=True)}
    first = first[split] if split in first else pre_tokenizers.Split(Regex(split), "isolated")
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt2", "digits"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, rest]) if first else rest
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _build_sentencepiece(own: Mapping[str, object], tokens: Sequence[str]) -> Tokenizer:
    """Builds BPE over characters with bytes as a fallback, as in Llama 2, Mistral and Phi-3; scores
    order merges.
    """
    kinds = own.get("token_type") or [NORMAL] * len(tokens)
    scores = own.get("scores") or [0.0] * len(tokens)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    lengths = [len(token) for number, token in enumerate(tokens) if kinds[number] == NORMAL]
    if max(lengths, default=0) > LETTERS or sum(lengths) > ALL_LETTERS:
        raise ValueError("its tokenizer has longer tokens than any that is known")
    ranked = [
        (-scores[number], number, (token[:cut], token[cut:]))
        for number, token in enumerate(tokens)
        if kinds[number] == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges = [pair for *_, pair in sorted(ranked)]
    unknown = tokens[own.get("unknown_token_id") or 0]
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = own.get("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer
