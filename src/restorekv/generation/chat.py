"""Conversations over a compressed context: the turns stay in the dense tail, and no token is read
twice.

The tail holds what the chat template makes of the whole conversation: the document and the first
question are the user's first message, and later turns follow as they were read and written. Some
templates change earlier turns later on, for example drop their thoughts; here they stay unchanged.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, Self, Unpack, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.cache.ragged import RaggedCache
from restorekv.errors import CacheFileError, RestoreKVError
from restorekv.files import (
    START_BYTES,
    check_replaceable,
    matches_type,
    open_with_size,
    parse_path,
    read_json,
    write_json,
)
from restorekv.generation import decoding
from restorekv.generation.answers import (
    Answer,
    make_answer,
    refuse_other_eos,
    stream_text,
    warn_about_truncated_output,
    warn_about_unused_options,
)
from restorekv.generation.constraint import Constraint
from restorekv.generation.repetition import DEFAULT_REPEATS, drop_repetition
from restorekv.generation.sampling import (
    DEFAULT_MAX_NEW_TOKENS,
    SamplingConfig,
    SamplingOptions,
    TokenSampler,
    any_begins_with_space,
    find_first_stop,
    take_limit,
)
from restorekv.model.channels import find_shown_ids
from restorekv.model.position_limits import check_positions, refuse_beyond_positions
from restorekv.model.prefill import prefill
from restorekv.model.prompt import (
    Context,
    check_question,
    check_system_message,
    check_vocabulary,
    choose_assistant_header,
    encode_after_document,
    encode_text,
    render_between_turns,
)
from restorekv.model.rope import count_positions
from restorekv.model.shape import get_vocabulary_size
from restorekv.model.support import refuse_beyond_exact, refuse_cast_model
from restorekv.model.tokenize import decode_continuation, decode_ids
from restorekv.size_limits import POSITIONS, SYSTEM_LETTERS

FORMAT = "restorekv-chat"
KIND_NAME = "a conversation of restorekv"
VERSION = 1
PARAGRAPH = "\n\n"  # between a system message and the question, if the context has no separator
# The entries of a turn in a file, with their types.
SAVED = {
    "question": str,
    "answer": str,
    "read": list[int],
    "written": list[int],
    "finish": Literal["stop", "length", "repetition"],
}


class ChatContext(Protocol):
    """The interface of a context that a conversation is held over, such as `CompressedContext`."""

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def context(self) -> Context: ...

    @property
    def cache(self) -> RaggedCache: ...

    @property
    def manifest(self) -> Any:
        """The record of the cache; its `system` and `dtype` are read."""

    @property
    def digest(self) -> str:
        """16 hex digits that identify the contents."""
        ...

    def append_ids(
        self,
        ids: Tensor,
        restore: str = ...,
        adapter: Any = ...,
        evictor: str | None = ...,
        separator: str | None = ...,
        fix: str = ...,
    ) -> ChatContext:
        """Return this context with the tokens `ids` (1, t) appended."""
        ...


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Args:
        question: The text of the question.
        answer: The answer.
        prompt_ids: The ids that the model read for this turn: template and question.
        answer_ids: The ids of the answer that the conversation keeps, which are those of its text.
            The last one has no column in the cache yet: the model reads it with the next turn.
        seconds: Seconds to the first token of the answer and to the last.
    """

    question: str
    answer: Answer
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    seconds: tuple[float, float] = (0.0, 0.0)


