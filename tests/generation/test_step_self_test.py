"""CUDA graphs and offloading streams that are wrong on purpose, on a CPU that acts as a GPU:
answers stay right.
"""

import warnings

import pytest
import torch

from restorekv import CompressionConfig
from restorekv.errors import RestoreKVWarning
from restorekv.evictors import attend, pass_self_test
from restorekv.generation import decoding, fixed_steps, step_self_test
from restorekv.generation.answers import answer_greedily, answer_questions
from restorekv.generation.sampling import SamplingConfig
from restorekv.model import offload
from restorekv.model.attention import backend_self_test, blocked, dispatch, reference, self_tests
from restorekv.model.attention.self_tests import Target
from restorekv.model.offload import HostStore
from restorekv.model.prefill import prefill
from restorekv.model.prompt import make_context
from restorekv.model.shape import CacheShape
from restorekv.pipeline import compress
from tests.helpers import fake_device
from tests.helpers.decoding import QUESTIONS, TEXT, make_cache
from tests.helpers.fake_device import FakeGraph
from tests.helpers.models import build_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TARGET = Target(torch.device("cpu"), 2, 2, 16, torch.float32)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    fake_device.install(monkeypatch, tmp_path)
    monkeypatch.setattr(
        dispatch,
        "BACKENDS_BY_SPEED",
        {name: dispatch.BACKENDS_BY_SPEED[name] for name in ("cascade", "autograd", "reference")},
    )
    monkeypatch.setattr(attend, "triton_maxima", None)
    yield monkeypatch
    self_tests.forget_self_tests()


@pytest.fixture
def case(tiny_tokenizer):
    model = build_model("qwen3", num_hidden_layers=2)
    context = make_context(tiny_tokenizer, TEXT)
    return model, tiny_tokenizer, context, make_cache(model, context)


# Graphs


def stale(self):
    """Replay nothing."""


def part_of(first, last):
    """Return a replay that runs only the operations from `first` to `last`."""

    def replay(self, whole=FakeGraph.replay):
        calls, self.calls = self.calls, self.calls[first:last]
        whole(self)
        self.calls = calls

    return replay


def of_the_capture(self, whole=FakeGraph.replay):
    """Replay with the integer inputs of the first replay, whatever they are by now."""
    self.inputs = getattr(self, "inputs", None) or [
        [x.clone() if isinstance(x, torch.Tensor) and x.dtype == torch.long else x for x in args]
        for _, args, _, _ in self.calls
    ]
    calls = self.calls
    self.calls = [
        (f, old, more, made) for (f, _, more, made), old in zip(calls, self.inputs, strict=True)
    ]
    whole(self)
    self.calls = calls


REPLAYS = [stale, part_of(0, -4), part_of(4, None), of_the_capture]


def test_graphs_that_are_right_are_used(fake, case):
    plain = answer_greedily(*case, QUESTIONS[:3], [4, 20, 20], graph=False)
    assert answer_greedily(*case, QUESTIONS[:3], [4, 20, 20], graph=True) == plain
    assert FakeGraph.captured == 3  # two cases, and the model
    assert case[0] in fixed_steps.GRAPHED
    assert answer_greedily(*case, QUESTIONS[:2], 9, graph=True) == answer_greedily(
        *case, QUESTIONS[:2], 9, graph=False
    )
    assert FakeGraph.captured == 4


def test_greedy_answers_on_a_gpu_use_a_graph_unless_told_otherwise(fake, case):
    model, tokenizer, context, cache = case
    asked = [(context, cache, question) for question in QUESTIONS[:2]]
    plain = answer_questions(model, tokenizer, asked, 20, graph=False)
    sampled = SamplingConfig.make(temperature=0.5, seed=3)
    answer_questions(model, tokenizer, asked, 20, sampling=sampled)
    assert FakeGraph.captured == 0
    assert answer_questions(model, tokenizer, asked, 20) == plain
    assert FakeGraph.captured and model in fixed_steps.GRAPHED


