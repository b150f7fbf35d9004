"""Text to token ids through any chat template.

Only this module renders templates, and only tokenize.py encodes texts. Others know a template only
as text: tokenize.py looks for the control tokens that it writes, channels.py for its channels, and
gguf_tokenizer.py takes one out of a file.

The template is rendered around a mark and split there, as kvpress does. What precedes the mark,
with the text, is the context that is compressed; what follows it closes the user's turn after every
question.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import PurePath

import torch
from jinja2.exceptions import TemplateError
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.errors import RestoreKVError, summarize_error
from restorekv.model.channels import CHANNEL
from restorekv.model.shape import get_vocabulary_size
from restorekv.model.tokenize import (
    check_unicode,
    find_control_tokens,
    refuse_control_tokens,
    tokenize_parts,
    tokenize_text,
)
from restorekv.seal import short_hash
from restorekv.size_limits import AROUND_LETTERS, AROUND_TOKENS

MESSAGE_MARK = "<restorekv-message>"  # where a message's words would be
SYSTEM_MARK = "<restorekv-system>"  # shows whether a template has a place for a system text
DOCUMENT_MARK = "<restorekv-document>"  # where the document would be, before the first question
# For templates that print the date: a cache must not depend on the day on which it was made.
FIXED_DATE = date(2026, 1, 1)
# transformers 5.23 passes only data to templates, not functions, so no argument can override
# strftime_now; its calls are replaced in the template's text.
NOW = re.compile(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""")
# Separates a question from the document, unless the tokenizer's config has another `separator`.
DEFAULT_SEPARATOR = "\n\n"


@dataclass(frozen=True, eq=False)
class Context:
    """A text as the model reads it, and what surrounds every question about it.

    Contexts are compared as objects, because tensors have no single answer to `==`.

    Args:
        ids: (1, S + T): the template's prefix of S tokens, then the text.
        prefix_length: S.
        suffix_ids: (1, P): the ids that follow every question.
        suffix_text: The text of `suffix_ids`.
        separator: What precedes every question.
    """

    ids: Tensor
    prefix_length: int
    suffix_ids: Tensor
    suffix_text: str = ""
    separator: str = ""

    @property
    def text_tokens(self) -> int:
        """T, the tokens of the text itself."""
        return self.ids.shape[-1] - self.prefix_length

    @property
    def num_tokens(self) -> int:
        """S + T, the tokens of prefix and text."""
        return self.ids.shape[-1]


def get_default_separator(tokenizer: Tokenizer) -> str:
    """Return what separates document and question.

    It is `separator` of the tokenizer's config, or a blank line.
    """
    return str(tokenizer.init_kwargs.get("separator", DEFAULT_SEPARATOR))


def make_context(
    tokenizer: Tokenizer, text: str | Sequence[int] | Tensor, separator: str = "", system: str = ""
) -> Context:
    """Return a text as a context: prefix and text are tokenized together, so that tokens at their
    boundary merge as in training.

    Args:
        tokenizer: The model's.
        text: The context as text, or its token ids (T,), which follow the prefix's.
        separator: What precedes every question: nothing unless given, since the questions of
            benchmarks and training data are complete.
        system: The system message before the text; without one, the template may have its own.

    Raises:
        RestoreKVError: The context is empty, or the template does not fit the text.
    """
    # A system message with a control token would end its turn early.
    check_unicode(system)
    refuse_control_tokens(
        find_control_tokens(tokenizer).values(), system, "system message", "the chat template"
    )
    before, after = split_template(tokenizer, system)
    prefix = encode_text(tokenizer, before=before)
    if isinstance(text, str):
        if not text.strip():
            raise RestoreKVError("The context is empty; give a text with at least one word.")
        # The prefix is encoded again with the text, because a token may span the boundary.
        ids = encode_text(tokenizer, text, before)
    else:
        # Ids are taken unchanged: nothing can merge across the boundary.
        ids = torch.cat([prefix, check_token_ids(tokenizer, text)], -1)
    if ids.shape[-1] <= prefix.shape[-1]:
        raise RestoreKVError(
            "The context has no tokens besides the chat template; give a longer text."
        )
    # What follows every question. Readers of cache files refuse more than these limits, so a longer
    # suffix is refused before a file is made.
    suffix = encode_text(tokenizer, after=after)
    if max(len(after), len(separator)) > AROUND_LETTERS or suffix.shape[-1] > AROUND_TOKENS:
        raise RestoreKVError(
            f"The chat template puts {len(separator):,} and {len(after):,} characters around every "
            f"question, and files hold {AROUND_LETTERS:,} characters and {AROUND_TOKENS:,} tokens; "
            "use a shorter template."
        )
    return Context(ids, prefix.shape[-1], suffix, after, separator)


