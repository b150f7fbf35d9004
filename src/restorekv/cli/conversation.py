"""A conversation in the terminal: questions, answers as they grow, and commands with a slash."""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from rich.text import Text

from restorekv.cli.errors import RECEIVED, make_visible, report_error
from restorekv.cli.inputs import check_outputs_apart
from restorekv.cli.terminal import notes, output
from restorekv.context import CompressedContext, describe_bytes, format_bytes
from restorekv.errors import RestoreKVError
from restorekv.files import check_replaceable, check_target
from restorekv.generation.chat import Chat, Turn
from restorekv.generation.sampling import SamplingConfig
from restorekv.storage.cache_file import KIND

MOST_DIGITS = 9  # of the number of turns after /undo
HELP = {
    "/undo [N]": "take the latest question and its answer back, or the latest N",
    "/history": "show the conversation",
    "/fold": "compress the conversation into the document, to go on with less memory",
    "/save FILE": "write the conversation for --continue; as FILE.rkv, the document with all "
    "that was said",
    "/help": "show this list",
    "/quit": "leave; Ctrl-D does so, too",
}


def run_conversation(
    chat: Chat,
    max_new_tokens: int,
    sampling: SamplingConfig,
    *,
    fold: bool = True,
    adapter: str | None = "auto",
    reads: Sequence[Path] = (),
) -> None:
    """Read questions and commands until the input ends.

    Args:
        chat: The conversation, which may have turns already.
        max_new_tokens: How long an answer may be.
        sampling: How tokens are chosen.
        fold: Fold the conversation before it holds more than the full cache of its text.
        adapter: What restores when it is folded, as `append` takes it.
        reads: Files that the conversation goes on with, which /save does not replace.
    """
    if sys.stdin is None:
        raise RestoreKVError(
            "The standard input is closed; type questions or pipe them in, one per line."
        )
    # So that a line that is not UTF-8 is refused by itself.
    cast("TextIOWrapper", sys.stdin).reconfigure(errors="surrogateescape")
    m = chat.document.manifest
    notes.print(
        f"{m.tokens:,} tokens in {describe_bytes(m.bytes_held, m.bytes_full)}. "
        "/help lists the commands."
    )
    saved = list(chat.turns)  # those that a file holds; of a new conversation none
    for line in read_lines():
        line = line.strip()
        if line.split()[:1] in (["/quit"], ["/exit"]):
            break
        with _continue_after_errors("(broken off; the conversation is as it was before)"):
            if line.startswith("/"):
                _run_command(chat, line, adapter, reads)
                if line.partition(" ")[0] == "/save":
                    saved = list(chat.turns)
            elif line:
                if fold:
                    fold = _fold_in_time(chat, line, max_new_tokens, adapter)
                _print_answer(chat, line, max_new_tokens, sampling)
    _report_lost_turns(chat, saved)


def _report_lost_turns(chat: Chat, saved: Sequence[Turn]) -> None:
    """Say at the end how many turns no file holds, if folded ones are among them."""
    if all(turn in saved for turn in chat.turns[: chat.folded]):
        return
    lost = sum(turn not in saved for turn in chat.turns)
    noun = "turn was" if lost == 1 else "turns were"
    notes.print(
        f"{lost} {noun} not saved, folded ones included; /save FILE.rkv before /quit keeps them.",
        soft_wrap=True,
        highlight=False,
    )


@contextmanager
def _continue_after_errors(after_ctrl_c: str) -> Iterator[None]:
    """Report why the block failed, or that Ctrl-C stopped it, and continue; other signals end the
    command.
    """
    try:
        yield
    except KeyboardInterrupt:
        if RECEIVED:
            raise
        notes.print(f"\n{after_ctrl_c}", style="dim", highlight=False)
    except (RestoreKVError, MemoryError, RuntimeError) as error:
        report_error(error)


