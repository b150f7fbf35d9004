"""The names that options take, for `--help` and for refusals before PyTorch is imported.

They repeat what the library's own tables say, which import PyTorch; tests/cli/test_fast_refusals.py
compares the two.
"""

from collections.abc import Iterable
from importlib.metadata import entry_points

from restorekv.errors import RestoreKVError
from restorekv.spec import explain_unknown

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
STORAGES = ("model", "int8", "fp8")
DTYPES = ("auto", "float32", "bfloat16", "float16")
PROTOCOLS = ("kvpress", "kvzip")
GROWING = ("last", "every", "none")  # restore tokens of earlier parts
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

EVICTOR_PLUGINS = "restorekv.evictors"
BENCHMARK_PLUGINS = "restorekv.benchmarks"


def list_evictors() -> list[str]:
    """Return the names of evictors and methods, with those of installed plugins."""
    return list(dict.fromkeys((*EVICTORS, *_list_plugins(EVICTOR_PLUGINS), *COMPRESSORS)))


def list_benchmarks() -> list[str]:
    """Return the names of benchmarks, with those of installed plugins."""
    return list(dict.fromkeys((*BENCHMARKS, *_list_plugins(BENCHMARK_PLUGINS))))


def check_evictor(text: str) -> None:
    """Refuse a spec, such as snapkv:window=64, of an evictor that is not known."""
    _check_spec(text, (*EVICTORS, *COMPRESSORS), EVICTOR_PLUGINS, "evictor")


def check_benchmark(text: str) -> None:
    """Refuse a spec, such as ruler:length=8192, of a benchmark that is not known."""
    _check_spec(text, BENCHMARKS, BENCHMARK_PLUGINS, "benchmark")


def _list_plugins(group: str) -> list[str]:
    return [entry.name for entry in entry_points(group=group)]


def _check_spec(text: str, known: Iterable[str], group: str, what: str) -> None:
    """Refuse a spec whose name is not known.

    A plugin's class may have another name than its entry point, so where one is installed the
    library decides.
    """
    name = text.partition(":")[0].partition("#")[0]
    if name not in known and not _list_plugins(group):
        raise RestoreKVError(explain_unknown(what, name, known))
