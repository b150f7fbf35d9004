"""A CPU that behaves like a GPU: its code must pass self-tests, and it has graphs and streams like
CUDA's.

A captured graph holds the operations of the capture and the tensors that they read and write; a
replay runs them again, on the same memory. Work on a second stream is only done when somebody waits
for that stream; until then its results are NaN.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from restorekv.generation import fixed_steps
from restorekv.model import offload
from restorekv.model.attention import self_tests

NAME = "Fake 9000"


class Recorder(TorchDispatchMode):
    """A mode that runs and records operations, and at the end undoes what they wrote to memory that
    existed before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        for place, argument in enumerate(function._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and place < len(given) and isinstance(given[place], Tensor):
                self.before.append((given[place], given[place].clone()))
        made = function(*args, **kwargs)
        self.calls.append((function, args, kwargs, made))
        return made

    def take_back(self) -> None:
        for tensor, value in reversed(self.before):
            tensor.copy_(value)


class FakeGraph:
    """A replacement of CUDAGraph; `captured` counts the captures of a test."""

    captured = 0

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def replay(self) -> None:
        for function, args, kwargs, made in self.calls:
            again = function(*args, **kwargs)
            olds, news = (list(x) if isinstance(x, list | tuple) else [x] for x in (made, again))
            for old, new in zip(olds, news, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def capture(graph: FakeGraph, capture_error_mode: str = "global") -> Iterator[None]:
    recorder = Recorder()
    with recorder:
        yield
    recorder.take_back()
    graph.calls = recorder.calls
    FakeGraph.captured += 1


class FakeStream:
    """A stream that holds copies back until somebody waits for it."""

    def __init__(self, device: object = None) -> None:
        self.waiting: list[Callable[[], None]] = []

    def wait_stream(self, other: "FakeStream") -> None:
        other.finish()

    def synchronize(self) -> None:
        self.finish()

    def finish(self) -> None:
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            work()


class Delayed(TorchDispatchMode):
    """A mode that delays the copies in its block: their results are NaN until somebody waits for
    the stream.
    """

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten._to_copy.default:
            return function(*args, **(kwargs or {}))
        made = torch.full_like(args[0], float("nan"), memory_format=torch.contiguous_format)
        source = args[0]
        self.stream.waiting.append(lambda: made.copy_(source))
        return made


@contextlib.contextmanager
def on_stream(stream: FakeStream) -> Iterator[None]:
    with Delayed(stream):
        yield


def install(monkeypatch: pytest.MonkeyPatch, folder: object) -> None:
    """Make the CPU a device with graphs and streams that needs self-tests; their outcomes are
    stored in `folder`.
    """
    monkeypatch.setenv("RESTOREKV_CACHE", str(folder))
    monkeypatch.setattr(self_tests, "needs_self_test", lambda device: device.type == "cpu")
    known = {
        "kind": "fake",
        "name": NAME,
        "driver": "1.2",
        "torch": "2.0",
        "triton": "3.0",
        "code": "0",
    }
    monkeypatch.setattr(self_tests, "identify_device", Identity(known))
    monkeypatch.setattr(fixed_steps, "can_record", lambda device: device.type == "cpu")
    monkeypatch.setattr(offload, "_uses_streams", lambda device: True)
    current = FakeStream()
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more)
    )
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: None)
    FakeGraph.captured = 0
    fixed_steps.GRAPHED.clear()
    fixed_steps.NEVER_GRAPHED.clear()
    self_tests.forget_self_tests()


class Identity:
    """A replacement of `identify_device` for the fake device; it has no cache to clear."""

    def __init__(self, known: dict[str, str]) -> None:
        self.known = known

    def __call__(self, device: torch.device) -> dict[str, str]:
        return dict(self.known)

    def cache_clear(self) -> None:
        pass
