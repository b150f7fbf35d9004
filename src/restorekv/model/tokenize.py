"""Text to token ids and back. Text is text: only the chat template writes control tokens, and those
that a user's text spells are encoded as characters.

Control tokens are the special ones and those added tokens with punctuation that the chat template
names, such as `<think>`. Other added tokens, such as runs of spaces, are vocabulary. Text without
control tokens goes to the tokenizer as it is. Other text goes to a copy of the tokenizer in which
control tokens have names that no text can spell. Two simpler ways fail: `split_special_tokens` also
splits the template's control tokens, keeps `<think>`, and finds `</s>` among the words of a Unigram
model; encoding the pieces between control tokens one by one adds a space to each of them with
Llama's first tokenizer.
"""

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import tokenizers
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError, warn
from restorekv.model.shape import get_vocabulary_size, refuse_default_device
from restorekv.seal import short_hash

MAX_EMBEDDINGS_PER_TOKEN = 2  # embeddings that a model has at most for each token of its tokenizer
REPLACEMENT = "\ufffd"  # of bytes that make no character
MAX_TOKENS_PER_CHARACTER = 8  # at most, of one character
# Texts to encode before another one, tried in this order until no token spans both.
ANCHORS = ("\n", "x", ".", "0")

Remembered = TypeVar("Remembered")
# What is remembered of each tokenizer, with the state that the tokenizer had then.
Memory = WeakKeyDictionary[Tokenizer, tuple[tuple, Remembered]]
_SAFE_TOKENIZERS: "Memory[SafeTokenizer]" = WeakKeyDictionary()
_CONTROL_TOKENS: Memory[dict[int, str]] = WeakKeyDictionary()
_ADDS_SPACE: Memory[bool] = WeakKeyDictionary()
_TEXT_START_IDS: Memory[list[int]] = WeakKeyDictionary()
_BYTE_IDS: Memory[frozenset[int]] = WeakKeyDictionary()
_SPECIAL_IDS: Memory[frozenset[int]] = WeakKeyDictionary()


def check_model_and_tokenizer(model: object, tokenizer: object) -> None:
    """Refuse anything but a model and a tokenizer, in this order, and the processor of a model that
    also takes images, which holds the tokenizer.
    """
    # Importing its module loads code for images and sounds. Whoever has a processor has done so.
    module = sys.modules.get("transformers.processing_utils")
    if module is not None and isinstance(tokenizer, module.ProcessorMixin):
        raise RestoreKVError(
            f"A tokenizer is needed, not a {type(tokenizer).__name__}; "
            "pass processor.tokenizer, or what AutoTokenizer.from_pretrained loads."
        )
    # A wrapper may pass on only the config, as trl's model with a value head does.
    is_model = hasattr(model, "config") and hasattr(model, "get_input_embeddings")
    if not is_model or not hasattr(tokenizer, "init_kwargs"):
        raise RestoreKVError(
            "Pass first a model of transformers, then its tokenizer, not "
            f"{type(model).__name__} and {type(tokenizer).__name__}; load both with "
            "AutoModelForCausalLM and AutoTokenizer, or with load_model."
        )
    refuse_default_device()
    find_control_tokens(cast("Tokenizer", tokenizer))  # refuses one that does not name them
    # Tokens that were added may be more than the model has; those of the vocabulary itself may not.
    model_size = get_vocabulary_size(cast("PreTrainedModel", model))
    tokenizer_size = cast("Tokenizer", tokenizer).vocab_size
    if tokenizer_size > model_size:
        raise RestoreKVError(
            f"The tokenizer has {tokenizer_size:,} tokens and the model {model_size:,}; pass the "
            "tokenizer that belongs to the model."
        )
    # Models pad their embeddings, usually by a few hundred rows. More is not an error: a model of
    # random weights may have any tokenizer, as in the benchmarks.
    whole_size = len(cast("Tokenizer", tokenizer))
    if model_size > MAX_EMBEDDINGS_PER_TOKEN * whole_size:
        warn(
            f"The tokenizer has {whole_size:,} tokens and the model {model_size:,}; answers make "
            "no sense unless it is the tokenizer that the model was trained with."
        )