def check_system_message(system: object) -> str:
    """Return a system message, empty for None; refuse what is not a text."""
    if not isinstance(system, str | None):
        raise RestoreKVError(
            f"A system message must be text, not {type(system).__name__}; leave it out for none."
        )
    return system or ""


def check_vocabulary(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse ids that the model has no embeddings for; on a GPU they end the process."""
    vocabulary = get_vocabulary_size(model)
    highest = int(ids.max()) if ids.numel() else 0
    if highest >= vocabulary:
        raise RestoreKVError(
            f"The tokenizer writes token {highest:,}, and the model has tokens 0 to "
            f"{vocabulary - 1:,}; pass the tokenizer that belongs to the model."
        )


def check_token_ids(tokenizer: Tokenizer, ids: Sequence[int] | Tensor) -> Tensor:
    """Return ids (T,) as (1, T) long; refuse what is not a sequence of the tokenizer's ids."""
    if isinstance(ids, list | tuple) and all(type(each) is int for each in ids):
        ids = torch.tensor(ids, dtype=torch.long)
    if isinstance(ids, PurePath):
        raise RestoreKVError(
            "A text is added, not a file; read the file first: "
            f"restorekv.readers.extract.load_document(Path({str(ids)!r}))."
        )
    if isinstance(ids, list | tuple) and all(isinstance(each, str) for each in ids):
        raise RestoreKVError(
            f"The context is one text, not a list of {len(ids)}; pass each by itself, and compose "
            "what was compressed if it belongs together, or join the texts first."
        )
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.is_floating_point() or ids.is_complex():
        raise RestoreKVError(
            f"The context must be text or a 1-D sequence of token ids, not {describe_type(ids)}; "
            f"{_explain_ids(ids)}."
        )
    # Beyond the tokenizer's ids the embeddings have padding, or nothing.
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < len(tokenizer):
        raise RestoreKVError(
            f"Token ids run from 0 to {len(tokenizer) - 1} with this tokenizer; give its own ids."
        )
    return ids.detach().cpu().long()[None]


def encode_question(
    tokenizer: Tokenizer,
    context: Context,
    question: str,
    answer_prefix: str = "",
    empty: bool = False,
) -> Tensor:
    """Return the ids (1, q) of a question with all that surrounds it, tokenized as one text.

    Args:
        tokenizer: The model's.
        context: Its `separator` precedes the question, and its suffix, the template's, follows.
        question: What is asked.
        answer_prefix: The answer's first words, which the model continues.
        empty: Allow an empty question, for a context that ends with what is asked.
    """
    check_question(question, empty)
    if not isinstance(answer_prefix, str):
        raise RestoreKVError(
            f"answer_prefix must be text, not {type(answer_prefix).__name__}; leave it out for "
            "none."
        )
    header = choose_assistant_header(tokenizer, context.suffix_text, answer_prefix)
    return encode_text(
        tokenizer,
        context.separator + question,
        after=header,
        more=answer_prefix,
        continues=True,
    )


def _explain_ids(value: object) -> str:
    """Return, as a clause, how to get a text or token ids from what was passed as a context."""
    if isinstance(value, Tensor):
        if value.dim() == 2 and len(value) == 1:
            return "of a batch of one pass the row: ids[0]"
        return "pass one row of whole numbers"
    # What a tokenizer returns.
    if isinstance(value, Mapping) and "input_ids" in value:
        return 'pass its ids of one text: ["input_ids"], or ["input_ids"][0] of a batch'
    return explain_text(value)


def describe_type(value: object) -> str:
    """Return how a sentence names the type of a value that was passed instead of a text."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, list | tuple) and value:
        return f"a {type(value).__name__} of {type(value[0]).__name__}"
    return "None" if value is None else type(value).__name__


def explain_text(value: object) -> str:
    """Return, as a clause, how to get a text from a value that was passed instead of one."""
    if isinstance(value, list | tuple) and value and not isinstance(value[0], str):
        return explain_text(value[0])
    if isinstance(value, bytes | bytearray):
        return "decode the bytes: value.decode()"
    if isinstance(value, PurePath):
        return f"read the file first: Path({str(value)!r}).read_text()"
    if isinstance(value, Mapping):
        return 'of a message pass the text: message["content"]'
    if callable(getattr(value, "read", None)):
        return "of an open file pass the text: file.read()"
    if isinstance(value, list | tuple | set | frozenset | Iterator):
        return "pass each text by itself"
    return "pass a string"


def check_question(question: object, empty: bool = False) -> None:
    """Refuse what is not a text, and unless allowed, an empty one."""
    if isinstance(question, Mapping):
        raise RestoreKVError(
            "A question must be text, not a message with a role; pass the message's text, or keep "
            "a conversation with chat()."
        )
    if not isinstance(question, str):
        raise RestoreKVError(
            f"A question must be text, not {describe_type(question)}; {explain_text(question)}."
        )
    if not question.strip() and not empty:
        raise RestoreKVError("The question is empty; ask something.")


def hash_template(tokenizer: Tokenizer) -> str:
    """Return 16 hex digits of the template's text around the user's words."""
    return short_hash("\0".join(split_template(tokenizer)))


def split_template(tokenizer: Tokenizer, system: str = "") -> tuple[str, str]:
    """Return the template's text before and after the user's words.

    Without a template, these are BOS, followed by the system message on its own line if there is
    one, and a newline.
    """
    if not tokenizer.chat_template:
        before = str(tokenizer.bos_token or "")
        if system:
            before += f"{system}\n"
        return before, "\n"
    before, after = _render_parts(tokenizer, ["user"], system)
    return before, after


def render_between_turns(tokenizer: Tokenizer) -> str:
    """Return the template's text between an answer and the user's next words.

    Without a template, that is a newline.
    """
    if not tokenizer.chat_template:
        return "\n"
    return _render_parts(tokenizer, ["user", "assistant", "user"])[2]


def find_answer_end(tokenizer: Tokenizer) -> int | None:
    """Return the special token that the chat template writes right after an answer; None if it
    writes none there.

    In templates with channels the token follows every message, thoughts as well, so it does not end
    an answer.
    """
    if not tokenizer.chat_template or CHANNEL in str(tokenizer.chat_template):
        return None
    try:
        after = render_between_turns(tokenizer).lstrip()
    except RestoreKVError:  # the template accepts no earlier answers
        return None
    added = tokenizer.added_tokens_decoder
    for number, token in find_control_tokens(tokenizer).items():
        if added[number].special and after.startswith(token):
            return number
    return None


def choose_assistant_header(tokenizer: Tokenizer, suffix: str, answer_prefix: str) -> str:
    """Return the template's text between a question and its answer, which may have given first
    words.

    A template may leave the last part of this text to the model, as gpt-oss's leaves the channel.
    If the answer's first words are given, that part is needed too. It is taken from what the
    template writes before an earlier answer, if that text has further control tokens.

    Args:
        tokenizer: The model's.
        suffix: What the template writes if the model begins the answer itself.
        answer_prefix: The answer's first words, if any are given.
    """
    if not answer_prefix or not suffix or not tokenizer.chat_template:
        return suffix
    try:
        header = _render_parts(tokenizer, ["user", "assistant", "user"])[1]
    except RestoreKVError:  # the template accepts no earlier answers
        return suffix
    own = header.removeprefix(suffix)
    control = find_control_tokens(tokenizer).values()
    if header.startswith(suffix) and any(token in own for token in control):
        return header
    return suffix


def encode_plain_chat(
    tokenizer: Tokenizer,
    turns: Sequence[tuple[str, str]],
    question: str,
    system: str = "",
    answer_prefix: str = "",
) -> Tensor:
    """Return the ids (q,) of a conversation without a document, as the chat template writes it.

    Args:
        tokenizer: The model's.
        turns: Earlier questions with their answers.
        question: What is asked.
        system: The system message in the template's place for it, or "" for the template's own.
        answer_prefix: What the model is made to begin its answer with.

    Raises:
        RestoreKVError: The question is empty, the template has no place for these messages, or it
            changes one that spells a control token.
    """
    check_question(question)
    texts = []
    for asked, answered in turns:
        check_question(asked, empty=True)  # the assistant may have begun
        texts.extend((asked, answered))
    texts.append(question)
    if tokenizer.chat_template:
        roles = [*("user", "assistant") * len(turns), "user"]
        if system:
            roles.insert(0, "system")
            texts.insert(0, system)
        template, texts = _split_chat(tokenizer, roles, texts)
    else:
        before, after = split_template(tokenizer)
        template = [before, after, *(render_between_turns(tokenizer), after) * len(turns)]
        if system:
            template[:1] = [before, "\n"]
            texts.insert(0, system)
    if answer_prefix:
        template[-1] = choose_assistant_header(tokenizer, template[-1], answer_prefix)
        template.append("")
        texts.append(answer_prefix)
    return torch.tensor(tokenize_parts(tokenizer, template, texts), dtype=torch.long)


def encode_after_document(
    tokenizer: Tokenizer, turns: Sequence[tuple[str, str]], question: str, answer_prefix: str = ""
) -> Tensor:
    """Return the ids (1, q) of what follows a document in a conversation.

    The text is as the chat template writes it, which may put other words before an earlier answer
    than before the next one, and may drop an earlier answer's thoughts.

    Args:
        tokenizer: The model's.
        turns: Earlier questions with their answers. The first question is in one message with the
            document, and begins with what separates them.
        question: What is asked.
        answer_prefix: What the model is made to begin its answer with.

    Raises:
        RestoreKVError: The template has no place for these messages, or it changes one that spells
            a control token.
    """
    texts = []
    for asked, answered in turns:
        texts.extend((asked, answered))
    texts.append(question)
    if tokenizer.chat_template:
        roles = [*("user", "assistant") * len(turns), "user"]
        # The mark keeps the white space between the document and the first question.
        template, texts = _split_chat(tokenizer, roles, [DOCUMENT_MARK + texts[0], *texts[1:]])
    else:
        texts[0] = DOCUMENT_MARK + texts[0]
        template = ["", "\n", *("\n", "\n") * len(turns)]
    if DOCUMENT_MARK in template[0]:  # `_split_chat` counts the whole text as the template's
        template[0] = template[0].partition(DOCUMENT_MARK)[2]
    else:
        template[0] = ""
        texts[0] = texts[0].removeprefix(DOCUMENT_MARK)
    template[-1] = choose_assistant_header(tokenizer, template[-1], answer_prefix)
    ids = tokenize_parts(tokenizer, [*template, ""], [*texts, answer_prefix], continues=True)
    return torch.tensor([ids], dtype=torch.long)


def _split_chat(
    tokenizer: Tokenizer, roles: Sequence[str], texts: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the parts of a conversation that the chat template itself writes, and the texts
    between them.

    A template may change texts: many trim them, and some drop the thoughts of earlier turns. Put
    together, the result is what the template makes of the messages.

    Args:
        tokenizer: The model's.
        roles: Whose messages they are.
        texts: What the messages say.

    Raises:
        RestoreKVError: The template has no place for these messages, or its own text cannot be
            distinguished from a message that spells a control token.
    """
    parts = _render_parts(tokenizer, roles)
    messages = []
    for role, text in zip(roles, texts, strict=True):
        messages.append({"role": role, "content": text})
    whole = _render_messages(tokenizer, messages)
    written = _find_texts(parts, whole, texts)
    if written is not None:
        return parts, written
    # The template wrote something else for these texts. All of it counts as the template's, which
    # is safe if no text spells a control token.
    refuse_control_tokens(
        find_control_tokens(tokenizer).values(),
        "\n".join(texts),
        "conversation",
        "the chat template, which changes the message",
    )
    return [whole, ""], [""]


def _find_texts(parts: Sequence[str], whole: str, texts: Sequence[str]) -> list[str] | None:
    """Return the texts as a template wrote them: each unchanged, without spaces at its ends, or a
    part of it; None if it wrote something else for any of them.

    Args:
        parts: The template's text around and between messages.
        whole: The template's text of the messages.
        texts: What the messages say.
    """
    offset = len(parts[0])
    if not whole.startswith(parts[0]):
        return None
    written = []
    for text, part in zip(texts, parts[1:], strict=True):
        for candidate in (text, text.strip()):
            # The whole text is tried first: it may itself spell what the template writes after it.
            if whole.startswith(candidate + part, offset):
                break
        else:
            end = whole.find(part, offset)
            candidate = whole[offset:end]
            if end < 0 or candidate not in text:
                return None
        written.append(candidate)
        offset += len(candidate) + len(part)
    return written if offset == len(whole) else None


def encode_whole_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a prompt that is all the model reads, as the tokenizer itself makes them:
    with its start token, and with control tokens where the text spells them.
    """
    return tokenizer(text).input_ids


def _render_parts(tokenizer: Tokenizer, roles: Sequence[str], system: str = "") -> list[str]:
    """Return the template's text around and between messages of these roles.

    A system message, if given, precedes them and is part of the first text.
    """
    # Every message is the mark, so the number of parts shows whether one was dropped or repeated.
    messages = [{"role": role, "content": MESSAGE_MARK} for role in roles]
    introduction = [{"role": "system", "content": system}] if system else []
    # As many parts as messages, plus what precedes the first.
    parts = _render_messages(tokenizer, [*introduction, *messages]).split(MESSAGE_MARK)
    if len(parts) <= len(roles):
        raise RestoreKVError(
            "The tokenizer's chat template drops the user's words; use a different tokenizer."
        )
    has_place = True
    if system:
        # Finding the system text itself is not enough: a template contains words such as "user".
        marked = [{"role": "system", "content": SYSTEM_MARK}, *messages]
        has_place = (
            SYSTEM_MARK in _render_messages(tokenizer, marked).split(MESSAGE_MARK)[0]
            and system.strip() in parts[0]
        )
    if len(parts) > len(roles) + 1 or not has_place:
        raise RestoreKVError(
            "The tokenizer's chat template has no place for these messages; "
            "leave the system text out."
        )
    return parts


def _render_messages(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """Return the template's text of messages, up to where the answer begins."""
    try:
        own = tokenizer.get_chat_template()
    except ValueError:  # there are several, and none of them is called "default"
        raise RestoreKVError(
            "The tokenizer has several chat templates and none is its default; set "
            "tokenizer.chat_template to the text of one of them."
        ) from None
    # Templates that print today's date would make a cache stale tomorrow.
    template = NOW.sub(lambda call: repr(FIXED_DATE.strftime(call[2])), own)
    try:
        text = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # a template without thinking ignores it
        )
    except TemplateError as error:
        raise RestoreKVError(
            f"The tokenizer's chat template refuses these messages: {error}"
        ) from None
    except Exception as error:  # a template is a program, which may add a text to a list
        raise RestoreKVError(
            f"The tokenizer's chat template fails for these messages ({summarize_error(error)}); "
            "set tokenizer.chat_template to a different one."
        ) from error
    assert isinstance(text, str)  # not ids, because of tokenize=False
    return text


def encode_text(
    tokenizer: Tokenizer,
    text: str = "",
    before: str = "",
    after: str = "",
    more: str = "",
    continues: bool = False,
) -> Tensor:
    """Return the ids of `tokenize_text` as a tensor (1, length) int64.

    Args:
        tokenizer: The model's.
        text: The user's words.
        before: The template's text before them.
        after: The template's text after them.
        more: The first words of the answer.
        continues: Whether all of it follows a text that has its ids already.
    """
    ids = tokenize_text(tokenizer, text, before, after, more, continues)
    return torch.tensor([ids], dtype=torch.long)
