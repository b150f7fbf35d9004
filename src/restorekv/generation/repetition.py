"""Detection of answers that repeat themselves: small models may write one sentence over and over
until the limit.

The rule: an answer ends when its last tokens are one block of tokens, k times in a row or more, and
these copies are at least LEAST_TOKENS tokens. The first copy stays and the others are cut off. A
block begins with a space or a line break if it has one, or else at a token that does not continue a
word or a number, so that none is cut in two. Two tokens count as the same if their texts differ at
most in leading spaces and capitals, because the first word of an answer is often written without
the space, or with a capital, that it would have elsewhere.

For every period p, `runs` holds how many of the last tokens are the same as the token p places
before them. The last run + p tokens are then made of copies of one block of p tokens.
"""

from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.model.tokenize import REPLACEMENT, decode_ids

DEFAULT_REPEATS = 3  # in conversations and the command line; 0 lets an answer repeat itself
LEAST_TOKENS = 32  # so that rows of dashes, zeros or table cells do not count as a repetition
SPACES = " \u0120\u2581"  # how vocabularies write the space before a word
BREAKS = ("\n", "\u010a", "<0x0A>")  # and line breaks
# Signs that may be inside a word or a number. If no border is found, fewer of them are assumed to
# be: a comma may also be between the numbers of a list.
JOINING_SIGNS = (".,:'/-", ".:'/-", "")
T = TypeVar("T")


class RepetitionWatch:
    """Follows an answer and finds out when it repeats itself `copies` times."""

    def __init__(self, tokenizer: Tokenizer, copies: int) -> None:
        self.tokenizer = tokenizer
        self.copies = copies
        self.count = 0  # tokens so far
        self.ids: list[int] = []
        self.positions: dict[str | int, list[int]] = {}  # by a token's text, or its id
        self.joins_previous: list[bool] = []  # whether each token has no space or break before it
        self.run_by_period: dict[int, int] = {}

    def push(self, token: int) -> None:
        """Take the next token of the answer."""
        piece = str(self.tokenizer.convert_ids_to_tokens(token) or "")  # one id, so one text
        text = decode_ids(self.tokenizer, [token])
        # Not the piece itself: it may spell bytes as letters, and a small letter is another byte
        # than its capital. A part of a character is known by its id alone.
        word = "" if REPLACEMENT in text else text.lstrip(" ").lower()
        positions = self.positions.setdefault(word or token, [])
        run_by_period = {}
        for position in positions:
            period = self.count - position
            run_by_period[period] = self.run_by_period.get(period, 0) + 1
        self.run_by_period = run_by_period
        positions.append(self.count)
        self.ids.append(token)
        self.joins_previous.append(not piece.startswith((*SPACES, *BREAKS)))
        self.count += 1

    @property
    def repeated(self) -> int:
        """How many tokens at the end are copies of those before them; 0 while they are too few for
        the rule.
        """
        for period in sorted(self.run_by_period):
            run = self.run_by_period[period]
            whole_copies = run + period >= self.copies * period
            if whole_copies and run + period >= LEAST_TOKENS:
                return run - self._count_before_word(period)
        return 0

    def _count_before_word(self, period: int) -> int:
        """Return how many tokens at the start of a period's run come before its first space, such
        as a year's last digit and a full stop, if the text before the block ends with them, too.

        Without a space, as in Chinese, it is the number of tokens up to the end of a word or a
        character.
        """
        start = self.count - self.run_by_period[period]
        block = self.joins_previous[start : start + period]
        if False in block:
            return block.index(False)
        borders = []  # of characters: tokens before one, and the texts around it
        for border in range(period):
            before = decode_ids(self.tokenizer, self.ids[: start + border])
            after = decode_ids(self.tokenizer, self.ids[start + border :][:period])
            if not before.endswith(REPLACEMENT):
                borders.append((border, before, after))
        for signs in JOINING_SIGNS:
            for border, before, after in borders:
                if not _continues_word(before, after, signs):
                    return border
        return borders[0][0] if borders else 0

    @property
    def uncertain(self) -> int:
        """How many tokens at the end may turn out to be copies."""
        return max(self.run_by_period.values(), default=0)


def _continues_word(before: str, after: str, signs: str) -> bool:
    """Return whether a word or a number continues from one text to the next; it may have one of
    the signs there, such as 3.14.
    """
    if before[-1:] in signs:
        before = before[:-1]
    elif after[:1] in signs:
        after = after[1:]
    return before[-1:].isalnum() and after[:1].isalnum()


class CopyFilter(Generic[T]):
    """Holds back tokens of a growing answer until it is certain that they are not copies."""

    def __init__(self, tokenizer: Tokenizer, copies: int) -> None:
        self.watch = RepetitionWatch(tokenizer, copies)
        self.held: list[T] = []

    def push(self, token: int, item: T) -> list[T]:
        """Take the next token, and an item to return for it when it is certain; return the items
        that have become certain.
        """
        self.watch.push(token)
        self.held.append(item)
        count = len(self.held) - self.watch.uncertain
        certain = self.held[:count]
        self.held = self.held[count:]
        return certain

    def finish(self) -> tuple[list[T], list[T]]:
        """Return the items at the answer's end that are not copies, and those that are."""
        count = len(self.held) - self.watch.repeated
        return self.held[:count], self.held[count:]


def drop_repetition(written: Iterable[int], tokenizer: Tokenizer, copies: int) -> Iterator[int]:
    """Yield the tokens of a growing answer, each as soon as it is certain not to be a copy, and
    leave out the copies at its end.
    """
    certain: CopyFilter[int] = CopyFilter(tokenizer, copies)
    for token in written:
        yield from certain.push(token, token)
    yield from certain.finish()[0]
