"""Self-tests: code for a device is used only after it has been compared with a reference there.

A component is code that could be wrong on a device and right elsewhere: a kernel, a backend of
attention, a CUDA graph, a copy on a second stream. Each is registered with a `measure` that runs it
on small inputs of the model's shapes and dtype, its cases, and compares the results with a slow
definition in float64 on the CPU. That self-test runs when the component is first used on a device
that is not a CPU. A result beyond the tolerance, NaN or an exception means that the component is
not used there: the caller takes the plain path instead, and one warning says so. The outcome is
remembered in the process and, with self_test_files.py, on disk.

`restorekv doctor` runs every self-test and shows its outcome.
"""

from __future__ import annotations

import hashlib
import math
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from restorekv import __version__
from restorekv.errors import RestoreKVError, summarize_error, warn
from restorekv.model.attention import self_test_files
from restorekv.spec import list_versions

REPORT = "run `restorekv doctor -o report.json` and attach the file to an issue of restorekv"
PACKAGE = Path(__file__).parents[2]
DRIVER = Path("/proc/driver/nvidia/version")
SINGLE = torch.finfo(torch.float32).eps
# The relative error of factors of a float32 product that are rounded to TF32, if a user allows it.
TF32 = 2.0**-10


@dataclass(frozen=True)
class Target:
    """What a self-test's outcome holds for: a device, and the shape and dtype of a model.

    heads: KV heads; groups: query heads for each of them; dim: of a head.
    """

    device: torch.device
    heads: int
    groups: int
    dim: int
    dtype: torch.dtype

    def key(self) -> dict[str, object]:
        """Return everything that can change a component's results, as plain JSON values."""
        return {
            **identify_device(self.device),
            "heads": self.heads,
            "groups": self.groups,
            "dim": self.dim,
            "dtype": str(self.dtype),
            "tf32": _allows_tf32(),
        }


class Measurement(NamedTuple):
    """The error of one case, and the largest error that rounding explains."""

    case: str
    error: float
    tolerance: float


@dataclass(frozen=True)
class Component:
    """Code that has to pass a self-test.

    `title` names it in a sentence, and `instead` says what answers in its place.
    `unavailable_reason(device, dtype)` returns why the component cannot be used there, or "" if it
    can.
    """

    name: str
    title: str
    instead: str
    unavailable_reason: Callable[[torch.device, torch.dtype], str]
    measure: Callable[[Target], Iterator[Measurement]]


@dataclass(frozen=True)
class SelfTest:
    """The outcome of a self-test: the case closest to its tolerance, or what ended the test.

    `error` and `tolerance` are None if there is no finite number. `lasting` is false for an outcome
    that another try may change.
    """

    component: str
    passed: bool
    cases: int
    case: str = ""
    error: float | None = None
    tolerance: float | None = None
    problem: str = ""
    seconds: float = 0.0
    lasting: bool = True

    def reason(self) -> str:
        """Return why the component is wrong, as the end of a sentence."""
        where = f" (case: {self.case})" if self.case else ""
        if self.problem:
            return f"it failed with {self.problem}{where}"
        if self.error is None:
            return f"its result was not a number{where}"
        return (
            f"its result was off by {self.error:.1e}, "
            f"where rounding explains {self.tolerance:.1e}{where}"
        )


COMPONENTS: dict[str, Component] = {}

_outcomes: dict[tuple, SelfTest] = {}
# One self-test at a time; the thread that tests a component may need another one first.
_lock = threading.RLock()
_components_under_test: list[str] = []  # components that the holder of the lock is testing
_warned: set[tuple[str, torch.device]] = set()


def register_component(component: Component) -> None:
    """Make a component known, to `passed_self_test` and to the doctor."""
    COMPONENTS[component.name] = component


def needs_self_test(device: torch.device) -> bool:
    """Return whether code has to pass a self-test on a device.

    For CPUs the project's own tests check it, and the device "meta" computes nothing.
    """
    return device.type not in ("cpu", "meta")


def get_self_test_key(query: Tensor) -> tuple[torch.device, int, int, int, torch.dtype]:
    """Return what a self-test has to cover for queries (..., H, G, Q, D): the arguments of
    `passed_self_test` after the component's name.
    """
    heads, groups, _, dim = query.shape[-4:]
    return query.device, heads, groups, dim, query.dtype


@torch.compiler.assume_constant_result
def passed_self_test(
    name: str, device: torch.device, heads: int, groups: int, dim: int, dtype: torch.dtype
) -> bool:
    """Return whether a component has passed its self-test, which runs now unless it ran before.

    While a CUDA graph is captured no self-test can run, so a component with an unknown outcome
    counts as not passed then.
    """
    if not needs_self_test(device):
        return True
    target = Target(device, heads, groups, dim, dtype)
    found = _outcomes.get(_get_outcome_key(name, target))
    if found is not None:
        return found.passed
    if _is_capturing(device):
        return False
    found = run_self_test(name, target)
    if not found.passed:
        _warn_of_failure(found, target)
    return found.passed