def read_lines() -> Iterable[str]:
    """Yield what is typed, with a history on a terminal, or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import_module("readline")  # gives input() a history and editing
    while True:
        with _continue_after_errors("(Ctrl-D or /quit leaves)"):
            try:
                yield input("> ")
            except EOFError:
                print()
                return


@dataclass(frozen=True)
class HeldPairs:
    """Pairs per head, on average: of the document's small cache, of the turns, and of the full
    cache.
    """

    cache: float
    turns: int
    full: int

    @classmethod
    def count(cls, chat: Chat) -> "HeldPairs":
        cache = chat.document.cache
        heads = cache.lengths.numel()
        return cls(cache.pairs_held / heads, len(chat.ids()), chat.document.context.num_tokens)

    def should_fold(self, coming: int) -> bool:
        """Return whether the cache and the turns, with `coming` further pairs, exceed the full
        cache, and would not after folding.
        """
        if not self.turns or self.cache + self.turns + coming <= self.full:
            return False
        grown = self.full + self.turns  # the turns are part of the text then
        return self.cache / self.full * grown + coming <= grown


def _fold_in_time(chat: Chat, question: str, max_new_tokens: int, adapter: str | None) -> bool:
    """Fold a conversation that could exceed the full cache with the next turn; return whether it
    can be folded.
    """
    before = HeldPairs.count(chat)
    if not before.should_fold(len(chat.question_ids(question)) + max_new_tokens):
        return True
    try:
        with notes.status("folding"):
            chat.fold(adapter=adapter)
    except RestoreKVError as error:
        notes.print(
            f"The conversation grows beyond the full cache, as it cannot be folded: {error}",
            soft_wrap=True,
            markup=False,
        )
        return False
    after = HeldPairs.count(chat)
    notes.print(
        f"Folded {before.turns:,} pairs per head into the document, which holds {after.cache:,.0f} "
        f"now, because the next turn could have exceeded the full cache's {before.full:,}; /undo "
        "takes back later turns only.",
        soft_wrap=True,
        highlight=False,
    )
    return True


def _print_answer(chat: Chat, question: str, max_new_tokens: int, sampling: SamplingConfig) -> None:
    """Print an answer while it grows, and what the turn cost."""
    start = time.perf_counter()
    for piece in chat.ask(question, max_new_tokens, stream=True, config=sampling):
        print(make_visible(piece), end="", flush=True)
    print()
    turn = chat.turns[-1]
    held = HeldPairs.count(chat)
    if turn.answer.finish == "repetition":
        notes.print("(ended, because it repeated itself)", style="dim", highlight=False)
    elif turn.answer.finish == "length":
        limit = f"(cut after {max_new_tokens} tokens; --max-new-tokens sets the limit)"
        notes.print(limit, style="dim", highlight=False, soft_wrap=True)
    seconds = time.perf_counter() - start
    notes.print(
        f"read {len(turn.prompt_ids)} tokens, wrote {len(turn.answer.ids)}; "
        f"{turn.seconds[0]:.2f} s to the first, "
        f"{seconds:.2f} s in all; pairs per head: cache {held.cache:,.0f}, turns {held.turns:,} "
        f"(full cache {held.full:,})",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def _run_command(chat: Chat, line: str, adapter: str | None, reads: Sequence[Path]) -> None:
    """Carry out a command that begins with a slash."""
    name, _, rest = line.partition(" ")
    match name:
        case "/undo":
            given = rest.strip()
            # Nobody takes a billion turns back, and Python reads no number of 5,000 digits.
            if given and (not given.isdecimal() or len(given) > MOST_DIGITS):
                raise RestoreKVError("Give a number of turns after /undo, or nothing for one.")
            count = int(given or 1)
            chat.undo(count)
            notes.print(f"Turns taken back: {count}; {len(chat.turns)} are left.")
        case "/history":
            for message in chat.messages:
                said = Text.assemble(
                    (message["role"], "bold"), f": {make_visible(message['content'])}"
                )
                output.print(said, soft_wrap=True)
        case "/fold":
            if not chat.turns:
                raise RestoreKVError("There are no turns to fold; ask something first.")
            before = chat.nbytes
            chat.fold(adapter=adapter)
            notes.print(
                f"Folded {format_bytes(before)} into the document, which holds "
                f"{format_bytes(chat.document.manifest.bytes_held)}."
            )
        case "/save":
            if not rest.strip():
                raise RestoreKVError("Give a file after /save.")
            # Which leaves the home of an unknown user as it is.
            path = Path(os.path.expanduser(rest.strip()))
            check_target(path)
            check_outputs_apart([path], reads)
            if path.suffix.lower() == ".rkv":
                # Before the turns are folded, which takes long.
                check_replaceable(path, KIND.name, KIND.format)
                said = chat.fork()  # the conversation itself goes on as it is
                said.fold(adapter=adapter)
                assert isinstance(said.document, CompressedContext), "a conversation over a file"
                said.document.save(path)
            elif chat.folded:
                raise RestoreKVError(
                    "Folded turns are part of the document; save that, as in /save doc.rkv."
                )
            else:
                chat.save(path)
            notes.print(f"Wrote {path}.", markup=False)
        case "/help":
            for each, what in HELP.items():
                notes.print(f"{each:12} {what}", highlight=False, soft_wrap=True, markup=False)
        case _:
            raise RestoreKVError(f"There is no command {name}; /help lists them.")