def hash_token_names(tokenizer: Tokenizer, ids: Tensor) -> str:
    """Return 16 hex digits of what the tokenizer calls the ids of a text.

    Two tokenizers that agree on it read the text alike. Tokens that the text does not have are left
    out, so that one which was added later changes nothing.
    """
    names = tokenizer.convert_ids_to_tokens(ids.unique().tolist())
    return short_hash("\0".join(map(str, names)))


def tokenize_text(
    tokenizer: Tokenizer,
    text: str,
    before: str = "",
    after: str = "",
    more: str = "",
    continues: bool = False,
) -> list[int]:
    """Return the ids of before + text + after + more, tokenized as one, without BOS and EOS.

    Args:
        tokenizer: Any tokenizer; only fast ones can encode a control token as characters.
        text: The user's, such as a context or a question.
        before: The template's, before the text.
        after: The template's, after the text.
        more: The user's again, such as the first words of an answer.
        continues: Whether all of it follows another text, as in `tokenize_parts`.

    Raises:
        RestoreKVError: The user's text spells a control token and the tokenizer is a slow one.
    """
    return tokenize_parts(tokenizer, [before, after, ""], [text, more], continues)


def tokenize_parts(
    tokenizer: Tokenizer, template: Sequence[str], texts: Sequence[str], continues: bool = False
) -> list[int]:
    """Return the ids of template[0] + texts[0] + template[1] + ..., tokenized as one text.

    Args:
        tokenizer: Any tokenizer; only fast ones can encode a control token as characters.
        template: What the chat template writes, which begins and ends the whole.
        texts: What users write between its parts, one fewer.
        continues: Whether the whole follows a text that has its ids already, so that the space
            which many tokenizers put before a text is left out.

    Returns:
        The ids, without BOS and EOS.

    Raises:
        RestoreKVError: A user's text spells a control token and the tokenizer is a slow one.
    """
    check_unicode("".join(texts))
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    continues = continues and _adds_space(tokenizer)
    ids = _encode_piece(encode, _interleave(template, texts), continues)
    control = find_control_tokens(tokenizer)
    # The control tokens that the template itself writes, in their order.
    by_part = []
    of_template = []
    for part in template:
        own = _pick_control_ids(tokenizer.encode(part, add_special_tokens=False), control)
        by_part.append(own)
        of_template.extend(own)
    if _pick_control_ids(ids, control) == of_template:
        return ids  # all control tokens are the template's
    # The user's text spells a control token. A fast tokenizer encodes it as characters.
    safe = get_safe_tokenizer(tokenizer)
    if safe is not None:
        escaped = []
        for part, own in zip(template, by_part, strict=True):
            escaped.append(safe.escape_control_tokens(part, own))
        return _encode_piece(safe.encode, _interleave(escaped, texts), continues)
    refuse_control_tokens(control.values(), "".join(texts))
    # No control token is spelled: a character is unknown, and the unknown token is a control token.
    return ids


def _interleave(template: Sequence[str], texts: Sequence[str]) -> str:
    """Return the parts of a template with the texts between them."""
    whole = template[0]
    for text, part in zip(texts, template[1:], strict=True):
        whole += text + part
    return whole


