"""A conversation in the terminal: questions, answers as they grow, and commands with a slash."""

import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import cast

from rich.text import Text

from restorekv.cli.errors import RECEIVED, make_visible, report_error
from restorekv.cli.inputs import is_same_file
from restorekv.cli.terminal import explain_cut, notes, output
from restorekv.context import CompressedContext, describe_bytes, format_bytes
from restorekv.errors import RestoreKVError
from restorekv.files import check_replaceable, check_target
from restorekv.generation.chat import FORMAT, KIND_NAME, Chat, Turn
from restorekv.generation.sampling import SamplingConfig
from restorekv.spec import hint_near_name
from restorekv.storage.cache_file import KIND

MAX_DIGITS = 9  # of the number of turns after /undo
HELP = {
    "/undo [N]": "take the latest question and its answer back, or the latest N",
    "/history": "show the conversation",
    "/fold": "compress the conversation into the document, to continue with less memory",
    "/save FILE": "write the conversation for --continue; as FILE.rkv, the document with all "
    "that was said; --replace before FILE replaces a different conversation's file",
    "/help": "show this list",
    "/quit": "leave, as do /exit and Ctrl-D",
}
# Words that other programs take without a slash. Alone on a line, they are commands here, too.
WITHOUT_SLASH = {"quit": "/quit", "exit": "/quit", "help": "/help"}
REPLACE = "--replace"


@dataclass
class SaveRecord:
    """The files of a conversation: which of them /save may replace, and what is saved.

    Args:
        reads: Files that the conversation continues to read, which /save never replaces.
        own: Real paths of the files that /save may replace: those that it wrote, and the one that
            --continue named.
        turns: The turns as they were last saved, or read from the file of --continue.
    """

    reads: Sequence[Path] = ()
    own: set[str] = field(default_factory=set)
    turns: list[Turn] = field(default_factory=list)

    def check_own(self, path: Path) -> None:
        """Refuse to replace a file that was neither written by /save nor named by --continue."""
        # An empty file has nothing to lose.
        if os.path.realpath(path) in self.own or not path.exists() or not path.stat().st_size:
            return
        raise RestoreKVError(
            f"{path} exists and is not of this conversation; give a different name, or replace it "
            f"with /save {REPLACE} {shlex.quote(str(path))}"
        )

    def note_written(self, path: Path, turns: Sequence[Turn]) -> None:
        """Remember that a file holds these turns."""
        self.own.add(os.path.realpath(path))
        self.turns = list(turns)


def run_conversation(
    chat: Chat,
    max_new_tokens: int,
    sampling: SamplingConfig,
    *,
    fold: bool = True,
    adapter: str | None = "auto",
    reads: Sequence[Path] = (),
    continued: Path | None = None,
) -> None:
    """Read questions and commands until the input ends.

    Args:
        chat: The conversation, which may have turns already.
        max_new_tokens: How long an answer may be.
        sampling: How tokens are chosen.
        fold: Fold the conversation before it holds more than the full cache of its text.
        adapter: The adapter for folding, as in `append`; None folds without restoring.
        reads: Files that the conversation continues to read, which /save does not replace.
        continued: The file of the conversation that is continued; /save may replace it.
    """
    if sys.stdin is None:
        raise RestoreKVError(
            "The standard input is closed; type questions or pipe them in, one per line."
        )
    # A line that is not UTF-8 is then refused alone; it does not end the conversation.
    cast("TextIOWrapper", sys.stdin).reconfigure(errors="surrogateescape")
    m = chat.document.manifest
    notes.print(
        f"{m.tokens:,} tokens in {describe_bytes(m.bytes_held, m.bytes_full)}. "
        "/help lists the commands."
    )
    files = SaveRecord(reads)
    if continued is not None:
        files.note_written(continued, chat.turns)
    for line in read_lines():
        line = line.strip()
        line = WITHOUT_SLASH.get(line.lower(), line)
        if line.split()[:1] in (["/quit"], ["/exit"]):
            break
        with _continue_after_errors("(interrupted; the conversation is unchanged)"):
            if line.startswith("/"):
                _run_command(chat, line, adapter, files)
            elif line:
                if fold:
                    fold = _fold_in_time(chat, line, max_new_tokens, adapter)
                _print_answer(chat, line, max_new_tokens, sampling)
    _report_lost_turns(chat, files.turns)


def _report_lost_turns(chat: Chat, saved: Sequence[Turn]) -> None:
    """Report at the end how many turns were not saved, if folded ones are among them."""
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
    """Yield the lines that are typed, with a history on a terminal, or those of a pipe."""
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
        """Return whether cache and turns exceed the full cache once `coming` more pairs per head
        are added, and would not do so after folding.
        """
        if not self.turns or self.cache + self.turns + coming <= self.full:
            return False
        grown = self.full + self.turns  # after folding, the turns are part of the text
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
        notes.print(
            f"({explain_cut(max_new_tokens)})", style="dim", highlight=False, soft_wrap=True
        )
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


