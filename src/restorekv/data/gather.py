"""One source at a time: contexts that pass the filters, what the teacher asks and answers, and
every count.

The attempts at a context are appended to a file as soon as they are complete, so an interrupted
build loses at most the context it was working on and asks nothing twice.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.documents import DropRow, SourceDocument
from restorekv.data.overlap import EvaluationIndex, split_words
from restorekv.data.self_study import SelfStudy
from restorekv.data.sources import Source
from restorekv.errors import RestoreKVError, import_extra
from restorekv.files import check_not_link, open_without_links, parse_json, read_bytes
from restorekv.model.prompt import Context, encode_text, make_context
from restorekv.model.rope import count_positions

ATTEMPTS_BYTES = 4 << 30  # bytes of the answers to one source
_WORDING_MARGIN = 64  # positions reserved for the wording around the longest question
Progress = Callable[[int, int, str], None]


class AttemptFile:
    """The attempts at the contexts of one source, a line of JSON per context."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for place in (path.parent, path):
            check_not_link(place)
        content = read_bytes(path, str(path), ATTEMPTS_BYTES) if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        try:
            self.done = [parse_json(line, str(path)) for line in complete.split(b"\n")[:-1]]
            schema = import_extra("restorekv.data.schema", "data")
            if any(schema.find_problem(schema.AttemptLine, line) for line in self.done):
                raise ValueError("a line has other entries")
        except ValueError as error:
            raise RestoreKVError(
                f"{path} is damaged; delete it to ask its contexts again."
            ) from error
        if len(complete) < len(content):  # a killed process left half a line
            os.truncate(path, len(complete))

    def find_attempts(self, index: int, document: SourceDocument) -> list[dict] | None:
        """Return the attempts at context number `index`, None before it was asked; refuse another
        document.
        """
        if index >= len(self.done):
            return None
        if self.done[index]["context"] != identify_document(document):
            raise RestoreKVError(
                f"{self.path} holds answers about other documents; build into another folder."
            )
        return self.done[index]["attempts"]

    def append_attempts(self, document: SourceDocument, attempts: list[dict]) -> None:
        """Append a line; it is on disk when this returns."""
        line = (
            json.dumps(
                {"context": identify_document(document), "attempts": attempts}, ensure_ascii=False
            )
            + "\n"
        )
        with open_without_links(self.path) as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        self.done.append(json.loads(line))


def identify_document(document: SourceDocument) -> list[str]:
    """Return the name and 16 hex digits of the text's hash."""
    return [document.name, hashlib.sha256(document.text.encode()).hexdigest()[:16]]


@dataclass
class LengthFilter:
    """Accepts contexts of `shortest` to `longest` tokens, each text once."""

    tokenizer: Tokenizer
    shortest: int
    longest: int
    seen: set[str] = field(default_factory=set)

    def check_text(self, text: str) -> Context | str:
        """Return the tokenized context, or why it is dropped."""
        context = make_context(self.tokenizer, text)
        if context.tokens < self.shortest:
            return "too short"
        if context.tokens > self.longest:
            return "too long"
        digest = hashlib.sha256(" ".join(split_words(text)).encode()).hexdigest()
        if digest in self.seen:
            return "repeated"
        self.seen.add(digest)
        return context


def compute_longest_context(
    model: PreTrainedModel, tokenizer: Tokenizer, config: BuildConfig
) -> int:
    """Return `config.longest`, or fewer tokens where the model has no positions for them, a
    question and an answer.
    """
    positions = count_positions(model.config)
    frame = make_context(tokenizer, "a")
    tail = (
        frame.suffix.shape[-1]
        + config.question_tokens
        + max(config.answer_tokens, config.flan_answer_tokens)
    )
    most = min(config.longest, positions - frame.prefix - tail - _WORDING_MARGIN)
    if most < 1:
        raise RestoreKVError(
            f"The model's {positions} positions are too few for such answers; ask for shorter ones."
        )
    return most


@dataclass
class SourceResult:
    """What one source gave: its examples, and how many rows and attempts were dropped for which
    reason.
    """

    examples: list[dict] = field(default_factory=list)
    read: int = 0
    contexts: int = 0
    units: set = field(default_factory=set)
    dropped: Counter = field(default_factory=Counter)
    refused: list[dict] = field(default_factory=list)
    attempts: int = 0
    faults: Counter = field(default_factory=Counter)

    def count_units(self, source: Source) -> int:
        """Return how many of the wanted units there are; a book counts once one of its chunks was
        asked about.
        """
        return len(self.examples) if source.asked_once else len(self.units)

    def describe_drops(self) -> str:
        return (
            ", ".join(f"{count} {reason}" for reason, count in (self.dropped + self.faults).items())
            or "nothing"
        )

    def to_account(self, source: Source) -> dict:
        """Return the counts before and after every filter, for the manifest."""
        return {
            "title": source.title,
            "rows": self.read,
            "dropped": dict(self.dropped),
            "refused": self.refused,
            "contexts": self.contexts,
            "attempts": self.attempts,
            "dropped_attempts": dict(self.faults),
            "examples": len(self.examples),
            "licenses": dict(Counter(example["license"] for example in self.examples)),
        }