def _encode_piece(encode: Callable[[str], list[int]], text: str, continues: bool) -> list[int]:
    """Return the ids of a text that stands alone or continues another one."""
    if continues:
        for anchor in ANCHORS:
            before = encode(anchor)
            ids = encode(anchor + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
    # No anchor stays apart from the text, which then begins as one that stands alone.
    return encode(text)


def _adds_space(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer puts a space before a text unless it continues another one, as
    those of Llama 2, Mistral and T5 do.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False, verbose=False)

    def find() -> bool:
        return _encode_piece(encode, "\n", True) != encode("\n")

    return _remember(_ADDS_SPACE, tokenizer, find)


def locate_tokens(tokenizer: Tokenizer, text: str) -> list[tuple[int, int]]:
    """Return where each token of a user's text starts and ends in it, in characters."""
    if not tokenizer.is_fast:
        raise RestoreKVError(
            "Cutting texts needs a tokenizer that maps tokens to characters; use a fast tokenizer."
        )
    check_unicode(text)
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    # A text that spells a control token has other tokens here than in `tokenize_text`.
    if _pick_control_ids(found["input_ids"], find_control_tokens(tokenizer)):
        safe = get_safe_tokenizer(tokenizer)
        if safe is not None:
            return safe.backend.encode(text, add_special_tokens=False).offsets
    return found["offset_mapping"]


class TextStream:
    """The text of ids that come one by one, without decoding it from its start for every id.

    `ids` are all ids so far. The slow way, which decodes all of them each time, remains for
    tokenizers that are not fast or change the text after decoding, and for answers with text that
    changes as it grows: that happens if tokens are bytes that do not make characters. A text that
    `continues` another one keeps its first space.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, continues: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.ids: list[int] = []
        self.decoded = ""  # the text up to the last id with which all its characters were whole
        self.start = 0  # characters at its start that are not of this text
        self.pending = False  # whether ids after `decoded` have added nothing to it yet
        self.settled_end = 0  # where what no later id can change ends in `decoded`
        self.stream: DecodeStream | None = None
        if _can_stream(tokenizer):
            self.stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        if continues:
            for token in find_text_start(tokenizer):
                self.push(token)
            self.start = len(self.decoded)

    @property
    def whole_text(self) -> str:
        """The text up to the last id with which all its characters were whole."""
        return self.decoded[self.start :]

    @property
    def settled(self) -> str:
        """The text that no later id can change. After a token for a byte it ends where the run of
        such tokens began: one byte that fits no character would make replacements of all of them.
        """
        return self.decoded[self.start : self.settled_end]

    def push(self, token: int) -> str:
        """Add an id and return the text so far, without an incomplete character at its end."""
        self.ids.append(token)
        if self.stream is not None:
            self._step(self.stream, token)
        # Not "else": a step may have given up the stream.
        if self.stream is None:
            text = self._decode_all()
            self.pending = text.endswith(REPLACEMENT)
            if not self.pending:
                self.decoded = text
        if not self._byte_ids or not self._may_be_in_bytes(token):
            self.settled_end = len(self.decoded)
        return self.whole_text

    @cached_property
    def _byte_ids(self) -> frozenset[int]:
        return find_byte_ids(self.tokenizer)

    @cached_property
    def _left_out_ids(self) -> frozenset[int]:
        """The special tokens, if decoding leaves them out."""
        return _find_special_ids(self.tokenizer) if self.skip_special_tokens else frozenset()

    def _may_be_in_bytes(self, token: int) -> bool:
        """Return whether a run of tokens for bytes may go on after this id: it is one of them, or
        decoding leaves it out.
        """
        if token in self._byte_ids or token in self._left_out_ids:
            return True
        backend: Any = self.tokenizer.backend_tokenizer
        return backend.id_to_token(token) is None

    def _step(self, stream: DecodeStream, token: int) -> None:
        """Add what this id adds to the text according to the library's stream.

        Give up the stream for good if that does not make the whole text.
        """
        try:
            backend: Any = self.tokenizer.backend_tokenizer
            piece = stream.step(backend, token)
        except Exception:  # it has no narrower type: the text no longer begins as it did before
            self.stream = None
            return
        # A step gives no piece while bytes of a character are missing.
        self.decoded += piece or ""
        self.pending = piece is None
        # A wrong byte can turn the characters before it, which the stream has already passed, into
        # replacements.
        if piece and REPLACEMENT in piece and self.decoded != self._decode_all():
            self.stream = None

    def get_text(self) -> str:
        """Return the text of all ids, exactly as the tokenizer decodes them."""
        return self._decode_all()[self.start :] if self.pending else self.whole_text

    def _decode_all(self) -> str:
        return str(self.tokenizer.decode(self.ids, skip_special_tokens=self.skip_special_tokens))


def _can_stream(tokenizer: Tokenizer) -> bool:
    """Return whether `decode` is the tokenizers library's own and leaves its text unchanged."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.decode is PreTrainedTokenizerFast.decode
        and kind._decode is PreTrainedTokenizerFast._decode
        and not tokenizer.clean_up_tokenization_spaces
    )