@dataclass(eq=False)
class Chat:
    """A conversation over `document`. `system` is a system message that comes once, between the
    text and the first question.

    A system message in its usual place, before the text, is compressed with the text: pass
    `CompressionConfig(system=...)` to `compress`.
    """

    document: ChatContext
    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    folded: int = 0  # turns that are part of the document by now

    def __post_init__(self) -> None:
        self.system = check_system_message(self.system)
        self.cache = self.document.cache.fork()
        self.running = threading.Lock()

    @overload
    def ask(
        self,
        question: str,
        max_new_tokens: int = ...,
        *,
        stream: Literal[True],
        **options: Unpack[SamplingOptions],
    ) -> Iterator[str]: ...

    @overload
    def ask(
        self,
        question: str,
        max_new_tokens: int = ...,
        *,
        stream: Literal[False] = ...,
        details: Literal[False] = ...,
        **options: Unpack[SamplingOptions],
    ) -> str: ...

    @overload
    def ask(
        self,
        question: str,
        max_new_tokens: int = ...,
        *,
        stream: Literal[False] = ...,
        details: Literal[True],
        **options: Unpack[SamplingOptions],
    ) -> Answer: ...

    def ask(
        self,
        question: str,
        max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
        *,
        stream: bool = False,
        details: bool = False,
        **options: Any,
    ) -> str | Answer | Iterator[str]:
        """Answer a question, and remember both.

        After an error, or when the iterator is closed early, the conversation is as it was before
        the turn. Only one turn can be written at a time.

        Args:
            question: The user's next message.
            max_new_tokens: How many tokens the answer may have. OpenAI's name for it, `max_tokens`,
                works too.
            stream: Return the pieces of the answer as they are written.
            details: Return an `Answer`, with ids and log-probabilities.
            **options: How tokens are chosen: the fields of `SamplingConfig` except `samples`, or
                `config`, a `SamplingConfig` or transformers' `GenerationConfig`. Without a
                `SamplingConfig`, `stop_repeats` is 3 unless given.

        Returns:
            The answer, or an iterator over its pieces.
        """
        if isinstance(question, list | tuple):
            raise RestoreKVError(
                "A conversation takes one question a turn, not a list; call ask once for each, or "
                "ask the compressed context, which answers a list in one batch."
            )
        max_new_tokens = take_limit(options, max_new_tokens)
        # If a repetition stays in the conversation, the model reads it and then continues it.
        has_config = isinstance(options.get("config"), SamplingConfig)
        if not has_config and options.get("stop_repeats") is None:
            options["stop_repeats"] = DEFAULT_REPEATS
        sampling = SamplingConfig.make(**options)
        document = self.document
        refuse_cast_model(document.model, document.manifest.dtype)
        refuse_other_eos(options.get("config"), document.model, document.tokenizer)
        if stream and details:
            raise RestoreKVError(
                "Only the text of an answer can be streamed; leave out stream or details."
            )
        if sampling.samples > 1:
            raise RestoreKVError(
                "A conversation has one answer to a question; fork it for several."
            )
        (limit,) = decoding.parse_limits([max_new_tokens], 1)
        self.question_ids(question)  # refuses a wrong one now, not when the first piece is wanted
        stop_ids = decoding.get_stop_ids(document.model, document.tokenizer)
        constraint = Constraint.make(
            document.tokenizer, sampling.json_schema, sampling.regex, stop_ids
        )
        warn_about_unused_options(document.model, sampling, details or stream)
        # Nothing runs before the first piece is taken: this is a generator.
        pieces = self._generate_or_undo(question, limit, sampling, stop_ids, constraint)
        if stream:
            return pieces
        # Without streaming the pieces are not wanted, only the turn that they end in.
        for _ in pieces:
            pass
        answer = self.turns[-1].answer
        return answer if details else answer.text

    async def ask_async(
        self, question: str, max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS, **options: Any
    ) -> Any:
        """Answer as `ask` does while other tasks of the event loop continue.

        If the task is cancelled, the conversation is as it was before the turn.
        """
        if options.get("stream"):
            raise RestoreKVError(
                "Use ask with stream=True in a thread to get the pieces of an answer."
            )
        return await decoding.run_in_thread(partial(self.ask, question, max_new_tokens, **options))

    @contextmanager
    def _hold_turn(self) -> Iterator[None]:
        """Let the block change the conversation; refuse while a turn is being written."""
        if not self.running.acquire(blocking=False):
            raise RestoreKVError(
                "Another turn of this conversation is still being written, by another thread or by "
                "a stream that was not read to its end; wait for it or close the stream, and give "
                "every thread a conversation of its own: chat.fork() before the turn, or another "
                "chat() of the context."
            )
        try:
            yield
        finally:
            self.running.release()

    def _generate_or_undo(
        self,
        question: str,
        limit: int,
        sampling: SamplingConfig,
        stop_ids: set[int],
        constraint: Constraint | None,
    ) -> Iterator[str]:
        """Yield the pieces of an answer and add the turn at the end; on error, or if the caller
        leaves the iterator, the conversation is as it was before.
        """
        with self._hold_turn():
            columns = self.columns
            states = [layer.copy() for layer in self.cache.with_states]
            try:
                yield from self._generate_turn(question, limit, sampling, stop_ids, constraint)
            # Includes Ctrl-C, and GeneratorExit if the caller drops the iterator.
            except BaseException:
                self._crop_tails(columns)
                for layer, before in zip(self.cache.with_states, states, strict=True):
                    layer.copy_from(before)
                raise

    def _generate_turn(
        self,
        question: str,
        limit: int,
        sampling: SamplingConfig,
        stop_ids: set[int],
        constraint: Constraint | None,
    ) -> Iterator[str]:
        """Generate one turn. On error the partial turn stays; the caller rolls it back."""
        document = self.document
        tokenizer = document.tokenizer
        ids = self.question_ids(question)
        check_vocabulary(document.model, torch.tensor(ids))
        seen = self.cache.get_seq_length() + len(ids)
        refuse_beyond_positions(
            document.model, seen, "The conversation", "fold it first, or begin a new one"
        )
        refuse_beyond_exact(
            document.model, seen + limit, "The conversation with the longest answer allowed"
        )
        sampler = None
        if not sampling.plain:
            # Penalties count the tokens of the whole conversation, including the document.
            read = torch.cat([document.context.ids, torch.tensor([[*self.ids(), *ids]])], -1)
            sampler = TokenSampler(sampling, tokenizer, read, sampling.seed, constraint)
        start = time.perf_counter()
        prompts = decoding.pad_prompts(document.model, [self.cache], [torch.tensor(ids)])
        samplers = [sampler] if sampler else None
        steps = decoding.decode_batch(
            document.model, self.cache, prompts, [limit], stop_ids, samplers=samplers
        )
        written: list[int] = []
        times: list[float] = []

        def record_tokens() -> Iterator[int]:
            for _, token in steps:
                times.append(time.perf_counter() - start)
                written.append(token)
                yield token

        tokens = record_tokens()
        if sampling.copies:
            tokens = drop_repetition(tokens, tokenizer, sampling.copies)
        yield from stream_text(tokenizer, tokens, stop_ids, sampling)
        check_positions(document.model, self.cache.get_seq_length(), "The conversation")
        answer = make_answer(tokenizer, written, stop_ids, len(ids), sampler)
        turn = Turn(question, answer, tuple(ids), answer.ids, (times[0], times[-1]))
        turn = self._drop_cut_tokens(turn, stop_ids, sampling, sampler)
        # Before the turn is remembered: a warning may be raised as an error.
        warn_about_truncated_output([answer], sampling)
        self.turns.append(turn)

    def _drop_cut_tokens(
        self, turn: Turn, stop_ids: set[int], sampling: SamplingConfig, sampler: TokenSampler | None
    ) -> Turn:
        """Return a turn without the tokens that its answer's text leaves out, which belong to a
        stop string or a repetition. The cache drops them too, so that the next turn does not read
        them.

        Args:
            turn: The turn with all that was written; its last id has no column yet.
            stop_ids: The EOS ids.
            sampling: How the tokens were chosen.
            sampler: What chose them; None if the likeliest ones were taken.
        """
        answer = turn.answer
        written = list(answer.ids)
        end = len(written)
        if answer.finish == "repetition" and sampler is not None:
            end -= sampler.count_repeated()
        tokenizer = self.document.tokenizer
        decode = decode_ids
        if any_begins_with_space(sampling.stop):
            decode = partial(decode_continuation, skip_special_tokens=False)
        text = decode(tokenizer, find_shown_ids(tokenizer, written[:end]))
        cut = find_first_stop(sampling.stop, text)
        if cut is not None:
            # Keep only tokens that lie completely in the text before the cut, and no part of a
            # character.
            shown = find_shown_ids(tokenizer, written[:end])
            while end and not text[:cut].startswith(decode(tokenizer, shown)):
                end -= 1
                shown = find_shown_ids(tokenizer, written[:end])
        if end == len(written):
            return turn
        kept = written[:end]
        answer = replace(
            answer,
            # An answer has at least one id, even if a stop string is in the first.
            ids=answer.ids[: max(end, 1)],
            logprobs=answer.logprobs and answer.logprobs[: max(end, 1)],
            top=answer.top and answer.top[: max(end, 1)],
        )
        keeps_space = sampling.keeps_leading_space
        kept_text = decoding.decode_answer(tokenizer, kept, stop_ids, continues=keeps_space)
        if not keeps_space:
            kept_text = kept_text.lstrip()
        # All ids of the answer have columns, except the last one that was written.
        first = self.columns - len(turn.prompt_ids) - len(written) + 1
        if kept_text == answer.text:
            read = [*turn.prompt_ids, *written[: max(end - 1, 0)]]
            self._cut_to(first + len(read), [*self.ids(), *read])
            return replace(turn, answer=answer, answer_ids=tuple(kept))
        return self._read_cut_answer(replace(turn, answer=answer), written, first)

    def _read_cut_answer(self, turn: Turn, written: list[int], first: int) -> Turn:
        """Return a turn with the ids of its answer's text, which was cut inside a token.

        The ids that have no columns in the cache are prefilled.

        Args:
            turn: The turn.
            written: All ids that the model wrote.
            first: Columns of the tail before the turn.
        """
        ids = self.question_ids(turn.question, turn.answer.text)
        known = [*turn.prompt_ids, *written[:-1]]
        common = _count_common(known, ids[:-1])
        self._cut_to(first + common, [*self.ids(), *known[:common]])
        if common < len(ids) - 1:
            prefill(self.document.model, torch.tensor([ids[common:-1]]), into=self.cache)
        # A token at the border of question and answer may differ from the one that was read.
        border = _count_common(turn.prompt_ids, ids)
        return replace(turn, prompt_ids=tuple(ids[:border]), answer_ids=tuple(ids[border:]))

    def question_ids(self, question: str, answer: str = "") -> list[int]:
        """Return the ids that the model reads next: the last one that it wrote and has not read,
        those of the template and the question, and of an answer if there is one already.
        """
        document = self.document
        check_question(question)
        tokenizer = document.tokenizer
        context = document.context
        # The first turn after the document: the document ends where a question begins.
        if len(self.turns) == self.folded:
            system = "" if self.turns or self.system == document.manifest.system else self.system
            return encode_conversation(tokenizer, context, [], question, system, answer).tolist()
        between = render_between_turns(tokenizer)
        header = choose_assistant_header(tokenizer, context.suffix_text, answer)
        ids = encode_text(tokenizer, question, between, header, answer, continues=True)
        return self._follow_answer(ids)

    def _follow_answer(self, ids: Tensor) -> list[int]:
        """Return ids (1, q) preceded by the last id of the latest answer, which has not been read.

        An EOS is left out: the text between turns replaces it.
        """
        # Empty if the answer began with a stop string.
        last = self.turns[-1].answer_ids[-1:]
        stop_ids = decoding.get_stop_ids(self.document.model, self.document.tokenizer)
        unread = [each for each in last if each not in stop_ids]
        return [*unread, *ids[0].tolist()]

    def ids(self) -> list[int]:
        """Return the ids that the tail holds: all that was read and written, except the last id of
        every answer.
        """
        return _list_ids(self.turns[self.folded :])

    @property
    def columns(self) -> int:
        """Columns of the tail, the restore cache included."""
        return self.cache.columns

    @property
    def nbytes(self) -> int:
        """Bytes of the conversation's own keys, values and states, without the document's."""
        total = 0
        for state_layer in self.cache.with_states:
            total += sum(tensor.nbytes for tensor in state_layer.list_tensors())
        for layer in self.cache.with_tails:
            keys, values = layer.keys_and_values
            # The tail begins with the restore cache, which is the document's.
            total += keys[:, :, layer.restore_length :].nbytes
            total += values[:, :, layer.restore_length :].nbytes
        return total

    @property
    def messages(self) -> list[dict[str, str]]:
        """The turns as a list of messages with role and content."""
        messages = []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer.text})
        return messages

    def _cut_to(self, columns: int, ids: Sequence[int]) -> None:
        """Cut every layer's tail to its first `columns`.

        States cannot be cut. Where layers have any, the tail is read again.

        Args:
            columns: Columns of the tail, the restore cache included.
            ids: The ids whose columns stay: all of the tail after the restore cache.
        """
        if not self.cache.with_states:
            self._crop_tails(columns)
        elif columns < self.columns:
            cache = self.document.cache.fork()
            assert columns == cache.columns + len(ids), "an id for every column that stays"
            if ids:
                prefill(self.document.model, torch.tensor([list(ids)]), into=cache)
            self.cache = cache

    def _crop_tails(self, columns: int) -> None:
        """Cut every layer's tail to its first `columns`. If a pass was interrupted, some layers
        have grown further than others.
        """
        for layer in self.cache.with_tails:
            layer.crop(layer.seen + columns)

    def undo(self, turns: int = 1) -> None:
        """Take back the latest turns."""
        with self._hold_turn():
            undoable = len(self.turns) - self.folded
            if type(turns) is not int or not 1 <= turns <= undoable:
                if not undoable:
                    why = ": those so far are folded into the document" if self.folded else ""
                    raise RestoreKVError(f"There is no turn to take back{why}.")
                can = "one turn" if undoable == 1 else f"up to {undoable} turns"
                if self.folded:
                    verb = "is" if self.folded == 1 else "are"
                    can += f", since {self.folded} {verb} folded into the document"
                raise RestoreKVError(
                    f"{turns!r} turns cannot be taken back; this conversation can take back {can}."
                )
            dropped_columns = 0
            for turn in self.turns[-turns:]:
                # A column for each id of its question, and of its answer but the last one.
                dropped_columns += len(turn.prompt_ids) + len(turn.answer_ids[:-1])
            columns = self.columns - dropped_columns
            self._cut_to(columns, _list_ids(self.turns[self.folded : -turns]))
            del self.turns[-turns:]

    def fork(self) -> Self:
        """Return an independent conversation that continues from here."""
        with self._hold_turn():
            other = type(self)(self.document, self.system, list(self.turns), self.folded)
            other.cache = self.cache.fork()
            for new, old in zip(other.cache.with_tails, self.cache.with_tails, strict=True):
                # The new conversation must not write into the columns of this one.
                new.keys, new.values = (x.clone() for x in old.keys_and_values)
        return other

    __copy__ = fork

    def fold(self, **options: Any) -> None:
        """Compress the turns so far into the document; they cannot be undone afterwards.

        This appends them as `document.append` appends a text, and takes its options. The document
        then ends where the user's next message begins, so it can be saved and asked on its own.
        """
        with self._hold_turn():
            if not self.ids():
                return
            tokenizer = self.document.tokenizer
            between = render_between_turns(tokenizer)
            turn_start = encode_text(tokenizer, before=between, continues=True)
            ids = torch.tensor([[*self.ids(), *self._follow_answer(turn_start)]])
            document = self.document.append_ids(
                ids, separator="", fix="fold when more was said", **options
            )
            cache = document.cache.fork()  # before anything changes, since Ctrl-C may come
            self.document, self.cache, self.folded = document, cache, len(self.turns)

    def save(self, path: str | Path) -> None:
        """Write the turns as JSON, completely or not at all; `load` prefills them again over the
        same document. A file that is not a conversation is never replaced.
        """
        if self.folded:
            raise RestoreKVError(
                "Folded turns are part of the document; fold the others, too, and save that: "
                "chat.fold(); chat.document.save('doc.rkv')."
            )
        file = parse_path(path)
        check_replaceable(file, KIND_NAME, FORMAT)
        check_length(path, self)
        for turn in self.turns:
            # `load` refuses longer texts.
            if max(len(turn.question), len(turn.answer.text)) > SYSTEM_LETTERS:
                raise RestoreKVError(
                    f"A question or an answer has more than {SYSTEM_LETTERS:,} characters, which "
                    "no file of a conversation holds; take that turn back, or fold the turns and "
                    "save the document."
                )
        turns = [
            {
                "question": turn.question,
                "answer": turn.answer.text,
                "finish": turn.answer.finish,
                "read": turn.prompt_ids,
                "written": turn.answer_ids,
            }
            for turn in self.turns
        ]
        content = {
            "format": FORMAT,
            "version": VERSION,
            "document": self.document.digest,
            "system": self.system,
            "turns": turns,
        }
        write_json(file, content)

    @classmethod
    def load(cls, path: str | Path, document: ChatContext) -> Self:
        """Continue a conversation that was saved; refuse one over a different document and damaged
        files.
        """
        if not hasattr(document, "digest"):
            raise RestoreKVError(
                "A conversation continues over the compressed context that it was about, not over "
                f"{type(document).__name__}; load that first."
            )
        file = parse_path(path)
        refuse_other_file(file)
        content = read_json(file, str(file))
        check_saved_turns(path, content, document)
        chat = cls(document, content["system"])
        for turn in content["turns"]:
            read = tuple(turn["read"])
            written = tuple(turn["written"])
            answer = Answer(turn["answer"], written, turn["finish"], len(read))
            chat.turns.append(Turn(turn["question"], answer, read, written))
        if chat.turns:
            check_length(path, chat)
            # A file has ids but no pairs; prefilling the ids again makes the same pairs.
            prefill(document.model, torch.tensor([chat.ids()]), into=chat.cache)
        return chat