def require_self_test(
    name: str, device: torch.device, heads: int, groups: int, dim: int, dtype: torch.dtype
) -> None:
    """Refuse a component that a caller names and that is wrong there."""
    if needs_self_test(device) and not passed_self_test(name, device, heads, groups, dim, dtype):
        component = COMPONENTS[name]
        target = Target(device, heads, groups, dim, dtype)
        found = _outcomes.get(_get_outcome_key(name, target))
        reason = "it cannot be tested while a CUDA graph is captured"
        if found:
            reason = found.reason()
        raise RestoreKVError(
            f"{component.title} cannot be used on {describe_device(device)}: {reason}; "
            f"leave the choice to restorekv, and {REPORT}."
        )


def run_self_test(name: str, target: Target, again: bool = False) -> SelfTest:
    """Return the outcome of a component's self-test; run it if it is unknown, or `again`.

    If several threads ask at once, it runs once.
    """
    key = _get_outcome_key(name, target)
    if not again and key in _outcomes:
        return _outcomes[key]
    with _lock:
        if not again and key in _outcomes:
            return _outcomes[key]
        if name in _components_under_test:
            return SelfTest(name, False, 0, problem="a self-test that needs itself", lasting=False)
        _components_under_test.append(name)
        try:
            found = _load_or_run(COMPONENTS[name], target, again)
        finally:
            _components_under_test.remove(name)
        _outcomes[key] = found
    if not found.passed:
        _refuse_dead_device(COMPONENTS[name], target.device)
    return found


def _load_or_run(component: Component, target: Target, again: bool) -> SelfTest:
    """Return the outcome on disk, or run the self-test and keep its outcome there.

    A mark on disk says that a self-test has begun: if that process died, as a wrong kernel can make
    it die, the component is not tried again until the doctor is asked to.
    """
    key = {**target.key(), "component": component.name}
    stored = None if again else self_test_files.load_self_test(key, SelfTest)
    if isinstance(stored, SelfTest) and stored.component == component.name:
        return stored
    if stored is self_test_files.DIED:
        return SelfTest(component.name, False, 0, problem="the end of the process that tested it")
    with self_test_files.mark_self_test(key):
        found = run_cases(component, target)
    if found.lasting:
        self_test_files.save_self_test(key, found)
    return found


def run_cases(component: Component, target: Target) -> SelfTest:
    """Run every case of a component, up to the first that fails."""
    started = time.perf_counter()
    cases = 0
    worst = Measurement("", 0.0, math.inf)
    problem = ""
    lasting = True
    try:
        with _isolate_self_test(target.device):
            for measured in component.measure(target):
                cases += 1
                if not measured.error <= measured.tolerance:  # NaN too
                    worst = measured
                    break
                if cases == 1 or compute_closeness(measured) > compute_closeness(worst):
                    worst = measured
            synchronize_device(target.device)
    # A kernel that does not compile or launch, a driver that is too old: errors of any class.
    except Exception as error:
        problem = f"{type(error).__name__}: {summarize_error(error)}"[:300]
        lasting = not isinstance(error, (torch.OutOfMemoryError, MemoryError))
        worst = Measurement(worst.case, math.nan, math.nan)
    passed = not problem and cases > 0 and worst.error <= worst.tolerance
    return SelfTest(
        component=component.name,
        passed=passed,
        cases=cases,
        case=worst.case,
        error=_to_finite(worst.error),
        tolerance=_to_finite(worst.tolerance),
        problem=problem or ("no case" if not cases else ""),
        seconds=round(time.perf_counter() - started, 3),
        lasting=lasting,
    )


def compute_closeness(measured: Measurement) -> float:
    """Return how close an error is to its tolerance, from 0 to 1."""
    return measured.error / max(measured.tolerance, 1e-30)


@contextmanager
def _isolate_self_test(device: torch.device) -> Iterator[None]:
    """Run the block without gradients, inference mode and autocast, which a caller may have set.

    Nothing in the block draws from a global random generator, so its state stays the same.
    """
    autocast = nullcontext()
    if torch.amp.is_autocast_available(device.type):
        autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast:
        yield


@contextmanager
def exclude_self_tests() -> Iterator[None]:
    """Keep self-tests of other threads from the device while the block captures a CUDA graph."""
    with _lock:
        yield


