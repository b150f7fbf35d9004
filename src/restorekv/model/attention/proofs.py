"""Code for a device answers only after it has shown there that it computes what it should.

A component is code that could be wrong on a device and right elsewhere: a kernel, a backend of
attention, a CUDA graph, a copy on a second stream. Each is registered with a `measure` that runs it
on small inputs of the model's shapes and dtype, and compares the results with a slow definition in
float64 on the CPU. The first use of a component on a device that is not a CPU runs it. A result
beyond the tolerance, NaN or an exception means that the component is not used there: the caller
takes the plain path instead, and one warning says so. The verdict is remembered in the process and,
with proof_files.py, on disk.

`restorekv doctor` runs every proof and shows what came of it.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from restorekv import __version__
from restorekv.errors import RestoreKVError, summarize_error, warn
from restorekv.model.attention import proof_files

REPORT = "run `restorekv doctor -o report.json` and attach the file to an issue of restorekv"
PACKAGE = Path(__file__).parents[2]
DRIVER = Path("/proc/driver/nvidia/version")
SINGLE = torch.finfo(torch.float32).eps
# What rounding the factors of a float32 product to TF32 changes, where a user allows it.
TF32 = 2.0**-10


@dataclass(frozen=True)
class Target:
    """What a proof holds for: a device, and the shape and dtype of a model.

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
    """The error of one trial, and the largest that rounding explains."""

    trial: str
    error: float
    tolerance: float


@dataclass(frozen=True)
class Component:
    """Code that has to prove itself.

    `title` names it in a sentence, `instead` says what answers in its place, and
    `missing(device, dtype)` returns why the component cannot be used there, or "" if it can.
    """

    name: str
    title: str
    instead: str
    missing: Callable[[torch.device, torch.dtype], str]
    measure: Callable[[Target], Iterator[Measurement]]


@dataclass(frozen=True)
class Proof:
    """What came of a check: the trial that was closest to its tolerance, or what ended it.

    error and tolerance are None where there is no finite number. `lasting` is false for what
    another try may change.
    """

    component: str
    right: bool
    trials: int
    trial: str = ""
    error: float | None = None
    tolerance: float | None = None
    problem: str = ""
    seconds: float = 0.0
    lasting: bool = True

    def reason(self) -> str:
        """Return why the component is wrong, as the end of a sentence."""
        where = f" (trial: {self.trial})" if self.trial else ""
        if self.problem:
            return f"it failed with {self.problem}{where}"
        if self.error is None:
            return f"its result was not a number{where}"
        return (
            f"its result was off by {self.error:.1e}, "
            f"where rounding explains {self.tolerance:.1e}{where}"
        )


COMPONENTS: dict[str, Component] = {}

_proofs: dict[tuple, Proof] = {}
# One check at a time; the thread that checks a component may need another one first.
_lock = threading.RLock()
_running: list[str] = []  # components that the holder of the lock is checking
_warned: set[tuple[str, torch.device]] = set()


def register_component(component: Component) -> None:
    """Make a component known, to `is_proven` and to the doctor."""
    COMPONENTS[component.name] = component


def needs_proof(device: torch.device) -> bool:
    """Return whether code has to prove itself on a device.

    On a CPU it was tested, and the device "meta" computes nothing.
    """
    return device.type not in ("cpu", "meta")


def get_proof_key(query: Tensor) -> tuple[torch.device, int, int, int, torch.dtype]:
    """Return what a proof has to hold for queries (..., H, G, Q, D), as `is_proven` takes it."""
    heads, groups, _, dim = query.shape[-4:]
    return query.device, heads, groups, dim, query.dtype


@torch.compiler.assume_constant_result
def is_proven(
    name: str, device: torch.device, heads: int, groups: int, dim: int, dtype: torch.dtype
) -> bool:
    """Return whether a component may answer; checks it now if nobody has.

    While a CUDA graph is captured nothing can be checked, so what is unknown then is not used.
    """
    if not needs_proof(device):
        return True
    target = Target(device, heads, groups, dim, dtype)
    found = _proofs.get(_get_place(name, target))
    if found is not None:
        return found.right
    if _is_capturing(device):
        return False
    found = prove_component(name, target)
    if not found.right:
        _warn_of_failure(found, target)
    return found.right


def require_proof(
    name: str, device: torch.device, heads: int, groups: int, dim: int, dtype: torch.dtype
) -> None:
    """Refuse a component that somebody asks for by name and that is wrong there."""
    if needs_proof(device) and not is_proven(name, device, heads, groups, dim, dtype):
        component = COMPONENTS[name]
        target = Target(device, heads, groups, dim, dtype)
        found = _proofs.get(_get_place(name, target))
        reason = "it cannot be checked while a CUDA graph is captured"
        if found:
            reason = found.reason()
        raise RestoreKVError(
            f"{component.title} cannot be used on {describe_device(device)}: {reason}; "
            f"leave the choice to restorekv, and {REPORT}."
        )