def find_byte_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of tokens such as <0xF0> for a byte, if the tokenizer decodes a run of them as
    a whole (byte fallback).
    """

    def find() -> frozenset[int]:
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or backend.decoder is None:
            return frozenset()
        # Pickled, a decoder is the JSON of tokenizer.json.
        if b'"ByteFallback"' not in backend.decoder.__getstate__():
            return frozenset()
        ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(each for each in ids if each is not None)

    return _remember(_BYTE_IDS, tokenizer, find)


def _find_special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that a fast tokenizer leaves out if it decodes without special tokens."""

    def find() -> frozenset[int]:
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        added = backend.get_added_tokens_decoder()
        return frozenset(each for each, token in added.items() if token.special)

    return _remember(_SPECIAL_IDS, tokenizer, find)


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
    """Return the text of token ids."""
    # For the ids of one text, `decode` returns a string; its annotation covers batches, too.
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def decode_continuation(
    tokenizer: Tokenizer, ids: Sequence[int], skip_special_tokens: bool = True
) -> str:
    """Return the text of ids that follow others, with its first space."""
    before = find_text_start(tokenizer)
    start = len(decode_ids(tokenizer, before, skip_special_tokens))
    return decode_ids(tokenizer, [*before, *ids], skip_special_tokens)[start:]


def decode_token(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one id as inside a longer text, with the space before it; a control token
    gives its name.
    """
    return decode_continuation(tokenizer, [token], skip_special_tokens=False)


def find_text_start(tokenizer: Tokenizer) -> list[int]:
    """Return ids to decode before others, so that these keep the space at their start.

    Tokenizers such as Llama 2's drop a space at the start of what they decode. Other tokenizers
    need no ids.
    """

    def find() -> list[int]:
        ids: list[int] = tokenizer.encode("x", add_special_tokens=False)
        spaced: list[int] = tokenizer.encode("x x", add_special_tokens=False)
        follows = decode_ids(tokenizer, spaced).removeprefix(decode_ids(tokenizer, ids))
        return [] if decode_ids(tokenizer, spaced[len(ids) :]) == follows else ids

    return _remember(_TEXT_START_IDS, tokenizer, find)


@lru_cache(maxsize=8)
def split_into_pieces(tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[tuple[str, int]]:
    """Return (text, 1) for each token, or (text, n) for n that only together make characters."""
    pieces: list[tuple[str, int]] = []
    # Decoding begins one piece early, which keeps the space between words.
    before = 0
    start = 0
    for end in range(1, len(ids) + 1):
        known = decode_ids(tokenizer, ids[before:start])
        text = decode_ids(tokenizer, ids[before:end])
        is_broken = text.endswith(REPLACEMENT) and end < len(ids)
        if is_broken and end - start < MAX_TOKENS_PER_CHARACTER:
            continue
        piece = text.removeprefix(known)
        if not text.startswith(known):  # the tokenizer cleans spaces: it changed an earlier one
            piece = decode_ids(tokenizer, ids[start:end])
        pieces.append((piece, end - start))
        before = start
        start = end
    return pieces


def get_padding_id(tokenizer: Tokenizer) -> int:
    """Return the id that pads, or 0 for a tokenizer without one."""
    padding = tokenizer.pad_token_id
    return padding if isinstance(padding, int) else 0


def check_unicode(text: str) -> None:
    """Refuse half a character, which bytes that are not UTF-8 become on a command line."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RestoreKVError(
            f"The text is not Unicode at character {error.start + 1}; convert it to UTF-8."
        ) from None


def _pick_control_ids(ids: Iterable[int], control: dict[int, str]) -> list[int]:
    """Return those ids that are control tokens, in their order."""
    return [each for each in ids if each in control]


