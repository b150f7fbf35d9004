"""Answers do not depend on what else runs: questions come, are prefilled in chunks, are
preempted, fail and leave at random.
"""

import random

import pytest
import torch

from restorekv.cache.ragged import list_tails
from restorekv.generation import decoding, scheduler
from restorekv.generation.sampling import SamplingConfig, make_samplers
from restorekv.generation.scheduler import Request, Scheduler
from restorekv.model.prompt import encode_question
from tests.helpers.compressing import compress_with
from tests.helpers.hybrids import WITH_STATES, build_hybrid
from tests.helpers.models import build_model

WORDS = (
    "the code of the red house is seven and who lives in the blue house with a green door".split()
)
OPTIONS = (
    {},
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 8, "top_p": 0.9, "logprobs": 2},
    {"logprobs": 3},
    {"samples": 3, "temperature": 1.0, "seed": 5},
    {"samples": 6, "seed": 1, "temperature": 2.0},
    {"stop": ("e", "th")},
    {"repetition_penalty": 1.3},
    {"min_p": 0.1, "temperature": 1.5, "samples": 2},
)


# Of the others, Granite's random model writes the id that ends no answer here.
OF_STATES = [kind for kind in WITH_STATES if kind in ("qwen3_5_text", "lfm2", "nemotron_h")]


# A model with pairs alone, one with windows, and one with states; the others at night.
MODELS = ["qwen3", "gemma3", *OF_STATES[:1]]
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", *OF_STATES[1:])]


@pytest.fixture(scope="module", params=[*MODELS, *OTHERS])
def world(request, tiny_tokenizer):
    """A model, its tokenizer, and documents with heads that keep different numbers of pairs."""
    has_states = request.param in WITH_STATES
    model = build_hybrid(request.param) if has_states else build_model(request.param)
    texts = [" ".join(WORDS * (2 + 3 * number)) for number in range(4)]
    ratios = (0.3, 0.6, 1, 0.2)
    documents = [
        compress_with(model, tiny_tokenizer, text, ratio=ratio, adapter=None, **more)
        for text, ratio, more in zip(
            texts, ratios, ({}, {"evictor": "snapkv"}, {}, {"kv_dtype": "int8"}), strict=True
        )
    ]
    return model, tiny_tokenizer, documents


class Asked:
    """A question with its options, and the answers that the scheduler wrote."""

    def __init__(self, world, document, words, limit, options):
        self.model, self.tokenizer, documents = world
        self.document = documents[document]
        self.question = " ".join(words)
        self.limit = limit
        self.options = options
        self.sampling = SamplingConfig.make(**options)
        self.cancelled = False
        self.tokens = [[] for _ in range(self.sampling.samples)]
        self.done = None
        self.error = None

    def make_request(self):
        prompt = encode_question(self.tokenizer, self.document.context, self.question)[0]
        read = torch.cat([self.document.context.ids[0], prompt])[None]
        samples = self.sampling.samples
        seeds = [self.sampling.seed + number for number in range(samples)]
        stops = decoding.get_stop_ids(self.model, self.tokenizer)
        self.rows = make_samplers(
            self.sampling, self.tokenizer, [read] * samples, seeds, stops, always=True
        )
        self.request = Request(
            self.document.cache,
            prompt,
            self.limit,
            self.rows,
            cancelled=lambda: self.cancelled,
            label=self,
        )
        return self.request

    def expected(self):
        found = self.document.ask(self.question, self.limit, details=True, **self.options)
        return found if isinstance(found, list) else [found]

    def check(self):
        """Check that the answers are those of `ask`: every token and, except for the last bits,
        every log-probability.
        """
        for sample, answer in enumerate(self.expected()):
            assert self.tokens[sample] == list(answer.ids) == self.rows[sample].answer
            if answer.logprobs is not None:
                assert self.rows[sample].logprobs == pytest.approx(answer.logprobs, abs=1e-4)


def random_question(world, chance, longest):
    words = [chance.choice(WORDS) for _ in range(chance.choice((1, 3, 8, 20, longest)))]
    options = chance.choice(OPTIONS)
    return Asked(world, chance.randrange(4), words, chance.choice((1, 2, 5, 12, 25)), options)


