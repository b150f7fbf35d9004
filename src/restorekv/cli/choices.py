"""The names that options take, for `--help` and for refusals before PyTorch is imported.

They repeat what the library's own tables say, which import PyTorch; tests/cli/test_fast_refusals.py
compares the two.
"""

import sys
from collections.abc import Iterable
from importlib.metadata import entry_points

from restorekv.compression.presets import PRESETS
from restorekv.errors import RestoreKVError
from restorekv.spec import explain_unknown, hint_near_name

EVICTORS = (
    "kvzip",
    "kvzip+",
    "contrastkv",
    "contrastkv-simple",
    "snapkv",
    "h2o",
    "fastkvzip",
    "kvzap",
    "expected-attention",
    "keydiff",
    "knorm",
    "streaming",
    "tova",
    "random",
    "kvpress",
)
COMPRESSORS = ("am-fast",)
ALLOCATIONS = ("global", "per-layer", "per-head", "adakv")
KV_DTYPES = ("model", "int8", "fp8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PROTOCOLS = ("kvpress", "kvzip")
GROWING = ("last", "every", "none")  # --restore of append: the parts whose restore tokens stay
BENCHMARKS = (
    "tiny",
    "factbook",
    "fairytaleqa",
    "genres",
    "hotpotqa",
    "lines",
    "longbench",
    "longhealth",
    "needle",
    "qasper",
    "quality",
    "ruler",
    "scbench",
    "xquad",
)

# The formats of files that commands write, and what messages call them.
OUTPUT_KINDS = {
    "restorekv-cache": "a restorekv cache",
    "restorekv-portable": "a portable cache of restorekv",
    "restorekv-gate": "a gate of restorekv",
}
ENGINES = ("embedded", "vllm")
DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "xla", "xpu")

EVICTOR_PLUGINS = "restorekv.evictors"
BENCHMARK_PLUGINS = "restorekv.benchmarks"
DEVICE_PLUGINS = "torch.backends"  # PyTorch's own group; such a package may bring any name
# The library's own tables, whose modules import PyTorch.
TABLES = {
    EVICTOR_PLUGINS: ("restorekv.evictors", "EVICTORS"),
    BENCHMARK_PLUGINS: ("restorekv.tasks", "BENCHMARKS"),
}


def list_evictors() -> list[str]:
    """Return the names of evictors and methods, with those of installed plugins."""
    return list(dict.fromkeys((*EVICTORS, *_list_plugins(EVICTOR_PLUGINS), *COMPRESSORS)))


def list_benchmarks() -> list[str]:
    """Return the names of benchmarks, with those of installed plugins."""
    return list(dict.fromkeys((*BENCHMARKS, *_list_plugins(BENCHMARK_PLUGINS))))


def check_evictor(text: str) -> None:
    """Refuse a spec, such as snapkv:window=64, of an evictor that is not known."""
    _check_spec(text, (*PRESETS, *EVICTORS, *COMPRESSORS), EVICTOR_PLUGINS, "evictor")


def check_benchmark(text: str) -> None:
    """Refuse a spec, such as ruler:length=8192, of a benchmark that is not known."""
    _check_spec(text, BENCHMARKS, BENCHMARK_PLUGINS, "benchmark")


def check_device(text: str) -> str:
    """Refuse a device that no PyTorch has, such as gpu.

    Whether this machine has the device is checked later, by PyTorch.
    """
    name, colon, number = text.partition(":")
    is_known = name in DEVICES or _list_plugins(DEVICE_PLUGINS)
    if not is_known or (colon and not number.isdecimal()):
        raise RestoreKVError(
            f"There is no device {text!r}; use cpu, cuda, a GPU by its number such as cuda:1, or "
            "mps."
        )
    return text


def check_preset(preset: str) -> None:
    """Refuse what is neither a preset nor an evictor."""
    known = (*PRESETS, *EVICTORS, *_list_added(EVICTOR_PLUGINS))
    if preset not in known and not _list_plugins(EVICTOR_PLUGINS):
        hint = hint_near_name(preset, known)
        raise RestoreKVError(
            f"--preset must be {' or '.join(PRESETS)}, or the name of an evictor, not "
            f"{preset!r}{hint}."
        )


def _list_plugins(group: str) -> list[str]:
    return [entry.name for entry in entry_points(group=group)]


def _list_added(group: str) -> list[str]:
    """Return the names in the library's table if its module is imported: a program that calls the
    command line may have added some.
    """
    module, table = TABLES[group]
    return list(getattr(sys.modules.get(module), table, ()))


def _check_spec(text: str, known: Iterable[str], group: str, what: str) -> None:
    """Refuse a spec with a name that is not known.

    If a plugin is installed, nothing is refused here: its class may have a different name than its
    entry point, which only the library can find out.
    """
    name = text.partition(":")[0].partition("#")[0]
    if name not in (*known, *_list_added(group)) and not _list_plugins(group):
        raise RestoreKVError(explain_unknown(what, name, known))
