"""One source at a time: contexts that pass the filters, what the teacher asks and answers, and every count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.data.config import BuildConfig
from restorekv.data.document import Document, Dropped
from restorekv.data.filters import Lengths
from restorekv.data.overlap import Evaluations
from restorekv.data.parts import Parts
from restorekv.data.selfstudy import reply, study
from restorekv.data.sources import Source
from restorekv.model.prompt import Context, encode

Progress = Callable[[int, int, str], None]


@dataclass
class Gathered:
    """What one source gave: its examples, and how many rows and attempts were dropped for which reason."""

    examples: list[dict] = field(default_factory=list)
    read: int = 0
    contexts: int = 0
    units: set = field(default_factory=set)
    dropped: Counter = field(default_factory=Counter)
    refused: list[dict] = field(default_factory=list)
    attempts: int = 0
    faults: Counter = field(default_factory=Counter)

    def reached(self, source: Source) -> int:
        """Of what is wanted of the source; a book counts if one of its chunks was asked about."""
        return len(self.examples) if source.asked_once else len(self.units)

    def reasons(self) -> str:
        """What was dropped, in words."""
        return ", ".join(f"{count} {reason}" for reason, count in (self.dropped + self.faults).items()) or "nothing"


@dataclass(frozen=True)
class Builder:
    """Everything that the sources share."""

    model: PreTrainedModel
    tokenizer: Tokenizer
    config: BuildConfig
    evaluations: Evaluations
    longest: int
    progress: Progress

    def gather(self, source: Source, found: Iterator[Document | Dropped], parts: Parts) -> Gathered:
        """Asks about the contexts of a source until there is enough of it."""
        got, wanted = Gathered(), source.wanted(self.config)
        steps = wanted * (self.config.chunks if source.unit == "books" else 1)
        lengths = Lengths(self.tokenizer, source.shortest(self.config), self.longest)
        for item in found:
            got.read += 1
            if context := self.usable(item, lengths, got):
                attempts = parts.get(got.contexts, item)
                if attempts is None:
                    ask = reply if source.asked_once else study
                    attempts = ask(self.model, self.tokenizer, context, self.config, item)
                    parts.add(item, attempts)
                self.take(source, item, context, attempts, got)
                done = len(got.examples) if source.asked_once else got.contexts
                self.progress(min(done, steps), steps, source.title)
            more_of_a_book = isinstance(item, Document) and item.more
            if got.reached(source) >= wanted and not more_of_a_book:
                break
        return got

    def usable(self, item: Document | Dropped, lengths: Lengths, got: Gathered) -> Context | None:
        """The context of a document that passes; what does not is counted, and named if it is an evaluation text."""
        checked = item.reason if isinstance(item, Dropped) else lengths.check(item.text)
        if isinstance(checked, str):
            got.dropped[checked] += 1
            return None
        match = self.evaluations.match(item.text)
        if match:
            got.dropped["in an evaluation set"] += 1
            got.refused.append({"document": item.name, "found in": match[0], "share": match[1]})
            return None
        return checked

    def take(self, source: Source, item: Document, context: Context, attempts: list[dict], got: Gathered) -> None:
        """Attempts without a fault become examples."""
        got.contexts += 1
        got.units.add(item.book or got.contexts)
        got.attempts += len(attempts)
        got.faults.update(attempt["fault"] for attempt in attempts if "fault" in attempt)
        shared = {"source": source.name, "document": item.name, "context": item.text, "licence": item.licence}
        for attempt in attempts:
            if "fault" not in attempt:
                counts = {
                    "context_tokens": context.tokens,
                    "question_tokens": encode(self.tokenizer, attempt["question"]).shape[-1],
                    "answer_tokens": len(attempt["answer_ids"]),
                }
                got.examples.append({**shared, **attempt, **counts})


def account(source: Source, got: Gathered) -> dict:
    """The counts of one source, before and after every filter."""
    return {
        "title": source.title,
        "rows": got.read,
        "dropped": dict(got.dropped),
        "refused": got.refused,
        "contexts": got.contexts,
        "attempts": got.attempts,
        "dropped_attempts": dict(got.faults),
        "examples": len(got.examples),
        "licences": dict(Counter(example["licence"] for example in got.examples)),
    }
