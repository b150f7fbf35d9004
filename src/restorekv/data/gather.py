"""Gathers the examples of one source: filters its contexts, has the teacher ask and answer, and
counts everything.

The attempts at a context are appended to a file as soon as they are complete, so an interrupted
build loses at most the context it was working on and asks nothing twice.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression.progress import OnStep
from restorekv.data.config import BuildConfig
from restorekv.data.documents import DropRow, SourceDocument
from restorekv.data.overlap import EvaluationIndex, split_words
from restorekv.data.self_study import SelfStudy
from restorekv.data.sources import Source, select_sources
from restorekv.errors import RestoreKVError
from restorekv.files import append_line, check_not_link, find_wrong_entry, load_lines
from restorekv.model.position_limits import count_usable_positions
from restorekv.model.prompt import Context, encode_text, make_context
from restorekv.seal import short_hash

# What a line of an attempt file holds: name and hash of a context, and what was asked about it.
ATTEMPT_LINE = {"context": list[str], "attempts": list[dict[str, Any]]}
# The least number of contexts about which a padded batch asks.
PADDED_BATCH = 24
# Positions reserved for the wording around the longest question.
WORDING_MARGIN = 64


class AttemptFile:
    """The attempts at the contexts of one source, a line of JSON per context.

    They are looked up by the context's name, text and questions. So if a source was corrected in
    the meantime, contexts that have not changed are not asked again, even if they have moved.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for each in (path.parent, path):
            check_not_link(each)
        self.done = list(load_lines(path))
        if any(find_wrong_entry(line, ATTEMPT_LINE) for line in self.done):
            raise RestoreKVError(f"{path} is damaged; delete it to ask its contexts again.")
        self.by_document = {tuple(line["context"]): line["attempts"] for line in self.done}

    def find_attempts(self, document: SourceDocument) -> list[dict] | None:
        """Return the attempts at a context, or None if it was not asked about yet."""
        return self.by_document.get(identify_document(document))

    def append_attempts(self, document: SourceDocument, attempts: list[dict]) -> None:
        """Append a line; it is on disk when this returns."""
        identity = identify_document(document)
        entry = {"context": list(identity), "attempts": attempts}
        append_line(self.path, entry)
        self.done.append(entry)
        self.by_document[identity] = attempts


def identify_document(document: SourceDocument) -> tuple[str, ...]:
    """Return the name and 16 hex digits of a hash of the text and of what is asked about it."""
    content = repr((document.text, document.asked, document.studied))
    return document.name, short_hash(content)


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
        if context.text_tokens < self.shortest:
            return "too short"
        if context.text_tokens > self.longest:
            return "too long"
        # Case and punctuation do not make a different text.
        digest = hashlib.sha256(" ".join(split_words(text)).encode()).hexdigest()
        if digest in self.seen:
            return "repeated"
        self.seen.add(digest)
        return context


def compute_longest_context(
    model: PreTrainedModel, tokenizer: Tokenizer, config: BuildConfig
) -> int:
    """Return `config.longest`, or fewer tokens if the model does not have positions for that many
    with a question and an answer.
    """
    positions = count_usable_positions(model)
    # The template around a context, which is the same for every text.
    frame = make_context(tokenizer, "a")
    longest_answer = config.answer_tokens
    if any(source.asked_once for source in select_sources(config)):
        longest_answer = max(longest_answer, config.flan_answer_tokens)
    tail = frame.suffix_ids.shape[-1] + config.question_tokens + longest_answer
    longest = min(config.longest, positions - frame.prefix_length - tail - WORDING_MARGIN)
    if longest < 1:
        option = "answer" if longest_answer == config.answer_tokens else "flan-answer"
        raise RestoreKVError(
            f"The model has only {positions} positions, too few for a context with a question and "
            f"an answer; lower --{option}-tokens."
        )
    return longest


@dataclass
class SourceResult:
    """What one source gave: its examples, and how many rows and attempts were dropped for which
    reason; `overlaps` are the documents that contain an evaluation text, and `made` the names of
    those that were made up here.
    """

    examples: list[dict] = field(default_factory=list)
    read: int = 0
    contexts: int = 0
    units: set[str | int] = field(default_factory=set)
    made: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    overlaps: list[dict] = field(default_factory=list)
    attempts: int = 0
    dropped_attempts: Counter[str] = field(default_factory=Counter)

    def count_units(self, source: Source) -> int:
        """Return how many of the wanted units have been gathered; a book counts as soon as one of
        its chunks was asked about.
        """
        if source.asked_once:
            return len(self.examples)
        return len(self.units)

    def count_given(self) -> int:
        """Return how many examples are about texts that the source gave, not made-up ones."""
        return sum(example["document"] not in self.made for example in self.examples)

    def describe_drops(self) -> str:
        """Return the reasons for dropped rows and attempts with their counts."""
        counts = self.dropped + self.dropped_attempts
        reasons = [f"{count} {reason}" for reason, count in counts.items()]
        return ", ".join(reasons) or "nothing"

    def to_account(self, source: Source) -> dict:
        """Return the counts before and after every filter, for the manifest."""
        return {
            "title": source.title,
            "rows": self.read,
            "dropped": dict(self.dropped),
            "refused": self.overlaps,
            "contexts": self.contexts,
            "attempts": self.attempts,
            "dropped_attempts": dict(self.dropped_attempts),
            "examples": len(self.examples),
            "licenses": dict(Counter(example["license"] for example in self.examples)),
        }