def _run_command(chat: Chat, line: str, adapter: str | None, files: SaveRecord) -> None:
    """Carry out a command that begins with a slash."""
    name, *words = line.split(maxsplit=1)
    rest = "".join(words)
    match name:
        case "/undo":
            # Python refuses to parse a number of 5,000 digits.
            if rest and (not rest.isdecimal() or len(rest) > MAX_DIGITS):
                raise RestoreKVError("Give a number of turns after /undo, or nothing for one.")
            count = int(rest or 1)
            chat.undo(count)
            left = str(len(chat.turns) - chat.folded)
            if chat.folded:
                verb = "is" if chat.folded == 1 else "are"
                left += f", besides {chat.folded} that {verb} folded"
            notes.print(f"Turns taken back: {count}; turns left: {left}.", soft_wrap=True)
        case "/history":
            for message in chat.messages:
                said = Text.assemble(
                    (message["role"], "bold"), f": {make_visible(message['content'])}"
                )
                output.print(said, soft_wrap=True)
        case "/fold":
            if len(chat.turns) == chat.folded:
                raise RestoreKVError("There are no turns to fold; ask something first.")
            before = chat.nbytes
            chat.fold(adapter=adapter)
            notes.print(
                f"Folded {format_bytes(before)} into the document, which holds "
                f"{format_bytes(chat.document.manifest.bytes_held)}."
            )
        case "/save":
            path, replace = _parse_target(rest)
            _save(chat, path, replace, adapter, files)
            notes.print(f"Wrote {path}.", soft_wrap=True)
        case "/help":
            for each, what in HELP.items():
                notes.print(f"{each:12} {what}", highlight=False, soft_wrap=True)
        case _:
            known = [each.partition(" ")[0] for each in HELP]
            raise RestoreKVError(
                f"There is no command {name}{hint_near_name(name, known)}; /help lists them."
            )


def _parse_target(rest: str) -> tuple[Path, bool]:
    """Return the file that follows /save, and whether --replace is given.

    Words are split as in a shell: a name with spaces needs quotation marks.
    """
    parser = shlex.shlex(rest, posix=True)
    parser.whitespace_split = True
    parser.commenters = ""
    if os.name == "nt":  # where the backslash separates folders
        parser.escape = ""
    try:
        words = list(parser)
    except ValueError:
        raise RestoreKVError(
            "A quotation mark after /save has no partner, or a backslash nothing after it; write "
            '/save "NAME OF THE FILE"'
        ) from None
    names = [word for word in words if word != REPLACE]
    if not any(names):
        raise RestoreKVError("Give a file after /save.")
    if len(names) > 1:
        raise RestoreKVError(
            f"/save takes one file, not {len(names)}; put a name with spaces in quotation marks: "
            '/save "NAME OF THE FILE"'
        )
    if names[0].startswith("-"):
        raise RestoreKVError(
            f"/save has no option {names[0]}, only {REPLACE}; of a file with that name write "
            f"./{names[0]}"
        )
    # `expanduser` leaves the home of an unknown user as written.
    return Path(os.path.expanduser(names[0])), REPLACE in words


def _save(chat: Chat, path: Path, replace: bool, adapter: str | None, files: SaveRecord) -> None:
    """Write a conversation, or the document with all that was said.

    Args:
        chat: The conversation.
        path: The file; the ending .rkv asks for the document.
        replace: Replace a file of a different conversation or document.
        adapter: The adapter that restores when the turns are folded into the document.
        files: The conversation's own files; `path` is added to them.
    """
    check_target(path)
    if any(is_same_file(path, each) for each in files.reads):
        raise RestoreKVError(
            f"{path} is the document that this conversation is about, which is not changed; use a "
            "different name."
        )
    saves_document = path.suffix.lower() == ".rkv"
    # Checked before the turns are folded, which takes long. A file of a different kind is never
    # replaced.
    if saves_document:
        check_replaceable(path, KIND.name, KIND.format)
    else:
        check_replaceable(path, KIND_NAME, FORMAT)
    if not replace:
        files.check_own(path)
    if saves_document:
        said = chat.fork()  # the conversation itself stays unfolded
        said.fold(adapter=adapter)
        assert isinstance(said.document, CompressedContext), "a conversation over a file"
        said.document.save(path)
    elif chat.folded:
        raise RestoreKVError(
            "Folded turns are part of the document; save that, as in /save doc.rkv."
        )
    else:
        chat.save(path)
    files.note_written(path, chat.turns)