def _warn_of_failure(found: SelfTest, target: Target) -> None:
    """Warn of a wrong component once for each device."""
    if (found.component, target.device) in _warned:
        return
    _warned.add((found.component, target.device))
    component = COMPONENTS[found.component]
    warn(
        f"{component.title} cannot be used on {describe_device(target.device)}: "
        f"{found.reason()}. {component.instead}. Please {REPORT}."
    )


def _refuse_dead_device(component: Component, device: torch.device) -> None:
    """Refuse to continue on a device that a failed self-test has left unusable, as in CUDA."""
    try:
        usable = torch.ones(2, device=device).sum().item() == 2
    except Exception:
        usable = False
    if not usable:
        raise RestoreKVError(
            f"{describe_device(device)} stopped answering while restorekv tested "
            f"{_lower_first(component.title)}; start again, which will do without, and {REPORT}."
        )


def forget_self_tests() -> None:
    """Forget what this process knows; files stay."""
    with _lock:
        _outcomes.clear()
        _warned.clear()
        identify_device.cache_clear()


def _get_outcome_key(name: str, target: Target) -> tuple:
    """Return the key under which the process remembers an outcome."""
    return name, target, _allows_tf32()


def _allows_tf32() -> bool:
    """Return whether a user allows products of float32 matrices to be rounded to TF32."""
    if torch.get_float32_matmul_precision() != "highest":
        return True
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _is_capturing(device: torch.device) -> bool:
    """Return whether this thread is capturing a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def synchronize_device(device: torch.device) -> None:
    """Wait for the device, so that what went wrong there shows now."""
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).synchronize()


def compute_tolerance(dtype: torch.dtype, largest: float, products: bool = True) -> float:
    """Return the largest error that rounding explains in a number of a softmax average, relative to
    the number's size.

    The size is the weighted mean of the absolute values that the number averages. Weights, the
    result and partial results that are merged are rounded to `dtype`, by eps / 2 of the size each,
    and eps / 2 is to spare. Logits of up to `largest` and sums are float32: a logit that is off by
    d changes a weight by the factor e^d. `products` says that PyTorch itself multiplies matrices,
    which may round float32 factors to TF32.
    """
    rounding = TF32 if products and _allows_tf32() else 0.0
    return 2 * max(torch.finfo(dtype).eps, SINGLE) + (8 * SINGLE + 2 * rounding) * (1 + largest)


def _to_finite(number: float) -> float | None:
    """Return a number that JSON can hold, or None."""
    return float(number) if math.isfinite(number) else None


def _lower_first(title: str) -> str:
    """Return a title for the middle of a sentence."""
    return title[0].lower() + title[1:]


@cache
def identify_device(device: torch.device) -> dict[str, object]:
    """Return what determines how a device computes: name and driver, libraries, and our code."""
    known: dict[str, object] = {
        "kind": device.type,
        "name": platform.processor() or platform.machine(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = f"{properties.major}.{properties.minor}"
        known |= {
            "name": properties.name,
            "capability": capability,
            "driver": _read_driver_version(),
            "cuda": torch.version.cuda,
        }
        known["hip"] = torch.version.hip
    elif device.type == "xpu":
        properties = torch.xpu.get_device_properties(device)
        known |= {"name": properties.name, "driver": str(getattr(properties, "driver_version", ""))}
    elif device.type == "mps":
        known["driver"] = platform.mac_ver()[0]
    return {
        **known,
        "torch": torch.__version__,
        "triton": list_versions(["triton"]).get("triton", ""),
        "restorekv": __version__,
        "code": _digest_code(),
    }


def describe_device(device: torch.device) -> str:
    """Return a device with its versions, for a sentence."""
    known = identify_device(device)
    parts = [str(device)]
    if known.get("driver"):
        parts.append(f"driver {known['driver']}")
    parts.append(f"torch {known['torch']}")
    if known["triton"]:
        parts.append(f"Triton {known['triton']}")
    return f"{known['name']} ({', '.join(parts)})"


def _read_driver_version() -> str:
    """Return the version of NVIDIA's driver or, if unknown, the newest CUDA that it supports."""
    try:
        text = DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"Module\s+(?:for \S+\s+)?([0-9.]+)", text)
    if found:
        return found[1]
    get_version = getattr(torch._C, "_cuda_getDriverVersion", None)
    return str(get_version()) if get_version else ""


@cache
def _digest_code() -> str:
    """Return 16 hex digits that identify the tested code, so that changed code is tested again."""
    digest = hashlib.sha256()
    paths = []
    for pattern in ("cache/*.py", "model/**/*.py", "evictors/*.py", "compression/*.py"):
        paths += PACKAGE.glob(pattern)
    for path in sorted(paths):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
