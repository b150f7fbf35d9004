"""Text is text: control tokens that a user's text spells are encoded as characters; only the chat
template writes them.

Control tokens are the special ones and those added tokens with punctuation that the chat template
names, such as `<think>`. Other added tokens, such as runs of spaces, are vocabulary. Text without
control tokens goes to the tokenizer as it is. Other text goes to a copy of the tokenizer whose
control tokens have names that no text can spell; of two simpler ways, `split_special_tokens` also
splits the template's, keeps `<think>`, and finds `</s>` among the words of a Unigram model;
encoding the pieces between control tokens adds a space to each piece with Llama's first tokenizer.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import tokenizers
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers import PreTrainedTokenizerFast

from restorekv.errors import RestoreKVError

_SAFE_TOKENIZERS: WeakKeyDictionary[Tokenizer, tuple[tuple, "SafeTokenizer"]] = WeakKeyDictionary()
REPLACEMENT = "\ufffd"  # of bytes that make no character
_CONTROL_TOKENS: WeakKeyDictionary[Tokenizer, tuple[tuple, dict[int, str]]] = WeakKeyDictionary()


def tokenize_text(
    tokenizer: Tokenizer, text: str, before: str = "", after: str = "", more: str = ""
) -> list[int]:
    """Returns the ids of before + text + after + more, tokenized as one, without BOS and EOS.

    `before` and `after` are the template's; `text` and `more` are the user's.
    """
    check_unicode(text + more)
    ids = tokenizer.encode(before + text + after + more, add_special_tokens=False, verbose=False)
    control = find_control_tokens(tokenizer)
    written = [
        _pick_control_ids(tokenizer.encode(part, add_special_tokens=False), control)
        for part in (before, after)
    ]
    if _pick_control_ids(ids, control) == [*written[0], *written[1]]:
        return ids
    copy = get_safe_tokenizer(tokenizer)
    if copy is not None:
        before, after = (
            copy.escape_control_tokens(part, own)
            for part, own in zip((before, after), written, strict=True)
        )
        return copy.backend.encode(before + text + after + more, add_special_tokens=False).ids
    refuse_control_tokens(control.values(), text + more)
    return ids  # an unknown character, whose id is a control token's


def locate_tokens(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Returns where each token of a user's text starts and ends in it, in characters."""
    if not tokenizer.is_fast:
        raise RestoreKVError(
            "Cutting texts needs a tokenizer that maps tokens to characters; use a fast tokenizer."
        )
    check_unicode(text)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    copy = (
        get_safe_tokenizer(tokenizer)
        if _pick_control_ids(found["input_ids"], find_control_tokens(tokenizer))
        else None
    )
    return (
        copy.backend.encode(text, add_special_tokens=False).offsets
        if copy
        else found["offset_mapping"]
    )


class TextStream:
    """The text of ids that come one by one, which is not decoded from its start for every id.

    `ids` are all of them. The slow way remains for tokenizers that are not fast or change the text
    after decoding, and for answers whose text changes as it grows, as it may where tokens are bytes
    and do not make characters.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.ids: list[int] = []
        self.certain = ""  # the text up to the last id with which all its characters were whole
        self.pending = False  # whether ids after that have added nothing to it yet
        self.stream = (
            DecodeStream(skip_special_tokens=skip_special_tokens)
            if _can_stream(tokenizer)
            else None
        )

    def push(self, token: int) -> str:
        """Add an id and return the text so far, without a character at its end of which bytes are
        missing.
        """
        self.ids.append(token)
        if self.stream is not None:
            self.step(token)
        if self.stream is None:
            whole = self.decode_all()
            self.pending = whole.endswith(REPLACEMENT)
            if not self.pending:
                self.certain = whole
        return self.certain

    def step(self, token: int) -> None:
        """Add what the library says this id adds to the text; leave its stream where that is not
        the whole text.
        """
        try:
            piece = self.stream.step(self.tokenizer.backend_tokenizer, token)
        except Exception:  # it has no type for a text that does not begin as it did before
            self.stream = None
            return
        self.certain += piece or ""
        self.pending = piece is None
        # A wrong byte can turn the characters before it, which the stream has left behind, into
        # replacements.
        if piece and REPLACEMENT in piece and self.certain != self.decode_all():
            self.stream = None

    def get_text(self) -> str:
        """Return the text of all ids, exactly as the tokenizer decodes them."""
        return self.decode_all() if self.pending else self.certain

    def decode_all(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=self.skip_special_tokens)


def _can_stream(tokenizer: Tokenizer) -> bool:
    """Return whether `decode` is the tokenizers library's own, with nothing done to the text
    afterwards.
    """
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerFast.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )


def decode_utf8(payload: bytes, what: str) -> str:
    """Returns UTF-8 bytes as a text, without a byte order mark; `what` begins the sentence of an
    error.
    """
    try:
        text = payload.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RestoreKVError(
            f"{what} is not UTF-8 text (byte {error.start}); convert it first."
        ) from None
    if "\0" in text:
        raise RestoreKVError(f"{what} is binary; give a text.")
    return text


def check_unicode(text: str) -> None:
    """Refuses half a character, which bytes that are not UTF-8 become on a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RestoreKVError(
            f"The text is not Unicode at character {error.start + 1}; convert it to UTF-8."
        ) from None


