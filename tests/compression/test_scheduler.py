"""Answers do not depend on what else runs: questions come, are read in pieces, pause, fail and leave at random."""

import random

import pytest
import torch

from restorekv import compress
from restorekv.compression import generate, scheduler
from restorekv.compression.constraint import Constraint
from restorekv.compression.sampling import Decoding, rows_of
from restorekv.compression.scheduler import AnswerTask, Scheduler
from restorekv.model.prompt import question_ids
from tests.helpers.models import build_model

WORDS = "the code of the red house is seven and who lives in the blue house with a green door".split()
OPTIONS = (
    {}, {}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "seed": 8, "top_p": 0.9, "logprobs": 2},
    {"logprobs": 3}, {"samples": 3, "temperature": 1.0, "seed": 5}, {"samples": 6, "seed": 1, "temperature": 2.0},
    {"stop": ("e", "th")}, {"repetition_penalty": 1.3}, {"min_p": 0.1, "temperature": 1.5, "samples": 2},
)  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def world(request, tiny_tokenizer):
    """A model, its tokenizer, and documents of which the heads keep different numbers of pairs."""
    model = build_model(request.param)
    texts = [" ".join(WORDS * (2 + 3 * number)) for number in range(4)]
    ratios = (0.3, 0.6, 1, 0.2)
    documents = [
        compress(model, tiny_tokenizer, text, ratio=ratio, adapter=None, **more)
        for text, ratio, more in zip(texts, ratios, ({}, {"evictor": "snapkv"}, {}, {"storage": "int8"}), strict=True)
    ]
    return model, tiny_tokenizer, documents


class Asked:
    """A question with its options, and what came of it."""

    def __init__(self, world, document, words, limit, options):
        self.model, self.tokenizer, documents = world
        self.document = documents[document]
        self.question = " ".join(words)
        self.limit = limit
        self.options = options
        self.decoding = Decoding.make(**options)
        self.cancelled = False
        self.tokens = [[] for _ in range(self.decoding.samples)]
        self.done = None
        self.error = None

    def task(self):
        prompt = question_ids(self.tokenizer, self.document.context, self.question)[0]
        read = torch.cat([self.document.context.ids[0], prompt])[None]
        samples = self.decoding.samples
        seeds = [self.decoding.seed + number for number in range(samples)]
        stops = generate.stop_ids(self.model, self.tokenizer)
        self.rows = rows_of(self.decoding, self.tokenizer, [read] * samples, seeds, stops, always=True)
        self.made = AnswerTask(
            self.document.cache, prompt, self.limit, self.rows, cancelled=lambda: self.cancelled, label=self
        )
        return self.made

    def expected(self):
        found = self.document.ask(self.question, self.limit, details=True, **self.options)
        return found if isinstance(found, list) else [found]

    def check(self):
        """The answers are the library's own, in every token and, but for the last bits, every log-probability."""
        for sample, answer in enumerate(self.expected()):
            assert self.tokens[sample] == list(answer.ids) == self.rows[sample].answer
            if answer.logprobs is not None:
                assert self.rows[sample].logprobs == pytest.approx(answer.logprobs, abs=1e-4)


def random_question(world, chance, longest):
    words = [chance.choice(WORDS) for _ in range(chance.choice((1, 3, 8, 20, longest)))]
    options = chance.choice(OPTIONS)
    return Asked(world, chance.randrange(4), words, chance.choice((1, 2, 5, 12, 25)), options)


def run(engine, arriving, each_step=lambda step: None, longest=2000):
    """Admit questions at their steps and step until all is done; returns every event."""
    events, step = [], 0
    while arriving or engine.busy:
        for asked in arriving.pop(step, ()):
            engine.admit(asked.task())
        each_step(step)
        for event in engine.step():
            asked = event.task.label
            assert asked.done is None
            if event.token is not None:
                asked.tokens[event.sample].append(event.token)
                asked.first = getattr(asked, "first", step)
            asked.error = asked.error or event.error
            asked.done = step if event.done else None
            events.append((step, event))
        rows = [row for group in engine.running for row in group.rows]
        assert len(rows) <= 2 * engine.most and len(engine.tasks) <= engine.most
        step += 1
        assert step < longest
    assert not engine.running and not engine.joining and not engine.active_rows
    return events


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_librarys_own_whatever_joins_and_leaves(world, seed):
    chance = random.Random(seed)
    engine = Scheduler(world[0], generate.stop_ids(*world[:2]), most=chance.choice((1, 2, 4, 16)), piece=chance.choice((8, 40, 256)))
    arriving, every = {}, []
    for _ in range(14):
        every.append(random_question(world, chance, 90))
        arriving.setdefault(chance.choice((0, 0, chance.randrange(30))), []).append(every[-1])
    gone = {id(each): chance.randrange(40) for each in every if chance.random() < 0.2}

    def leave(step):
        for each in every:
            if gone.get(id(each)) == step and each.done is None:
                each.cancelled = True

    run(engine, arriving, leave)
    assert all(each.done is not None and each.error is None for each in every)
    left = [each for each in every if each.cancelled]
    for each in every:
        if each in left:
            for sample, answer in enumerate(each.expected()):
                assert list(answer.ids)[: len(each.tokens[sample])] == each.tokens[sample]
        else:
            each.check()