def _list_ids(turns: Sequence[Turn]) -> list[int]:
    """Return the ids of turns that have columns in the cache."""
    ids: list[int] = []
    # The last id of an answer is written but not read, so it has no column yet.
    for turn in turns:
        ids += turn.prompt_ids
        ids += turn.answer_ids[:-1]
    return ids


def encode_conversation(
    tokenizer: Tokenizer,
    context: Context,
    turns: Sequence[tuple[str, str]],
    question: str,
    system: str = "",
    answer_prefix: str = "",
) -> Tensor:
    """Return the ids (q,) that follow the context: earlier turns, as questions and answers, then
    the question and the start of its answer.

    `system` comes between the context and the first question, as in `Chat`.
    """
    questions = [asked for asked, _ in turns] + [question]
    for number, asked in enumerate(questions):
        # An earlier question may be empty: a message that only had a file attached.
        check_question(asked, empty=number < len(turns))
    start = context.separator
    if system:
        start += system + (context.separator or PARAGRAPH)
    questions[0] = start + questions[0]
    if not turns:
        header = choose_assistant_header(tokenizer, context.suffix_text, answer_prefix)
        ids = encode_text(tokenizer, questions[0], after=header, more=answer_prefix, continues=True)
    else:
        answers = [answered for _, answered in turns]
        earlier = list(zip(questions, answers, strict=False))
        ids = encode_after_document(tokenizer, earlier, questions[-1], answer_prefix)
    return ids[0]


