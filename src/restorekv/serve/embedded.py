"""The library as an engine: one thread writes all answers, and a question joins the others at their
next token.

Threads of their own get a question ready, which may load its documents from disk, so that those who
are being answered wait for none of it. A compression waits, between two layers of the model, while
a token is written.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.generation import generate
from restorekv.generation.chat import conversation_ids
from restorekv.generation.sampling import rows_of
from restorekv.generation.scheduler import AnswerTask, Event, Scheduler
from restorekv.many_contexts import compose
from restorekv.model.observer import HOOKS_LOCK
from restorekv.model.prompt import count_usable_positions
from restorekv.model.shape import get_backbone
from restorekv.serve.caches import JOIN, Asked, Caches
from restorekv.serve.documents import check_size
from restorekv.serve.engine import ENDING, AwayError, BusyError, Question, settle
from restorekv.serve.store import Store

GATHER = 0.005  # seconds for which the first question waits for others that come with it
SHARE = 0.25  # of the seconds that answers take, which a compression gets
SLICE = 0.05  # seconds that a compression gets at a time
PREPARING = 4  # questions that are got ready at once


@dataclass(kw_only=True)
class AskedHere(Asked):
    """A question whose documents are at hand as one."""

    context: CompressedContext


class Embedded(Caches):
    """Answers up to generate.BATCH questions at a time; at most `waiting` more are in line, and
    hold no document.

    With 0, there is no limit.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer, store: Store, memory: int, waiting: int
    ) -> None:
        super().__init__(model, tokenizer, store, memory)
        self.waiting = waiting
        self.questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        # Held where a question enters the line, and where the line ends.
        self.asking = threading.Lock()
        # One for each question that is got ready or answered.
        self.places = threading.Semaphore(generate.BATCH)
        self.ready: queue.SimpleQueue[AskedHere | None] = queue.SimpleQueue()
        self.scheduler = Scheduler(model, self.stops)
        self.idle = threading.Event()  # cleared while a pass of the model writes tokens
        self.idle.set()
        self.owed = 0.0  # seconds that a compression is to get
        self.answering = threading.Thread(
            target=self.answer_all, name="restorekv-answer", daemon=True
        )
        self.preparing = [
            threading.Thread(target=self.prepare_all, name="restorekv-prepare", daemon=True)
            for _ in range(PREPARING)
        ]
        with HOOKS_LOCK:
            self.hooks = [
                layer.register_forward_pre_hook(self.give_way)
                for layer in get_backbone(model).layers
            ]

    def start(self) -> None:
        super().start()
        for thread in (self.answering, *self.preparing):
            thread.start()

    def end(self) -> None:
        """See `Engine`."""
        super().end()
        with self.asking:
            while not self.questions.empty():
                question = self.questions.get_nowait()
                if question:
                    settle(question.done, error=AwayError(ENDING))
            for _ in self.preparing:
                self.questions.put(None)
                self.places.release()

    def close(self) -> None:
        """Ends; what is still being answered gets an error."""
        super().close()
        self.ready.put(None)
        self.answering.join(JOIN)
        with HOOKS_LOCK:
            for hook in self.hooks:
                hook.remove()

    def give_way(self, *_: object) -> None:
        """Lets a token be written first; breaks a compression off where the server ends."""
        if threading.current_thread() is self.compressing:
            if not self.ending:
                self.idle.wait()
            if self.ending:
                raise AwayError(ENDING)

    def ask(self, question: Question) -> Future:
        """See `Engine`."""
        with self.asking:
            if self.ending:
                raise AwayError(ENDING)
            if self.waiting and self.questions.qsize() >= self.waiting:
                raise BusyError
            self.questions.put(question)
        return question.done

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `Engine`."""
        counted, now = super().figures()
        own = {
            "questions_waiting": self.questions.qsize(),
            "questions_answering": len(self.scheduler.tasks),
            "longest_wait_steps": self.scheduler.longest_wait,
        }
        return {**counted, "steps": self.scheduler.steps}, {**now, **own}

    def prepare_all(self) -> None:
        """Runs in some threads: gets questions ready while there are places, until None is asked."""
        while True:
            self.places.acquire()
            question = self.questions.get()
            if question is None:
                return
            asked = self.prepared(question)
            if asked:
                self.ready.put(asked)
            else:
                self.places.release()

    def prepared(self, question: Question) -> AskedHere | None:
        """Returns what `asked` does; None where nobody waits, or where it fails, which is this
        request's alone.
        """
        if question.done.done() or not question.done.set_running_or_notify_cancel():
            return None
        try:
            if self.ending:
                raise AwayError(ENDING)
            return self.asked(question)
        except Exception as error:
            settle(question.done, error=error)
            return None

    def answer_all(self) -> None:
        """Runs in the thread: one step after the other, until None is ready."""
        while self.take_ready():
            self.idle.clear()
            started = time.perf_counter()
            try:
                for event in self.scheduler.step():
                    self.deliver(event)
            except Exception as error:  # nobody waits in vain
                self.give_up(error)
            self.share(time.perf_counter() - started)
        self.give_up(AwayError(ENDING))
        self.idle.set()

    def take_ready(self) -> bool:
        """Admits the questions that are ready; with nothing to do, waits for one. Returns whether
        more may come.
        """
        if not self.scheduler.busy:
            self.idle.set()
            asked = self.ready.get()
            while asked is not None:  # those that come together are read together
                self.admit(asked)
                try:
                    asked = self.ready.get(timeout=GATHER)
                except queue.Empty:
                    return True
            return False
        while not self.ready.empty():
            asked = self.ready.get()
            if asked is None:
                return False
            self.admit(asked)
        return True

    def admit(self, asked: AskedHere) -> None:
        """Hands a question to the scheduler."""
        question = asked.question
        task = AnswerTask(
            asked.context.cache,
            asked.prompt,
            question.limit,
            asked.rows,
            label=asked,
            cancelled=lambda: question.cancelled or question.done.done(),
        )
        self.scheduler.admit(task)

    def deliver(self, event: Event) -> None:
        """Passes a token on; with its last one, a question is settled and gives its place to
        another.
        """
        asked: AskedHere = event.task.label
        question = asked.question
        try:
            if event.error:
                settle(question.done, error=event.error)
            elif event.token is not None:
                asked.first = asked.first or time.perf_counter()
                question.on_token(event.sample, event.token, *event.likely)
            if event.done and not question.done.done():
                self.reply(asked)
        except Exception as error:  # such as an event loop that has ended
            question.cancelled = True
            settle(question.done, error=error)
        finally:
            if event.done:
                self.places.release()

    def give_up(self, error: Exception) -> None:
        """Ends all questions with an error."""
        for task in (*self.scheduler.tasks, *self.scheduler.line):
            settle(task.label.question.done, error=error)
            self.places.release()
        self.scheduler = Scheduler(self.model, self.stops)

    def share(self, seconds: float) -> None:
        """Gives a compression its share of the time, after a step that took so many seconds."""
        self.owed = self.owed + SHARE * seconds if self.making != ("", "") else 0.0
        if self.owed >= SLICE:
            self.idle.set()
            time.sleep(self.owed)
            self.owed = 0.0

    def asked(self, question: Question) -> AskedHere:
        """Returns the question with its documents as one, the ids that the model reads, and seeds
        for its answers.
        """
        started = time.perf_counter()
        contexts = [self.context(each) for each in question.documents]
        whole = compose(contexts) if len(contexts) > 1 else contexts[0]
        most = count_usable_positions(self.model)
        said = "".join(
            (question.system, question.text, *(text for turn in question.turns for text in turn))
        )
        check_size(said, self.tokenizer, most)
        prompt = conversation_ids(
            self.tokenizer, whole.context, question.turns, question.text, question.system
        )
        if (left := most - whole.context.positions - len(prompt)) < 1:
            raise RestoreKVError(
                f"Documents and question are longer than the model's {most:,} positions; shorten them."
            )
        question.limit = min(question.limit, left)
        decoding = question.decoding
        read = torch.cat([whole.context.ids[0], prompt])[None]
        seeds = [decoding.seed + number for number in range(decoding.samples)]
        rows = rows_of(
            decoding, self.tokenizer, [read] * len(seeds), seeds, self.stops, always=True
        )
        return AskedHere(
            question=question, context=whole, prompt=prompt, rows=rows, started=started
        )

    def reply(self, asked: AskedHere) -> None:
        """Settles a question."""
        manifest = asked.context.manifest
        tokens = asked.context.context.positions
        held = manifest.pairs_held, manifest.bytes_held, manifest.seconds
        settle(asked.question.done, self.replied(asked, tokens, *held))