def run(engine, arriving, each_step=lambda step: None, longest=2000):
    """Admit questions at their steps and step until all are answered; return every output."""
    outputs, step = [], 0
    while arriving or engine.busy:
        for asked in arriving.pop(step, ()):
            engine.admit(asked.make_request())
        each_step(step)
        for output in engine.step():
            asked = output.request.label
            assert asked.done is None
            if output.token is not None:
                asked.tokens[output.sample].append(output.token)
                asked.first = getattr(asked, "first", step)
            asked.error = asked.error or output.error
            asked.done = step if output.done else None
            outputs.append((step, output))
        rows = [row for group in engine.running for row in group.rows]
        assert len(rows) <= 2 * engine.max_rows and len(engine.active_requests) <= engine.max_rows
        step += 1
        assert step < longest
    assert not engine.running and not engine.joining and not engine.active_rows
    return outputs


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_the_librarys_own_whatever_joins_and_leaves(world, seed):
    chance = random.Random(seed)
    max_rows, prefill_chunk = chance.choice((1, 2, 4, 16)), chance.choice((8, 40, 256))
    stop_ids = decoding.get_stop_ids(*world[:2])
    engine = Scheduler(world[0], stop_ids, max_rows, prefill_chunk)
    arriving, every = {}, []
    for _ in range(9):
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


def scheduler_of(world, **more):
    return Scheduler(world[0], {319}, **more)


def endless(world, document, words=3, limit=40, **options):
    """Return a question with an answer of exactly `limit` tokens: nothing else ends it."""
    world[0].generation_config.eos_token_id = 319
    return Asked(world, document, (WORDS * 60)[:words], limit, options)


@pytest.fixture(autouse=True)
def usual_stops(world):
    before = world[0].generation_config.eos_token_id
    yield
    world[0].generation_config.eos_token_id = before