def find_control_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the control tokens by their ids."""

    def find() -> dict[int, str]:
        template = str(tokenizer.chat_template)
        try:
            added = tokenizer.added_tokens_decoder
        except NotImplementedError:  # that of mistral_common, which has no chat template either
            raise RestoreKVError(
                f"A {type(tokenizer).__name__} has no chat template and does not name its control "
                "tokens; load the model's other tokenizer, by AutoTokenizer with "
                "mistral_format=False."
            ) from None
        found = {}
        for number, token in added.items():
            has_punctuation = re.search(r"[^\w\s]", token.content)
            if token.special or (has_punctuation and token.content in template):
                found[number] = token.content
        return found

    return _remember(_CONTROL_TOKENS, tokenizer, find)


@dataclass(frozen=True)
class SafeTokenizer:
    """A copy of a tokenizer with the same ids, whose control tokens have secret names."""

    backend: tokenizers.Tokenizer
    names: dict[int, tuple[str, str]]  # the usual name and the secret one

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text whose control tokens have their secret names."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def escape_control_tokens(self, text: str, ids: Iterable[int]) -> str:
        """Return a text of the template with the secret names of its control tokens.

        `ids` are the control tokens that the tokenizer finds in the text. It misses some, because a
        normalizer that prepends a space to every text does so to a token's name, too.
        """
        # Longer names first, since one may begin with another.
        names = dict(sorted((self.names[each] for each in ids), key=lambda pair: -len(pair[0])))
        if not names:
            return text
        return re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], text)


def get_safe_tokenizer(tokenizer: Tokenizer) -> SafeTokenizer | None:
    """Return the tokenizer's safe copy, which is made once; None for a slow tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    return _remember(_SAFE_TOKENIZERS, tokenizer, lambda: _make_safe_tokenizer(tokenizer))


def _make_safe_tokenizer(tokenizer: Tokenizer) -> SafeTokenizer:
    """Make the safe copy of a tokenizer.

    Neither the splitter nor the model may find an old name of a control token, so added tokens and
    words are renamed, and merges of an old name are left out.
    """
    control = find_control_tokens(tokenizer)
    # Names that no text can spell, drawn for this copy alone.
    names = {old: f"control{secrets.token_hex(16)}" for old in control.values()}
    own: Any = tokenizer.backend_tokenizer
    parts = json.loads(own.to_str())
    # These would add tokens or remove some.
    parts.update(truncation=None, padding=None, post_processor=None)
    for token in parts["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = parts["model"]
    words = model["vocab"]
    if isinstance(words, dict):
        model["vocab"] = {names.get(word, word): number for word, number in words.items()}
    else:
        model["vocab"] = [[names.get(word, word), *score] for word, *score in words]
    # A merge of an old name would make the control token again.
    if "merges" in model:
        merges = []
        for pair in model["merges"]:
            if not {*pair, "".join(pair)} & names.keys():
                merges.append(pair)
        model["merges"] = merges
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    backend = tokenizers.Tokenizer.from_str(json.dumps(parts))
    # Every secret name must have the id of the token that it replaces.
    if any(backend.token_to_id(names[old]) != number for number, old in control.items()):
        raise RestoreKVError(
            "The text has control tokens, which this tokenizer cannot spell; take them out."
        )
    return SafeTokenizer(backend, {number: (old, names[old]) for number, old in control.items()})


def _remember(
    memory: Memory[Remembered], tokenizer: Tokenizer, make: Callable[[], Remembered]
) -> Remembered:
    """Return what `make` returned for this tokenizer.

    It is made again if tokens were added or the template changed since.
    """
    # A token added later, or a different template, changes which names are control tokens.
    state = (len(tokenizer), str(tokenizer.chat_template))
    known = memory.get(tokenizer)
    if known is None or known[0] != state:
        known = state, make()
        memory[tokenizer] = known
    return known[1]


def refuse_control_tokens(
    control: Iterable[str], text: str, what: str = "text", whose: str = "a slow tokenizer"
) -> None:
    """Refuse a text that spells a control token, if the token cannot be encoded as characters."""
    if spelled := [each for each in control if each in text]:
        raise RestoreKVError(
            f"The {what} has {spelled[0]}, a control token of {whose}; take it out."
        )
