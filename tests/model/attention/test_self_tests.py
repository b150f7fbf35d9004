"""Code that is broken on purpose, on a CPU that plays a GPU: it is found, told once, and never
answers.
"""

import json
import os
import subprocess
import sys
import threading
import warnings
from unittest.mock import patch

import pytest
import torch

from restorekv.cache import quantized
from restorekv.cache.ragged import RaggedCache
from restorekv.errors import RestoreKVError, RestoreKVWarning
from restorekv.evictors import pass_self_test
from restorekv.model import attention
from restorekv.model.attention import (
    autograd,
    backend_self_test,
    blocked,
    cascade,
    dispatch,
    packed,
    reference,
    self_test_files,
    self_tests,
)
from restorekv.model.attention.self_tests import Component, Measurement, Target
from tests.helpers import fake_device

SHAPE = (3, 2, 16)
# The two dtypes in which models mostly run, and one at night.
DTYPES = [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A device without Triton, whose kernels take seconds in their interpreter."""
    fake_device.install(monkeypatch, tmp_path)
    monkeypatch.setitem(dispatch.BACKENDS_BY_SPEED, "triton", None)
    monkeypatch.delitem(dispatch.BACKENDS_BY_SPEED, "triton")
    yield monkeypatch
    self_tests.forget_self_tests()


def target(dtype=torch.float32, shape=SHAPE):
    return Target(torch.device("cpu"), *shape, dtype)


def sample(dtype=torch.float32, case=backend_self_test.CASES[1]):
    return backend_self_test.make_sample(target(dtype), case)


def answer(given):
    """What attention answers, through the function that transformers calls."""
    return attention.attend_layer(
        None, given.query.flatten(1, 2), given.layer, given.layer, given.mask, scaling=given.scale
    )[0]


def definition(given):
    return given.compute_definition().to(given.query.dtype).flatten(1, 2).transpose(1, 2)


# What could be wrong with a backend; each gets the right one and the arguments.


def wrong_scale(attend, query, layer, mask, scale, *sinks):
    return attend(query, layer, mask, scale * 1.05, *sinks)


def dropped_tail(attend, query, layer, mask, scale, *sinks):
    """The last column is never read."""
    hidden = torch.ones(len(query), 1, query.shape[3], layer.columns, dtype=torch.bool)
    mask = (
        reference.make_causal_mask(query.shape[3], layer.columns, query.device) & hidden
        if mask is None
        else mask.clone()
    )
    mask[..., -1] = layer.columns == 1
    return attend(query, layer, mask, scale, *sinks)


def forgotten_mask(attend, query, layer, mask, scale, *sinks):
    return attend(query, layer, None, scale, *sinks)


def seen_too_early(attend, query, layer, mask, scale, *sinks):
    """Every query sees one column more than it may."""
    queries = query.shape[3]
    if mask is None and queries > 1:
        mask = torch.ones(queries, layer.columns, dtype=torch.bool).tril(
            layer.columns - queries + 1
        )
        mask = mask.expand(len(query), 1, -1, -1)
    return attend(query, layer, mask, scale, *sinks)


def dropped_pair(attend, query, layer, mask, scale, *sinks):
    """The last pair of every head of the context counts for nothing."""
    ends = [
        end - 1 for start, end in zip(layer.bounds, layer.bounds[1:], strict=False) if end > start
    ]
    bias = (
        torch.zeros(layer.bounds[-1], dtype=torch.float32)
        if layer.bias is None
        else layer.bias.clone()
    )
    bias[ends] = -1e4
    plain = backend_self_test.make_layer(
        layer.context_keys, layer.context_values, list(layer.bounds), *layer.keys_and_values, bias
    )
    return attend(query, plain, mask, scale, *sinks)


def forgotten_bias(attend, query, layer, mask, scale, *sinks):
    plain = backend_self_test.make_layer(
        layer.context_keys, layer.context_values, list(layer.bounds), *layer.keys_and_values, None
    )
    return attend(query, plain, mask, scale, *sinks)


def swapped_questions(attend, query, layer, mask, scale, *sinks):
    return attend(query, layer, mask, scale, *sinks).roll(1, 0)


def swapped_groups(attend, query, layer, mask, scale, *sinks):
    return attend(query, layer, mask, scale, *sinks).roll(1, 2)


def not_a_number(attend, query, layer, mask, scale, *sinks):
    found = attend(query, layer, mask, scale, *sinks)
    found[0, -1, 0, 0, 3] = float("nan")
    return found


def wrong_shape(attend, query, layer, mask, scale, *sinks):
    return attend(query, layer, mask, scale, *sinks)[:, :, :, :, 1:]


def no_compiler(attend, query, layer, mask, scale, *sinks):
    raise RuntimeError("PTXAS failed with error code 255. Please report this")


def forgotten_sinks(attend, query, layer, mask, scale, *sinks):
    return attend(query, layer, mask, scale)


def sinks_added_twice(attend, query, layer, mask, scale, *sinks):
    return attend(query, layer, mask, scale, *(each + 2**0.5 for each in sinks))


def sinks_of_other_heads(attend, query, layer, mask, scale, *sinks):
    return attend(query, layer, mask, scale, *(each.roll(1, -1) for each in sinks))


FAULTS = [
    wrong_scale,
    dropped_tail,
    forgotten_mask,
    seen_too_early,
    dropped_pair,
    forgotten_bias,
    swapped_questions,
    swapped_groups,
    not_a_number,
    wrong_shape,
    no_compiler,
    forgotten_sinks,
    sinks_added_twice,
    sinks_of_other_heads,
]


def break_backend(monkeypatch, module, fault):
    """Gives a module's backend a fault; returns how often it was called."""
    attend, calls = module.attend_ragged, []

    def broken(*args):
        calls.append(1)
        return fault(attend, *args)

    monkeypatch.setattr(module, "attend_ragged", broken)
    return calls


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_backend_never_answers(fake, fault, dtype):
    calls = break_backend(fake, cascade, fault)
    given = sample(dtype)
    with pytest.warns(
        RestoreKVWarning, match="cascade.*cannot be used on Fake 9000.*driver 1.2.*doctor -o"
    ) as told:
        found = answer(given)
    checked = len(calls)
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = answer(given)
    assert len(calls) == checked, "a backend that is wrong was called again"
    assert found.equal(again) and found.equal(attended_by(autograd, given))
    error = given.measure_error(
        found.transpose(1, 2).unflatten(1, given.query.shape[1:3]), given.compute_definition()
    )
    assert error <= self_tests.compute_tolerance(dtype, given.largest)


def one_small_number(attend, query, layer, mask, scale, *sinks):
    """Fault 75 of tests/hostile/kernels.py: a number near 0 becomes another, of which a long row
    hides the error.
    """
    found = attend(query, layer, mask, scale, *sinks).contiguous()
    if len(query) == 1:
        found.view(-1)[5443 % found.numel()] = 7e-6
    return found


def test_a_number_that_is_wrong_in_a_long_row_is_found(fake):
    break_backend(fake, cascade, one_small_number)
    found = self_tests.run_cases(
        self_tests.COMPONENTS["cascade"], target(torch.float16, (1, 4, 32))
    )
    assert not found.passed


def test_a_wrong_number_of_a_pass_is_found(fake):
    attend = blocked.attend_pass

    def wrong(*args):
        found = attend(*args).contiguous()
        found.view(-1)[-1] += 0.005
        return found

    fake.setattr(blocked, "attend_pass", wrong)
    worst = max(
        self_tests.compute_closeness(each)
        for each in pass_self_test.measure_blocked(target(torch.float16))
    )
    assert worst > 1


FORMS = {
    "a first token": lambda query, layer, mask: len(query) == query.shape[3] == layer.columns == 1,
    "first tokens of one question": lambda query, layer, mask: (
        len(query) == 1 < query.shape[3] == layer.columns
    ),
    "one token, a bias and no mask": lambda query, layer, mask: (
        len(query) == query.shape[3] == 1 and layer.bias is not None and mask is None
    ),
    "one token under a mask": lambda query, layer, mask: (
        len(query) == query.shape[3] == 1 and mask is not None
    ),
    "one question with a bias, without a mask": lambda query, layer, mask: (
        len(query) == 1 < query.shape[3] and layer.bias is not None and mask is None
    ),
    "tails of a whole tile": lambda query, layer, mask: layer.columns == 64,
    "one token of several questions, without a mask": lambda query, layer, mask: (
        len(query) > 1 == query.shape[3] and mask is None
    ),
    "one question behind an only head of a whole tile": lambda query, layer, mask: (
        len(query) == 1 and layer.bounds[:2] == (0, 64)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_fault_that_only_one_form_of_a_question_has_is_found(fake, form):
    def wrong_last_number(attend, query, layer, mask, scale, *sinks):
        found = attend(query, layer, mask, scale, *sinks).contiguous()
        if FORMS[form](query, layer, mask):
            found.view(-1)[-1] += 0.02
        return found

    break_backend(fake, cascade, wrong_last_number)
    assert not self_tests.run_cases(self_tests.COMPONENTS["cascade"], target(torch.float16)).passed


def attended_by(module, given):
    found = module.attend_ragged(given.query, given.layer, given.mask, given.scale)
    return found.flatten(1, 2).transpose(1, 2).contiguous()


@pytest.mark.parametrize("fault", [wrong_scale, no_compiler])
def test_the_definition_answers_where_all_else_is_wrong(fake, fault):
    for module in (cascade, autograd):
        break_backend(fake, module, fault)
    given = sample()
    with pytest.warns(RestoreKVWarning) as told:
        found = answer(given)
    assert len(told) == 2 and found.equal(attended_by(reference, given))


def test_a_wrong_gradient_counts(fake):
    backward = autograd.AutogradAttention.backward

    def wrong(ctx, gradient):
        first, *others = backward(ctx, gradient)
        return first, others[0] * 1.01, *others[1:]

    fake.setattr(autograd.AutogradAttention, "backward", staticmethod(wrong))
    found = self_tests.run_cases(self_tests.COMPONENTS["autograd"], target())
    assert not found.passed and found.case == "gradients of keys"


def test_a_device_that_computes_nothing_right_is_refused(fake):
    for module in (cascade, autograd, reference):
        attend = module.attend_ragged
        fake.setattr(
            module,
            "attend_ragged",
            lambda q, *more, attend=attend: attend(q, *more) * (1 + (q.dtype != torch.double)),
        )
    with (
        pytest.raises(RestoreKVError, match=r"Fake 9000.*wrongly even with PyTorch's own"),
        pytest.warns(RestoreKVWarning),
    ):
        answer(sample())


def test_the_kernels_of_triton_are_right_and_one_that_does_not_compile_is_told(fake):
    pytest.importorskip("triton")
    triton_attend = dispatch.triton_attend
    if not triton_attend.INTERPRETED:
        pytest.skip("needs the interpreter")
    fake.setattr(backend_self_test, "CASES", backend_self_test.CASES[:2])
    fake.setattr(
        dispatch, "BACKENDS_BY_SPEED", {"triton": triton_attend, **dispatch.BACKENDS_BY_SPEED}
    )
    small = backend_self_test.make_sample(target(shape=(2, 1, 8)), backend_self_test.CASES[1])
    assert attention.choose_backend(small.query, small.layer) is triton_attend.attend_ragged

    class Kernel:
        def __getitem__(self, grid):
            raise RuntimeError("CompilationError: at 3:0")

    self_tests.forget_self_tests()
    fake.setenv("RESTOREKV_CACHE", os.environ["RESTOREKV_CACHE"] + "/other")
    fake.setattr(triton_attend, "attend_tile", Kernel())
    with pytest.warns(RestoreKVWarning, match="Triton kernels of attention.*CompilationError"):
        assert attention.choose_backend(small.query, small.layer) is cascade.attend_ragged


def test_a_backend_that_is_asked_for_by_name_is_refused(fake):
    break_backend(fake, cascade, wrong_scale)
    with (
        pytest.raises(RestoreKVError, match=r"cascade.*off by.*leave the choice"),
        attention.force_backend("cascade"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RestoreKVWarning)
        answer(sample())
    with attention.force_backend("autograd"):
        answer(sample())


# 8-bit numbers


@pytest.mark.parametrize("kv_dtype", list(quantized.QUANTIZED_DTYPES))
@pytest.mark.parametrize(
    "fault", [wrong_scale, dropped_tail, forgotten_bias, not_a_number, no_compiler]
)
def test_eight_bits_that_are_read_wrongly_are_unpacked_on_the_cpu(fake, kv_dtype, fault):
    given = sample()
    rows = quantized.quantize(
        given.layer.context_keys, given.layer.context_values, given.layer.bounds, kv_dtype
    )
    layer = backend_self_test.make_layer(
        *rows, list(given.layer.bounds), *given.layer.keys_and_values, given.layer.bias
    )
    given = backend_self_test.CaseInputs(given.query, layer, given.mask, given.scale, given.largest)
    break_backend(fake, packed, fault)
    with pytest.warns(
        RestoreKVWarning, match=f"8-bit numbers as {kv_dtype}.*unpacked on the CPU"
    ) as told:
        found = answer(given)
    assert len(told) == 1
    torch.testing.assert_close(found, definition(given), rtol=1e-4, atol=1e-4)


def test_eight_bits_that_are_packed_wrongly_are_packed_on_the_cpu(fake):
    """A scale that is too small by 3 % clips the largest numbers."""
    pack, given = quantized.quantize, sample()

    def wrong(keys, values, bounds, kv_dtype):
        return tuple(
            quantized.QuantizedRows(each.codes, each.scales * 0.97, each.starts, each.dtype)
            for each in pack(keys, values, bounds, kv_dtype)
        )

    cache = RaggedCache([given.layer])
    right = pack(given.layer.context_keys, given.layer.context_values, given.layer.bounds, "int8")
    with fake.context() as here:
        here.setattr(quantized, "quantize", wrong)
        assert not self_tests.run_cases(self_tests.COMPONENTS["int8"], target()).passed
        with pytest.warns(RestoreKVWarning, match="packed and unpacked on the CPU"):
            self_tests.passed_self_test("int8", *self_tests.get_self_test_key(given.query))
    with patch.object(cache, "quantize", wraps=cache.quantize) as used:
        attention.quantize_context(cache, "int8", given.query.shape[2])
    used.assert_called_once_with("int8", on_cpu=True)
    assert given.layer.context_keys.codes.equal(right[0].codes)


# What is remembered


@pytest.fixture
def counted(fake):
    """A component whose self-tests are counted, and which is right or wrong as `told` says."""
    told, calls = [0.0], []

    def measure(target):
        calls.append(target)
        yield Measurement("the only one", told[0], 0.1)

    fake.setitem(
        self_tests.COMPONENTS,
        "counted",
        Component("counted", "Counting", "None", backend_self_test.explain_no_obstacle, measure),
    )
    return told, calls


KEY = (torch.device("cpu"), *SHAPE, torch.float32)


@pytest.mark.parametrize("error", [0.0, 0.2])
def test_a_self_test_runs_once_and_the_file_is_read_by_the_next_process(counted, error):
    told, calls = counted
    told[0] = error
    right = error <= 0.1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [self_tests.passed_self_test("counted", *KEY) for _ in range(3)] == [
            right
        ] * 3 and len(calls) == 1
        self_tests.forget_self_tests()  # as in a new process
        assert self_tests.passed_self_test("counted", *KEY) is right and len(calls) == 1
        for changed in ((KEY[0], 4, *KEY[2:]), (*KEY[:4], torch.bfloat16)):
            before = len(calls)
            self_tests.passed_self_test("counted", *changed)
            assert len(calls) == before + 1


@pytest.mark.parametrize("name", ["driver", "torch", "triton", "code", "name"])
def test_another_version_is_tested_again(counted, fake, name):
    _, calls = counted
    self_tests.passed_self_test("counted", *KEY)
    self_tests.forget_self_tests()
    fake.setitem(self_tests.identify_device.known, name, "another")
    self_tests.passed_self_test("counted", *KEY)
    assert len(calls) == 2


def the_file():
    [path] = (self_test_files.find_cache_folder() / self_test_files.FOLDER).iterdir()
    return path


def cut(path):
    path.write_bytes(path.read_bytes()[:40])


def turned(path):
    path.write_text(path.read_text().replace('"passed": false', '"passed": true'))


def sealed_lie(path):
    """Of another type, with a checksum that is right."""
    record = json.loads(path.read_text())
    record["self_test"]["passed"] = "yes"
    record.pop("sum")
    path.write_text(json.dumps({**record, "sum": self_test_files.digest_record(record)}))


def of_another_key(path):
    record = json.loads(path.read_text())
    record["key"]["heads"] = 9
    record.pop("sum")
    path.write_text(json.dumps({**record, "sum": self_test_files.digest_record(record)}))


def writable_by_others(path):
    path.chmod(0o666)


def fifo(path):
    path.unlink()
    os.mkfifo(path)


def empty(path):
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "harm",
    [cut, turned, sealed_lie, of_another_key, writable_by_others, fifo, empty],
    ids=lambda each: each.__name__,
)
def test_a_damaged_file_is_made_again(counted, harm):
    told, calls = counted
    told[0] = 0.2
    with pytest.warns(RestoreKVWarning):
        assert not self_tests.passed_self_test("counted", *KEY)
    path = the_file()
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    harm(path)
    self_tests.forget_self_tests()
    with pytest.warns(RestoreKVWarning):
        assert not self_tests.passed_self_test("counted", *KEY)
    assert len(calls) == 2
    if harm is not fifo:
        assert (
            self_test_files.load_self_test(
                {**target().key(), "component": "counted"}, self_tests.SelfTest
            )
            is not None
        )


def test_without_a_cache_folder_an_outcome_lasts_as_long_as_the_process(counted, fake, tmp_path):
    _, calls = counted
    (tmp_path / "file").write_text("")
    fake.setenv("RESTOREKV_CACHE", str(tmp_path / "file"))  # no folder can be made there
    assert (
        self_tests.passed_self_test("counted", *KEY)
        and self_tests.passed_self_test("counted", *KEY)
        and len(calls) == 1
    )


def test_what_ended_its_process_is_not_tried_again(counted, fake):
    _, calls = counted
    key = {**target().key(), "component": "counted"}
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with self_test_files.mark_self_test(key):
        text = the_file().read_text()
        # This process is alive, so the mark says nothing.
        assert self_test_files.load_self_test(key, self_tests.SelfTest) is None
        record = json.loads(text)
    assert not list((self_test_files.find_cache_folder() / self_test_files.FOLDER).iterdir())
    record["process"] = f"{self_test_files.HOST}-{gone.pid}"
    record.pop("sum")
    path = self_test_files.locate_self_test(key)
    path.write_text(json.dumps({**record, "sum": self_test_files.digest_record(record)}))
    path.chmod(0o600)
    with pytest.warns(RestoreKVWarning, match="end of the process that tested it"):
        assert not self_tests.passed_self_test("counted", *KEY)
    assert not calls
    assert self_tests.run_self_test("counted", target(), again=True).passed and len(calls) == 1


def test_too_little_memory_is_forgotten_with_the_process(fake):
    def measure(target):
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    fake.setitem(
        self_tests.COMPONENTS,
        "greedy",
        Component("greedy", "Greed", "None", backend_self_test.explain_no_obstacle, measure),
    )
    with pytest.warns(RestoreKVWarning, match="out of memory"):
        assert not self_tests.passed_self_test("greedy", *KEY)
    assert not list((self_test_files.find_cache_folder() / self_test_files.FOLDER).iterdir())


# How a self-test runs


def test_threads_that_come_first_together_run_one_self_test(counted):
    _, calls = counted
    gate, found = threading.Barrier(8), []

    def ask():
        gate.wait()
        found.append(self_tests.passed_self_test("counted", *KEY))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8 and len(calls) == 1


def test_a_self_test_that_needs_itself_ends(fake):
    def measure(target):
        yield Measurement("inner", float(self_tests.passed_self_test("circular", *KEY)), 0.0)

    fake.setitem(
        self_tests.COMPONENTS,
        "circular",
        Component("circular", "A circle", "None", backend_self_test.explain_no_obstacle, measure),
    )
    assert self_tests.passed_self_test("circular", *KEY)


def test_nothing_is_tested_while_a_graph_is_captured(counted, fake):
    _, calls = counted
    with fake.context() as capturing:
        capturing.setattr(self_tests, "_is_capturing", lambda device: True)
        assert not self_tests.passed_self_test("counted", *KEY) and not calls
    assert self_tests.passed_self_test("counted", *KEY) and len(calls) == 1


def test_a_self_test_disturbs_neither_random_numbers_nor_observers_nor_modes(fake):
    seen, given = [], sample()
    state = torch.get_rng_state()
    with (
        attention.observe_attention(lambda *args: seen.append(args)),
        torch.inference_mode(),
        torch.autocast("cpu"),
    ):
        answer(given)
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
    assert torch.get_rng_state().equal(state) and len(seen) == 1
    assert self_tests._outcomes and all(found.passed for found in self_tests._outcomes.values())


def test_a_warning_that_is_an_error_leaves_an_outcome(fake):
    break_backend(fake, cascade, wrong_scale)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RestoreKVWarning):
            answer(sample())
        answer(sample())


def test_a_device_that_a_self_test_broke_is_refused_with_a_sentence(fake):
    break_backend(fake, cascade, no_compiler)

    def lost(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    given = sample()
    with fake.context() as broken:
        broken.setattr(torch, "ones", lost)
        with pytest.raises(RestoreKVError, match=r"stopped answering.*start again"):
            attention.choose_backend(given.query, given.layer)
    self_tests.forget_self_tests()
    # Remembered: the next process does not try.
    with pytest.warns(RestoreKVWarning, match="illegal memory access"):
        assert attention.choose_backend(given.query, given.layer) is autograd.attend_ragged


def test_a_cpu_runs_no_self_test(monkeypatch):
    monkeypatch.setattr(self_tests, "run_self_test", lambda *_: pytest.fail("a self-test on a CPU"))
    monkeypatch.setattr(
        self_tests, "passed_self_test", lambda *_: pytest.fail("a question on a CPU")
    )
    given = sample()
    answer(given)
    assert attention.choose_backend(given.query, given.layer) is cascade.attend_ragged


@pytest.mark.slow
def test_the_compiler_takes_an_outcome_for_a_constant(fake):
    given = sample()

    def ask(query):
        return attention.choose_backend(query, given.layer)(
            query, given.layer, given.mask, given.scale
        )

    torch._dynamo.reset()
    compiled = torch.compile(ask, backend="eager", fullgraph=True)
    assert compiled(given.query).equal(ask(given.query))
    assert all(found.passed for found in self_tests._outcomes.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 7, 80), (9, 1, 33)])
@pytest.mark.parametrize("name", ["reference", "cascade", "autograd", *quantized.QUANTIZED_DTYPES])
def test_what_is_right_passes_its_self_test_in_every_shape(name, shape, dtype):
    found = self_tests.run_cases(self_tests.COMPONENTS[name], target(dtype, shape))
    assert found.passed, found
    assert found.error <= found.tolerance and found.cases >= 6