@pytest.mark.parametrize("words", [3, 120])
def test_a_late_question_gets_its_first_token_within_three_steps_and_its_own_prefill(world, words):
    engine = scheduler_of(world, prefill_chunk=64)
    streams = [endless(world, number % 4) for number in range(8)]
    late = endless(world, 0, words, limit=4)
    run(engine, {0: streams, 20: [late]})
    own = -(-len(late.request.prompt) // 64)
    assert (own == 1) == (words == 3)
    assert late.first - 20 < 3 + own and late.done < min(each.done for each in streams)
    assert engine.longest_wait <= 3
    for each in (late, *streams):
        each.check()


def test_a_long_question_costs_the_others_one_chunk_a_step(world):
    engine = scheduler_of(world, prefill_chunk=32)
    stream, long = endless(world, 0), endless(world, 1, words=300, limit=3)
    sizes = []
    hook = world[0].register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    with hook:
        outputs = run(engine, {0: [stream], 5: [long]})
    steps = []
    for step, output in outputs:
        if output.request.label is stream and output.token is not None:
            steps.append(step)
    assert steps == list(range(len(steps))) and len(steps) > 30  # a token in every step
    assert max(sizes) <= 32 + 2 and long.first - 5 >= len(long.request.prompt) // 32
    long.check()


def test_long_questions_starve_no_short_one_and_short_ones_no_long_one(world):
    engine = scheduler_of(world, prefill_chunk=64)
    long = [endless(world, number % 4, words=300, limit=2) for number in range(4)]
    short = {step: [endless(world, 1, limit=2)] for step in range(2, 40)}
    run(engine, {0: long, **short})
    assert all(asked.first - step <= 3 for step, (asked,) in short.items())
    assert long[0].first <= 2 * len(long[0].request.prompt) / 64 + 3
    for each in (*long, short[9][0]):
        each.check()


def test_samples_of_one_question_leave_rows_to_others(world):
    engine = scheduler_of(world, max_rows=4)
    many = endless(world, 0, samples=12, temperature=1.0, limit=20)
    late = [endless(world, number, limit=5) for number in range(3)]
    run(engine, {0: [many], 6: late})
    assert all(each.first - 6 <= 3 and each.done <= 15 for each in late)
    for each in (many, *late):
        each.check()


def test_more_questions_than_rows_wait_in_line_and_begin_in_order(world):
    engine = scheduler_of(world, max_rows=2)
    every = [endless(world, number % 4, limit=6) for number in range(6)]
    run(engine, {0: every})
    firsts = [each.first for each in every]
    assert firsts == sorted(firsts) and firsts[-1] > 10
    for each in every:
        each.check()


def test_an_error_in_a_row_ends_its_own_question(world):
    engine = scheduler_of(world)
    every = [endless(world, 0, limit=9) for _ in range(3)] + [
        endless(world, 0, limit=9, samples=3, temperature=1.0)
    ]
    broken = [every[1], every[3]]

    def break_rows(step):
        for each in broken if step == 3 else ():

            def sample(_):
                raise ValueError("the grammar gave up")

            each.rows[-1].sample = sample

    run(engine, {0: every}, break_rows)
    assert [str(each.error) for each in broken] == ["the grammar gave up"] * 2
    for each in every:
        if each not in broken:
            each.check()


def test_what_fails_while_a_question_is_prefilled_harms_no_other(world):
    """Such as memory that runs out."""
    engine = scheduler_of(world, prefill_chunk=32)
    stream, long = endless(world, 0, limit=30), endless(world, 1, words=300, limit=3)

    def fail(_, inputs, given):
        if given["input_ids"].shape[1] > 30 and engine.steps > 8:
            raise MemoryError("no more memory")

    with world[0].register_forward_pre_hook(fail, with_kwargs=True):
        run(engine, {0: [stream], 5: [long]})
    assert isinstance(long.error, MemoryError) and stream.error is None
    stream.check()


def test_a_pass_that_fails_in_the_middle_is_taken_back(world):
    """Some layers have the new tokens by then, others have not."""
    engine = scheduler_of(world, prefill_chunk=32)
    stream, long = endless(world, 2, limit=30), endless(world, 1, words=300, limit=3)

    def fail(_, args):
        if args[0].shape[1] > 30 and engine.steps > 8:
            raise MemoryError("no more memory")

    with world[0].model.layers[1].register_forward_pre_hook(fail):
        run(engine, {0: [stream], 5: [long]})
    assert isinstance(long.error, MemoryError) and stream.error is None
    stream.check()


def test_logits_that_cannot_be_kept_cost_other_answers_nothing(world, monkeypatch):
    """Logits are kept for further samples of a question, and memory may run out just then."""
    engine = scheduler_of(world)
    stream = endless(world, 0, limit=30)
    several = endless(world, 1, limit=5, samples=2, temperature=1.0)

    def write_tokens(*given, on_logits):
        def fail(group, logits):
            if engine.steps > 3 and group not in engine.running:
                raise MemoryError("no more memory")
            on_logits(group, logits)

        return decoding.write_tokens(*given, on_logits=fail)

    monkeypatch.setattr(scheduler, "write_tokens", write_tokens)
    run(engine, {0: [stream], 5: [several]})
    assert isinstance(several.error, MemoryError) and stream.error is None
    stream.check()


def test_who_leaves_frees_memory_at_the_next_step(world):
    engine = scheduler_of(world)
    gone, stays = endless(world, 0, words=200), endless(world, 0)
    prefilling, waits = endless(world, 1, words=300), endless(world, 1)

    def leave(step):
        if step == 12:
            for each in (gone, prefilling, waits):
                each.cancelled = True
        if step == 14:
            widths = [list_tails(group.layers)[0].columns for group in engine.running]
            assert len(engine.active_requests) == 1 and max(widths) < 120

    run(engine, {0: [gone, stays], 11: [prefilling], 12: [waits]}, leave)
    assert gone.done == prefilling.done == waits.done == 12 and not waits.tokens[0]
    stays.check()


def test_who_leaves_after_the_first_token_writes_no_second(world):
    """After the first token, the row of an answer waits to join the next pass."""
    engine = scheduler_of(world)
    gone, stays = endless(world, 0), endless(world, 0, limit=5)

    def leave(step):
        if step == 1:
            assert [selection.rows[0].request.label for selection in engine.joining] == [
                gone,
                stays,
            ]
            gone.cancelled = True

    run(engine, {0: [gone, stays]}, leave)
    assert gone.done == 1 and len(gone.tokens[0]) == 1
    stays.check()


def test_a_pass_that_decodes_and_fails_ends_whatever_it_decoded(world):
    engine = scheduler_of(world)
    both = [endless(world, 0), endless(world, 1, samples=2, temperature=1.0)]
    later = endless(world, 0, limit=4)

    def fail(_, args):
        if engine.steps == 4:
            raise MemoryError("no more memory")

    with world[0].model.layers[1].register_forward_pre_hook(fail):
        run(engine, {0: both, 6: [later]})
    for each in both:
        assert isinstance(each.error, MemoryError) and each.done == 4
    later.check()


def test_rows_of_one_context_share_tails_unless_that_costs_too_much(world):
    engine = scheduler_of(world, prefill_chunk=512)
    every = [endless(world, 0, words=3 + number) for number in range(5)]
    long = endless(world, 0, words=400)
    groups = []
    run(
        engine,
        {0: [*every[:3], long], 7: every[3:]},
        lambda step: groups.append([len(g.rows) for g in engine.running]),
    )
    assert sorted(groups[20]) == [1, 5]
    for each in (*every, long):
        each.check()