@pytest.mark.parametrize("replay", REPLAYS)
def test_a_graph_that_is_wrong_is_not_used(fake, case, replay):
    plain = answer_greedily(*case, QUESTIONS[:3], [4, 20, 20], graph=False)
    fake.setattr(FakeGraph, "replay", replay)
    with pytest.warns(RestoreKVWarning, match="CUDA graphs cannot be used on Fake 9000") as told:
        assert answer_greedily(*case, QUESTIONS[:3], [4, 20, 20], graph=True) == plain
    assert len(told) == 1 and FakeGraph.captured == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer_greedily(*case, QUESTIONS[:3], [4, 20, 20], graph=True) == plain
    assert FakeGraph.captured == 1


@pytest.mark.parametrize("replay", REPLAYS)
def test_a_model_whose_replays_are_wrong_steps_as_usual(fake, case, replay):
    """The small decoder's graphs are right, and this model's are not."""
    assert self_tests.run_cases(self_tests.COMPONENTS["graph"], TARGET).passed
    fake.setattr(decoding, "can_graph", lambda model, device: True)
    plain = answer_greedily(*case, QUESTIONS[:3], 20, graph=False)
    fake.setattr(FakeGraph, "replay", replay)
    with pytest.warns(
        RestoreKVWarning, match="Qwen3ForCausalLM is not run as a CUDA graph"
    ) as told:
        assert answer_greedily(*case, QUESTIONS[:3], 20, graph=True) == plain
    assert len(told) == 1 and case[0] in fixed_steps.NEVER_GRAPHED
    captured = FakeGraph.captured
    assert (
        answer_greedily(*case, QUESTIONS[:3], 20, graph=True) == plain
        and FakeGraph.captured == captured
    )


def test_a_model_whose_second_replay_is_stale_is_found(fake, case):
    fake.setattr(decoding, "can_graph", lambda model, device: True)
    plain, count, right = (
        answer_greedily(*case, QUESTIONS[:3], 20, graph=False),
        [0],
        FakeGraph.replay,
    )

    def replay(self):
        count[0] += 1
        if count[0] == 1:
            right(self)

    fake.setattr(FakeGraph, "replay", replay)
    with pytest.warns(RestoreKVWarning, match="not run as a CUDA graph"):
        assert answer_greedily(*case, QUESTIONS[:3], 20, graph=True) == plain
    assert count == [2]


def test_a_model_that_cannot_be_captured_steps_as_usual(fake, case):
    fake.setattr(decoding, "can_graph", lambda model, device: True)
    plain = answer_greedily(*case, QUESTIONS[:3], 20, graph=False)

    def refused(self):
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    with fake.context() as capturing:
        capturing.setattr(fixed_steps.FixedSteps, "capture", refused)
        with pytest.warns(
            RestoreKVWarning, match=r"cannot be captured \(RuntimeError: CUDA error: operation not"
        ) as told:
            assert answer_greedily(*case, QUESTIONS[:3], 20, graph=True) == plain
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answer_greedily(*case, QUESTIONS[:3], 20, graph=True) == plain
    assert not FakeGraph.captured


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (3, 3, 64), (4, 2, 33)])
def test_steps_pass_their_self_test_in_every_shape(shape, dtype):
    found = self_tests.run_cases(
        self_tests.COMPONENTS["graph"], Target(torch.device("cpu"), *shape, dtype)
    )
    assert found.passed and found.cases == 4 * step_self_test.STEPS, found


# Offloading


def no_wait(self):
    """Do not wait for the second stream."""


def late_wait(fake):
    """Return the first version of `append_pairs`, which joined new pairs to a layer that was still
    being copied.
    """
    append = HostStore.append_pairs

    def broken(self, layer, new):
        with fake.context() as unwaited:
            if layer.length != new[0].shape[-2] and layer.index in self.on_device:
                unwaited.setattr(self, "wait", lambda: None)
                pair = self.on_device.pop(layer.index)
                self.on_device[layer.index] = tuple(
                    torch.cat(each, 2) for each in zip(pair, new, strict=True)
                )
                unwaited.undo()
                return self.load(layer)
        return append(self, layer, new)

    return broken


def another_layer(self, layer, copy=HostStore.copy_to_device):
    """Copy the layer before instead of layer 2."""
    return copy(
        self,
        self.layers[layer.index - 1]
        if layer.index == 2 and self.layers[1].length == layer.length
        else layer,
    )


def kept_too_long(self, layer, new):
    """Keep the copy that is on the device, without the new pairs."""
    return self.load(layer)


def lost_columns(self, layer, target, states, write=HostStore.write):
    write(self, layer, target[:, :, :-1], states[:, :, :-1])