@dataclass(frozen=True)
class SourceBuilder:
    """What all sources share."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    config: BuildConfig
    evaluations: EvaluationIndex
    longest: int
    progress: Progress

    def gather_examples(
        self, source: Source, items: Iterator[SourceDocument | DropRow], stored: AttemptFile
    ) -> SourceResult:
        """Ask about the contexts of a source until there are enough."""
        gathered = SourceResult()
        wanted = source.wanted(self.config)
        teacher = SelfStudy(self.model, self.tokenizer, self.config)
        steps = wanted * (self.config.chunks if source.unit == "books" else 1)
        lengths = LengthFilter(self.tokenizer, source.shortest(self.config), self.longest)
        waiting: list[tuple[SourceDocument, Context]] = []
        for item in items:
            gathered.read += 1
            if context := self._accept_document(item, lengths, gathered):
                waiting.append((item, context))
            missing = max(wanted - gathered.count_units(source), 1)
            if len(waiting) == min(source.at_once, missing):
                self._ask_waiting(source, waiting, stored, teacher, gathered, steps)
            more_of_a_book = isinstance(item, SourceDocument) and item.more
            if gathered.count_units(source) >= wanted and not more_of_a_book:
                break
        self._ask_waiting(source, waiting, stored, teacher, gathered, steps)
        return gathered

    def _ask_waiting(
        self,
        source: Source,
        waiting: list[tuple[SourceDocument, Context]],
        stored: AttemptFile,
        teacher: SelfStudy,
        gathered: SourceResult,
        steps: int,
    ) -> None:
        """Ask about the contexts that wait, all at once, and adds what comes of it; none of them
        waits after that.

        A batch that was interrupted is asked again as a whole, since a batch of other rows may
        round differently.
        """
        first = gathered.contexts
        attempts = [
            stored.find_attempts(first + place, item) for place, (item, _) in enumerate(waiting)
        ]
        if None in attempts:
            if source.asked_once:
                attempts = [teacher.answer_prompt(context, item) for item, context in waiting]
            else:
                attempts = teacher.study_contexts([(context, item) for item, context in waiting])
            for place, (item, _) in enumerate(waiting):
                if stored.find_attempts(first + place, item) is None:
                    stored.append_attempts(item, attempts[place])
        for (item, context), own in zip(waiting, attempts, strict=True):
            self._add_examples(source, item, context, own, gathered)
            done = len(gathered.examples) if source.asked_once else gathered.contexts
            self.progress(min(done, steps), steps, source.title)
        waiting.clear()

    def _accept_document(
        self, item: SourceDocument | DropRow, lengths: LengthFilter, gathered: SourceResult
    ) -> Context | None:
        """Return the context of a document that passes; count any other, and name it if it is an
        evaluation text.
        """
        checked = str(item) if isinstance(item, DropRow) else lengths.check_text(item.text)
        if isinstance(checked, str):
            gathered.dropped[checked] += 1
            return None
        match = self.evaluations.find_match(item.text)
        if match:
            gathered.dropped["in an evaluation set"] += 1
            gathered.refused.append(
                {"document": item.name, "found in": match[0], "share": match[1]}
            )
            return None
        return checked

    def _add_examples(
        self,
        source: Source,
        item: SourceDocument,
        context: Context,
        attempts: list[dict],
        gathered: SourceResult,
    ) -> None:
        """Add attempts without a fault to the examples."""
        gathered.contexts += 1
        gathered.units.add(item.book or gathered.contexts)
        gathered.attempts += len(attempts)
        gathered.faults.update(attempt["fault"] for attempt in attempts if "fault" in attempt)
        shared = {
            "source": source.name,
            "document": item.name,
            "context": item.text,
            "license": item.license,
        }
        for attempt in attempts:
            if "fault" not in attempt:
                counts = {
                    "context_tokens": context.tokens,
                    "question_tokens": encode_text(self.tokenizer, attempt["question"]).shape[-1],
                    "answer_tokens": len(attempt["answer_ids"]),
                }
                gathered.examples.append({**shared, **attempt, **counts})
