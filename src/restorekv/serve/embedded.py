"""The library as an engine: one thread answers, and questions that arrive together share a batch.

A compression in the other thread waits, between two layers of the model, while a batch is answered.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.compression import generate
from restorekv.compression.chat import conversation_ids
from restorekv.compression.context import CompressedContext
from restorekv.compression.sampling import rows_of
from restorekv.compression.several import compose
from restorekv.errors import RestoreKVError
from restorekv.model.observer import HOOKS
from restorekv.model.prompt import usable_positions
from restorekv.model.shape import decoder
from restorekv.serve.caches import ENDING, Asked, Caches
from restorekv.serve.documents import check_size
from restorekv.serve.engine import AwayError, BusyError, Question
from restorekv.serve.store import Store

GATHER = 0.005  # a batch is complete when no question has come for so many seconds, and as many as in the last one
RETURN = 0.05  # of the last batch's seconds, for which those whose questions it answered are waited for
SHARE = 0.25  # of a batch's seconds, which a compression gets before the next batch


@dataclass(kw_only=True)
class AskedHere(Asked):
    """A question whose documents are at hand as one."""

    context: CompressedContext


class Embedded(Caches):
    """Answers questions in batches; at most `waiting` of them are in line."""

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, store: Store, memory: int, waiting: int) -> None:
        super().__init__(model, tokenizer, store, memory)
        self.questions: queue.Queue[Question | None] = queue.Queue(waiting)
        self.last = 0, 0.0  # how many questions the last batch answered, and its seconds
        self.idle = threading.Event()  # cleared while a batch is answered
        self.idle.set()
        self.answering = threading.Thread(target=self.answer_all, name="restorekv-answer", daemon=True)
        with HOOKS:
            self.hooks = [layer.register_forward_pre_hook(self.give_way) for layer in decoder(model).layers]

    def start(self) -> None:
        super().start()
        self.answering.start()

    def close(self) -> None:
        """Answers what waits and ends."""
        super().close()
        self.questions.put(None)
        self.answering.join()
        with HOOKS:
            for hook in self.hooks:
                hook.remove()

    def give_way(self, *_: object) -> None:
        """Lets a batch go first; breaks a compression off where the server ends."""
        if threading.current_thread() is self.compressing:
            self.idle.wait()
            if self.ending:
                raise AwayError(ENDING)

    def ask(self, question: Question) -> Future:
        """See `Engine`."""
        try:
            self.questions.put_nowait(question)
        except queue.Full:
            raise BusyError from None
        return question.done

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `Engine`."""
        counted, now = super().figures()
        return counted, {**now, "questions_waiting": self.questions.qsize()}

    def answer_all(self) -> None:
        """Runs in the thread: one batch after the other, until None is asked."""
        going = True
        while going:
            batch, going = self.gather()
            self.idle.clear()
            started = time.perf_counter()
            ready = [each for each in map(self.prepared, batch) if each]
            if ready:
                self.answer(ready)
            self.idle.set()
            self.last = len(batch), time.perf_counter() - started
            if self.making != ("", ""):
                time.sleep(SHARE * self.last[1])

    def gather(self) -> tuple[list[Question], bool]:
        """Waits for a question, then for those that come with it; returns them, and whether more may come.

        Whoever got an answer often asks again at once, and a batch that lacks few of them takes as long as a full one.
        """
        batch, (before, seconds) = [self.questions.get()], self.last
        until = time.perf_counter() + RETURN * seconds
        while batch[-1] is not None and len(batch) < generate.BATCH:
            left = until - time.perf_counter() if len(batch) < before else 0.0
            try:
                batch.append(self.questions.get(timeout=max(GATHER, left)))
            except queue.Empty:
                break
        return [each for each in batch if each is not None], batch[-1] is not None

    def prepared(self, question: Question) -> AskedHere | None:
        """Returns what `asked` does; None where nobody waits, or where it fails, which is this request's alone."""
        if not question.done.set_running_or_notify_cancel():
            return None
        try:
            return self.asked(question)
        except Exception as error:
            question.done.set_exception(error)
            return None

    def asked(self, question: Question) -> AskedHere:
        """Returns the question with its documents as one, the ids that the model reads, and seeds for its answers."""
        started, contexts = time.perf_counter(), [self.context(each) for each in question.documents]
        whole, most = compose(contexts) if len(contexts) > 1 else contexts[0], usable_positions(self.model)
        said = "".join((question.system, question.text, *(text for turn in question.turns for text in turn)))
        check_size(said, self.tokenizer, most)
        prompt = conversation_ids(self.tokenizer, whole.context, question.turns, question.text, question.system)
        if (left := most - whole.context.positions - len(prompt)) < 1:
            raise RestoreKVError(
                f"Documents and question are longer than the model's {most:,} positions; shorten them."
            )
        question.limit = min(question.limit, left)
        decoding, read = question.decoding, torch.cat([whole.context.ids[0], prompt])[None]
        seeds = [decoding.seed + number for number in range(decoding.samples)]
        rows = rows_of(decoding, self.tokenizer, [read] * len(seeds), seeds, self.stops, always=True)
        for row in rows:
            row.cancelled = lambda: question.cancelled
            row.choose = contained(row.choose, question, next(iter(self.stops), 0))
        return AskedHere(question=question, context=whole, prompt=prompt, rows=rows, started=started)

    def answer(self, asked: Sequence[AskedHere]) -> None:
        """Writes the answers of a batch, in which every row has a seed and settings of its own.

        A question is settled with the last token of its last answer, however long the others take.
        """
        owners = [(each, sample) for each in asked for sample in range(len(each.rows))]
        rows = [row for each in asked for row in each.rows]
        caches, prompts = [each.context.cache for each, _ in owners], [each.prompt for each, _ in owners]
        limits = [each.question.limit for each, _ in owners]
        left = {id(each): len(each.rows) for each in asked}
        try:
            for place, token in generate.tokens(self.model, self.tokenizer, caches, prompts, limits, rows=rows):
                (each, sample), row = owners[place], rows[place]
                each.first = each.first or time.perf_counter()
                if waits(each):
                    each.question.on_token(sample, token, *row.likely)
                left[id(each)] -= token in self.stops or len(row.answer) == limits[place] or row.ends()
                if not left[id(each)] and waits(each):
                    self.reply(each)
            for each in filter(waits, asked):  # those whose client left with the last token
                self.reply(each)
        except Exception as error:  # such as memory that ran out: nobody waits in vain
            for each in filter(waits, asked):
                each.question.done.set_exception(error)

    def reply(self, asked: AskedHere) -> None:
        """Settles a question."""
        manifest, tokens = asked.context.manifest, asked.context.context.positions
        held = manifest.pairs_held, manifest.bytes_held, manifest.seconds
        asked.question.done.set_result(self.replied(asked, tokens, *held))


def waits(asked: Asked) -> bool:
    return not asked.question.done.done()


def contained(choose: Callable[[torch.Tensor], int], question: Question, token: int) -> Callable[[torch.Tensor], int]:
    """Returns a row's `choose` whose errors, such as a grammar's, end its own question and not the batch."""

    def chosen(logits: torch.Tensor) -> int:
        try:
            return choose(logits)
        except Exception as error:
            if not question.done.done():
                question.done.set_exception(error)
            question.cancelled = True
            return token

    return chosen