def break_store(fake, fault):
    if fault is late_wait:
        fake.setattr(HostStore, "append_pairs", late_wait(fake))
        return
    place = {
        no_wait: "wait",
        another_layer: "copy_to_device",
        kept_too_long: "append_pairs",
        lost_columns: "write",
    }[fault]
    right = getattr(HostStore, place)

    def broken(self, *args):  # the store without streams stays right
        return (fault if self.cuda else right)(self, *args)

    fake.setattr(HostStore, place, broken)


STORES = [no_wait, late_wait, another_layer, kept_too_long, lost_columns]


@pytest.mark.parametrize("fault", STORES)
def test_an_offloading_stream_that_is_wrong_is_not_used(fake, case, fault):
    model, tokenizer = case[:2]
    plain = compress(model, tokenizer, TEXT, ratio=0.4, adapter=None)
    break_store(fake, fault)
    with pytest.warns(
        RestoreKVWarning, match="Offloading cannot be used on Fake 9000.*waited for"
    ) as told:
        found = compress(
            model, tokenizer, TEXT, ratio=0.4, adapter=None, config=CompressionConfig(offload=True)
        )
    assert len(told) == 1
    assert found.ask(QUESTIONS[:2], 12) == plain.ask(QUESTIONS[:2], 12)
    store = offload.make_offloaded_cache(model, 9).layers[0].store
    assert isinstance(store, HostStore) and store.stream is None


def test_a_prefill_in_chunks_waits_for_the_second_stream(fake, case):
    """New pairs were once joined to a layer that was still being copied."""
    model = case[0]
    ids = torch.randint(3, 320, (1, 60), generator=torch.Generator().manual_seed(1))
    plain = prefill(model, ids, 13)
    shape = CacheShape.from_model(model)
    store = HostStore(shape.layers, (shape.heads, 60, shape.head_dim), torch.float32, model.device)
    assert store.stream is not None
    found = prefill(model, ids, 13, offload.Cache(layers=store.layers))
    for ours, theirs in zip(found.layers, plain.layers, strict=True):
        assert ours.keys.equal(theirs.keys) and ours.values.equal(theirs.values)


def test_where_no_copy_is_right_the_cache_stays_on_the_device(fake, case):
    model, tokenizer = case[:2]
    plain = compress(model, tokenizer, TEXT, ratio=0.4, adapter=None)
    fake.setattr(HostStore, "write", lost_columns)
    with pytest.warns(RestoreKVWarning, match="whole cache stays on the device"):
        found = compress(
            model, tokenizer, TEXT, ratio=0.4, adapter=None, config=CompressionConfig(offload=True)
        )
    assert found.ask(QUESTIONS[:2], 12) == plain.ask(QUESTIONS[:2], 12)
    assert not any(
        hasattr(layer, "store") for layer in offload.make_offloaded_cache(model, 9).layers
    )


def test_a_store_that_is_right_is_used(fake, case):
    model, tokenizer = case[:2]
    plain = compress(model, tokenizer, TEXT, ratio=0.4, adapter=None)
    found = compress(
        model, tokenizer, TEXT, ratio=0.4, adapter=None, config=CompressionConfig(offload=True)
    )
    assert found.ask(QUESTIONS[:2], 12) == plain.ask(QUESTIONS[:2], 12)
    assert offload.make_offloaded_cache(model, 9).layers[0].store.stream is not None


# Scoring


def too_high(attended):
    def broken(query, own, cached, scale, inside, on_weights):
        return attended(
            query,
            own,
            cached,
            scale,
            inside,
            lambda *where: on_weights(*where[:3], where[3] * 1.01),
        )

    return broken


def unscaled(attended):
    def broken(query, own, cached, scale, *more):
        return attended(query, own, cached, scale * 1.02, *more)

    return broken


def not_causal(attended):
    def broken(query, own, cached, scale, inside, on_weights):
        return attended(query, own, cached, scale, inside, on_weights).roll(1, 0)

    return broken


def failing(attended):
    def broken(*_):
        raise RuntimeError("no kernel image is available for execution on the device")

    return broken