def prove_component(name: str, target: Target, again: bool = False) -> Proof:
    """Return what is known of a component; check it if nothing is, or `again`.

    Several threads check it once.
    """
    place = _get_place(name, target)
    if not again and place in _proofs:
        return _proofs[place]
    with _lock:
        if not again and place in _proofs:
            return _proofs[place]
        if name in _running:
            return Proof(name, False, 0, problem="a check of itself", lasting=False)
        _running.append(name)
        try:
            found = _load_or_check(COMPONENTS[name], target, again)
        finally:
            _running.remove(name)
        _proofs[place] = found
    if not found.right:
        _check_alive(COMPONENTS[name], target.device)
    return found


def _load_or_check(component: Component, target: Target, again: bool) -> Proof:
    """Return the proof on disk, or checks the component and keeps what comes of it there.

    A mark on disk says that a check has begun: if that process died, as a wrong kernel can make it
    die, the component is not tried again until the doctor is asked to.
    """
    key = {**target.key(), "component": component.name}
    stored = None if again else proof_files.load_proof(key, Proof)
    if isinstance(stored, Proof) and stored.component == component.name:
        return stored
    if stored is proof_files.DIED:
        return Proof(component.name, False, 0, problem="the end of the process that checked it")
    with proof_files.mark_check(key):
        found = check_component(component, target)
    if found.lasting:
        proof_files.save_proof(key, found)
    return found


def check_component(component: Component, target: Target) -> Proof:
    """Run every trial of a component, up to the first that fails."""
    started = time.perf_counter()
    trials = 0
    worst = Measurement("", 0.0, math.inf)
    problem = ""
    lasting = True
    try:
        with _isolate_check(target.device):
            for measured in component.measure(target):
                trials += 1
                if not measured.error <= measured.tolerance:  # NaN too
                    worst = measured
                    break
                if trials == 1 or compute_closeness(measured) > compute_closeness(worst):
                    worst = measured
            synchronize_device(target.device)
    # A kernel that does not compile or launch, a driver that is too old: errors of any class.
    except Exception as error:
        problem = f"{type(error).__name__}: {summarize_error(error)}"[:300]
        lasting = not isinstance(error, (torch.OutOfMemoryError, MemoryError))
        worst = Measurement(worst.trial, math.nan, math.nan)
    right = not problem and trials > 0 and worst.error <= worst.tolerance
    return Proof(
        component=component.name,
        right=right,
        trials=trials,
        trial=worst.trial,
        error=_to_finite(worst.error),
        tolerance=_to_finite(worst.tolerance),
        problem=problem or ("no trial" if not trials else ""),
        seconds=round(time.perf_counter() - started, 3),
        lasting=lasting,
    )


def compute_closeness(measured: Measurement) -> float:
    """Return how close an error is to its tolerance, from 0 to 1."""
    return measured.error / max(measured.tolerance, 1e-30)


@contextmanager
def _isolate_check(device: torch.device) -> Iterator[None]:
    """Run the block without gradients, inference mode and autocast, which a caller may have set.

    Nothing in the block draws from a global random generator, whose state stays as it is.
    """
    autocast = nullcontext()
    if torch.amp.is_autocast_available(device.type):
        autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), autocast:
        yield


@contextmanager
def exclude_checks() -> Iterator[None]:
    """Keep checks of other threads from the device while the block captures a CUDA graph."""
    with _lock:
        yield


def _warn_of_failure(found: Proof, target: Target) -> None:
    """Warn of a wrong component once for each device."""
    if (found.component, target.device) in _warned:
        return
    _warned.add((found.component, target.device))
    component = COMPONENTS[found.component]
    warn(
        f"{component.title} cannot be used on {describe_device(target.device)}: "
        f"{found.reason()}. {component.instead}. Please {REPORT}."
    )


def _check_alive(component: Component, device: torch.device) -> None:
    """Refuse to continue on a device that a failed check has left unusable, as in CUDA."""
    try:
        usable = torch.ones(2, device=device).sum().item() == 2
    except Exception:
        usable = False
    if not usable:
        raise RestoreKVError(
            f"{describe_device(device)} stopped answering while restorekv checked "
            f"{_lower_first(component.title)}; start again, which will do without, and {REPORT}."
        )


def forget_proofs() -> None:
    """Forget what this process knows; files stay."""
    with _lock:
        _proofs.clear()
        _warned.clear()
        identify_device.cache_clear()


def _get_place(name: str, target: Target) -> tuple:
    """Return under what a proof is remembered in the process."""
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
    """Return which error of a number of a softmax average rounding explains, relative to its size.

    The size is the weighted mean of the absolute values that the number averages. Weights, the
    result and partial results that are merged are rounded to `dtype`, by eps / 2 of the size each,
    and eps / 2 is to spare. Logits of up to `largest` and sums are float32: a logit that is off by
    d changes a weight by the factor e^d. `products` are PyTorch's own, in which float32 factors may
    be rounded to TF32.
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
        "triton": _get_package_version("triton"),
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


def _get_package_version(name: str) -> str:
    """Return the version of an installed package, or nothing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@cache
def _digest_code() -> str:
    """Return 16 hex digits of the code that proofs are about: changed code is checked again."""
    digest = hashlib.sha256()
    paths = []
    for pattern in ("cache/*.py", "model/**/*.py", "evictors/*.py", "compression/*.py"):
        paths += PACKAGE.glob(pattern)
    for path in sorted(paths):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