def _pick_control_ids(ids: Iterable[int], control: dict[int, str]) -> list[int]:
    return [each for each in ids if each in control]


def find_control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Returns the control tokens by their ids."""

    def find() -> dict[int, str]:
        template = str(tokenizer.chat_template)
        return {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or (re.search(r"[^\w\s]", token.content) and token.content in template)
        }

    return _remember(_CONTROL_TOKENS, tokenizer, find)


@dataclass(frozen=True)
class SafeTokenizer:
    """A copy of a tokenizer with the same ids, whose control tokens have secret names."""

    backend: tokenizers.Tokenizer
    names: dict[int, tuple[str, str]]  # the usual name and the secret one

    def escape_control_tokens(self, text: str, ids: Iterable[int]) -> str:
        """Returns a text of the template with the secret names of those control tokens that the
        tokenizer sees in it.

        It misses some: a normalizer that prepends a space to every text does so to a token's name,
        too.
        """
        names = dict(sorted((self.names[each] for each in ids), key=lambda pair: -len(pair[0])))
        return (
            re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], text)
            if names
            else text
        )


def get_safe_tokenizer(tokenizer: Tokenizer) -> SafeTokenizer | None:
    """Returns such a copy, which is made once, or None where the tokenizer is not a fast one."""
    return (
        _remember(_SAFE_TOKENIZERS, tokenizer, lambda: _make_safe_tokenizer(tokenizer))
        if getattr(tokenizer, "is_fast", False)
        else None
    )


def _make_safe_tokenizer(tokenizer: Tokenizer) -> SafeTokenizer:
    """Renames added tokens, words and merges alike, so that neither the splitter nor the model
    finds an old name.
    """
    control = find_control_tokens(tokenizer)
    names = {old: f"control{secrets.token_hex(16)}" for old in control.values()}
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    # They add tokens and remove some.
    parts.update(truncation=None, padding=None, post_processor=None)
    for token in parts["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = parts["model"]
    words = model["vocab"]
    if isinstance(words, dict):
        model["vocab"] = {names.get(word, word): number for word, number in words.items()}
    else:
        model["vocab"] = [[names.get(word, word), *score] for word, *score in words]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if not {*pair, "".join(pair)} & names.keys()
        ]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(parts))
    if any(backend.token_to_id(names[old]) != number for number, old in control.items()):
        raise RestoreKVError(
            "The text has control tokens, which this tokenizer cannot spell; take them out."
        )
    return SafeTokenizer(backend, {number: (old, names[old]) for number, old in control.items()})


def _remember(
    memory: WeakKeyDictionary, tokenizer: Tokenizer, make: Callable[[], object]
) -> object:
    """Returns what `make` returned for this tokenizer, unless tokens were added or the template
    changed since.
    """
    state = (len(tokenizer), str(tokenizer.chat_template))
    if memory.get(tokenizer, (None,))[0] != state:
        memory[tokenizer] = state, make()
    return memory[tokenizer][1]


def refuse_control_tokens(
    control: Iterable[str], text: str, what: str = "text", whose: str = "a slow tokenizer"
) -> None:
    """Refuses a text that spells a control token, where it cannot be encoded as characters."""
    if spelled := [each for each in control if each in text]:
        raise RestoreKVError(
            f"The {what} has {spelled[0]}, a control token of {whose}; take it out."
        )