@pytest.mark.parametrize("spec", ["kvzip:chunk=30", "kvzip+:chunk=30", "h2o:diagonal=false"])
@pytest.mark.parametrize("fault", [too_high, unscaled, not_causal, failing])
def test_scoring_that_is_wrong_is_not_used(fake, case, fault, spec):
    model, tokenizer = case[:2]
    plain = compress(model, tokenizer, TEXT, evictor=spec, ratio=0.4, adapter=None)
    self_tests.forget_self_tests()
    fake.setenv("RESTOREKV_CACHE", "/dev/null/nowhere")
    fake.setattr(blocked, "attend_pass", fault(blocked.attend_pass))
    with pytest.warns(RestoreKVWarning, match="Scoring in blocks of rows.*cannot be used") as told:
        found = compress(model, tokenizer, TEXT, evictor=spec, ratio=0.4, adapter=None)
    assert len(told) == 1
    for ours, theirs in zip(found.cache.layers, plain.cache.layers, strict=True):
        assert ours.positions.equal(theirs.positions)


def test_kernels_of_scoring_that_are_wrong_are_not_used(fake):
    """The kernels are replaced here, because their interpreter takes seconds."""

    class Kernels:
        factor = 1.0

        @staticmethod
        def supports_query(query):
            return True

        @staticmethod
        def attend_pass(query, own, cached, scale, sinks, start, end):
            held, rows = cached[0].shape[1], query.shape[2]
            keys, values = (
                torch.cat(both, 1)[:, None].double() for both in zip(cached, own, strict=True)
            )
            later = torch.ones(rows, held + rows, dtype=torch.bool).triu(held + 1)
            logits = (query.double() @ keys.mT * scale).masked_fill(later, -torch.inf)
            chosen = [*range(sinks), *range(start, end), *range(held, held + rows)]
            output = (logits.softmax(-1) @ values).permute(2, 0, 1, 3).flatten(1, 2)
            return output.to(query.dtype), (
                logits[..., chosen].logsumexp(-1) / torch.log(torch.tensor(2.0))
            ).float()

        @staticmethod
        def find_maxima(query, keys, lse, scale, own=False, diagonal=True):
            logits = (
                query.double() @ keys[:, None].double().mT * scale / torch.log(torch.tensor(2.0))
                - lse[..., None]
            )
            if own:
                logits = logits.masked_fill(
                    torch.ones_like(logits[0, 0]).triu(1 if diagonal else 0).bool(), -torch.inf
                )
            return logits.exp2().amax(2).float() * Kernels.factor

    for dtype in DTYPES:
        for factor, right in ((1.0, True), (1.002, False), (float("nan"), False)):
            Kernels.factor = factor
            measured = list(
                pass_self_test.measure_maxima(Kernels, Target(TARGET.device, 2, 2, 16, dtype))
            )
            assert all(error <= allowed for _, error, allowed in measured) is right
    fake.setattr(attend, "triton_maxima", Kernels)
    component = self_tests.Component(
        "maxima",
        "The Triton kernels of scoring",
        "PyTorch's own operations score",
        backend_self_test.explain_no_obstacle,
        lambda target: pass_self_test.measure_maxima(Kernels, target),
    )
    fake.setitem(self_tests.COMPONENTS, "maxima", component)
    query = torch.zeros(2, 2, 4, 16)
    with pytest.warns(RestoreKVWarning, match="kernels of scoring cannot be used"):
        assert not attend.can_use_kernels(query)
    Kernels.factor = 1.0
    assert self_tests.run_self_test("maxima", TARGET, again=True).passed and attend.can_use_kernels(
        query
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_definition_of_a_pass_is_what_blocks_compute(dtype):
    for each in pass_self_test.PASSES:
        inputs = pass_self_test.make_inputs(Target(TARGET.device, 2, 3, 16, dtype), each)
        best = torch.zeros(2, 3, inputs.weights.shape[-1])

        def on_weights(head, low, high, weights, best=best):
            reached = best[head, :, : weights.shape[-1]]
            torch.maximum(reached, weights.amax(1), out=reached)

        inside = [slice(0, each.sinks), slice(each.start, each.end)]
        output = reference.attend_pass(
            inputs.query,
            inputs.own,
            lambda head, held=inputs.cached: tuple(x[head] for x in held),
            inputs.scale,
            inside,
            on_weights,
            inputs.learned,
            each.cap,
        )
        for _, error, allowed in pass_self_test.compare_results(
            each.name, inputs, output, best, inputs.weights.amax(2)
        ):
            assert error <= allowed