@dataclass(frozen=True)
class SourceBuilder:
    """What the builds of all sources share."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    config: BuildConfig
    evaluations: EvaluationIndex
    longest: int
    progress: OnStep

    def gather_examples(
        self, source: Source, items: Iterator[SourceDocument | DropRow], stored: AttemptFile
    ) -> SourceResult:
        """Ask about the contexts of a source until there are enough.

        Contexts wait until there are `source.at_once` of them, or more if batches are padded, so
        that all their answers are written in one batch.
        """
        result = SourceResult()
        wanted = source.wanted(self.config)
        self_study = SelfStudy(self.model, self.tokenizer, self.config)
        # Progress is counted in chunks, since a book is many contexts.
        steps = wanted
        if source.unit == "books":
            steps = wanted * self.config.chunks
        at_once = source.at_once
        if self_study.pads and not source.asked_once:
            at_once = max(at_once, PADDED_BATCH)
        lengths = LengthFilter(self.tokenizer, source.shortest(self.config), self.longest)
        waiting: list[tuple[SourceDocument, Context]] = []
        for item in items:
            result.read += 1
            accepted = self._accept_item(item, lengths, result)
            if accepted is not None:
                waiting.append(accepted)
            # No more contexts are asked at once than are still wanted.
            missing = max(wanted - result.count_units(source), 1)
            if len(waiting) == min(at_once, missing):
                self._ask_waiting(source, waiting, stored, self_study, result, steps)
            # A book that was begun is finished, even if there are already enough books.
            more_of_a_book = isinstance(item, SourceDocument) and item.more
            if result.count_units(source) >= wanted and not more_of_a_book:
                break
        self._ask_waiting(source, waiting, stored, self_study, result, steps)
        return result

    def _ask_waiting(
        self,
        source: Source,
        waiting: list[tuple[SourceDocument, Context]],
        stored: AttemptFile,
        self_study: SelfStudy,
        result: SourceResult,
        steps: int,
    ) -> None:
        """Ask about all waiting contexts together, add their examples, and empty `waiting`.

        Attempts on disk are reused if all of the contexts have them. Otherwise the whole batch is
        asked again, since a batch with fewer rows may round differently.
        """
        attempts: list[list[dict]] = []
        for document, _ in waiting:
            found = stored.find_attempts(document)
            if found is not None:
                attempts.append(found)
        if len(attempts) < len(waiting):
            if source.asked_once:
                attempts = [self_study.answer_prompt(context) for _, context in waiting]
            else:
                attempts = self_study.study_contexts([(context, item) for item, context in waiting])
            for (document, _), own_attempts in zip(waiting, attempts, strict=True):
                if stored.find_attempts(document) is None:
                    stored.append_attempts(document, own_attempts)
        for (document, context), own_attempts in zip(waiting, attempts, strict=True):
            self._add_examples(source, document, context, own_attempts, result)
            done = len(result.examples) if source.asked_once else result.contexts
            self.progress(min(done, steps), steps, source.title)
        waiting.clear()

    def _accept_item(
        self, item: SourceDocument | DropRow, lengths: LengthFilter, result: SourceResult
    ) -> tuple[SourceDocument, Context] | None:
        """Return a document that passes the filters, with its context, or None.

        Count what is dropped by its reason, and list a document that contains an evaluation text.
        """
        if isinstance(item, DropRow):
            result.dropped[str(item)] += 1
            return None
        context = lengths.check_text(item.text)
        if isinstance(context, str):
            result.dropped[context] += 1
            return None
        match = self.evaluations.find_match(item.text)
        if match is not None:
            text, share = match
            result.dropped["in an evaluation set"] += 1
            result.overlaps.append({"document": item.name, "found in": text, "share": share})
            return None
        return item, context

    def _add_examples(
        self,
        source: Source,
        document: SourceDocument,
        context: Context,
        attempts: list[dict],
        result: SourceResult,
    ) -> None:
        """Add attempts without a fault to the examples, and count the others by their faults."""
        result.contexts += 1
        result.units.add(document.book or result.contexts)
        if document.made:
            result.made.add(document.name)
        result.attempts += len(attempts)
        for attempt in attempts:
            if "fault" in attempt:
                result.dropped_attempts[attempt["fault"]] += 1
                continue
            example = {
                "source": source.name,
                "document": document.name,
                "context": document.text,
                "license": document.license,
                **attempt,
                "context_tokens": context.text_tokens,
                "question_tokens": encode_text(self.tokenizer, attempt["question"]).shape[-1],
                "answer_tokens": len(attempt["answer_ids"]),
            }
            result.examples.append(example)