def _count_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many ids at the start of two sequences are the same."""
    common = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        common += 1
    return common


def refuse_other_file(path: Path) -> None:
    """Refuse a file that cannot be a conversation, and say what it is: a cache file, which is often
    kept next to it, another file of restorekv or a text.
    """
    with open_with_size(path, str(path)) as (file, _):
        start = file.read(START_BYTES)
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return
    kind = re.search(rb'"format": ?"restorekv-([a-z-]+)"', start)
    what = "a text or another kind of file"
    if kind is not None and kind[1] == b"cache":
        what = "the cache of a document"
    elif kind is not None:
        what = f"a restorekv {kind[1].decode()} file"
    elif not start:
        what = "empty"
    raise CacheFileError(
        f"{path} is {what}, not a conversation; give a file that /save or chat.save wrote."
    )


def check_saved_turns(path: str | Path, content: object, document: ChatContext) -> None:
    """Refuse what `save` did not write for this document."""
    saved = check_form(path, content)
    if saved["document"] != document.digest:
        raise CacheFileError(
            f"{path} is a conversation over a different document; give that document's cache file."
        )
    vocabulary = get_vocabulary_size(document.model)
    if any(max(turn["read"] + turn["written"]) >= vocabulary for turn in saved["turns"]):
        raise _make_damage_error(path)


def check_form(path: str | Path, content: object) -> dict[str, Any]:
    """Return the JSON of a conversation's file; refuse what `save` cannot have written.

    This needs neither the document nor the model, so it does not check that the vocabulary has the
    token ids.
    """
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or content.get("version") != VERSION
    ):
        raise CacheFileError(
            f"{path} is not a conversation of this restorekv; give a file that /save or chat.save "
            "wrote."
        )
    system = content.get("system")
    turns = content.get("turns")
    has_system = isinstance(system, str) and len(system) <= SYSTEM_LETTERS
    has_turns = isinstance(turns, list) and all(map(_is_saved_turn, turns))
    if not has_system or not has_turns or not isinstance(content.get("document"), str):
        raise _make_damage_error(path)
    return content


def _make_damage_error(path: str | Path) -> CacheFileError:
    return CacheFileError(f"{path} is damaged; its turns are not what chat.save writes.")


def _is_saved_turn(turn: object) -> bool:
    """Return whether a turn of a file has the entries of SAVED, with possible ids and lengths."""
    if not isinstance(turn, dict) or set(turn) != set(SAVED):
        return False
    if not all(matches_type(turn[name], SAVED[name]) for name in SAVED):
        return False
    # An answer without ids is empty: a stop string came first.
    if not turn["read"] or (turn["answer"] and not turn["written"]):
        return False
    if min(turn["read"] + turn["written"]) < 0:
        return False
    return len(turn["question"]) <= SYSTEM_LETTERS and len(turn["answer"]) <= SYSTEM_LETTERS


def check_length(path: str | Path, chat: Chat) -> None:
    """Refuse a conversation from a file that is longer than the model's positions."""
    first = chat.document.cache.get_seq_length()
    limit = count_positions(chat.document.model.config)
    room = min(limit, POSITIONS) - first
    tokens = len(chat.ids())
    if tokens > room:
        raise CacheFileError(
            f"The conversation of {path} has {tokens:,} tokens, and the model's {limit:,} "
            f"positions have room for {max(room, 0):,} after the document; take turns back or fold "
            "them before it is saved."
        )
