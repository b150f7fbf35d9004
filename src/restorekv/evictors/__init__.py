"""The evictors by name. A spec is a name with settings: "kvzip", "kvzip+:chunk=512,sinks=0"."""

from restorekv import spec
from restorekv.evictors.base import Evictor
from restorekv.evictors.contrastkv import ContrastKV, ContrastKVSimple
from restorekv.evictors.expected_attention import ExpectedAttention
from restorekv.evictors.fastkvzip import FastKVzip
from restorekv.evictors.h2o import H2O
from restorekv.evictors.keydiff import KeyDiff
from restorekv.evictors.knorm import Knorm
from restorekv.evictors.kvpress_bridge import FromKVPress
from restorekv.evictors.kvzap import KVzap
from restorekv.evictors.kvzip import KVzip
from restorekv.evictors.kvzip_plus import KVzipPlus
from restorekv.evictors.random import Random
from restorekv.evictors.snapkv import SnapKV
from restorekv.evictors.streaming import Streaming
from restorekv.evictors.tova import TOVA

__all__ = ["EVICTORS", "Evictor", "make_evictor"]

CLASSES = (
    KVzip,
    KVzipPlus,
    ContrastKV,
    ContrastKVSimple,
    SnapKV,
    H2O,
    FastKVzip,
    KVzap,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Streaming,
    TOVA,
    Random,
    FromKVPress,
)
EVICTORS: dict[str, type[Evictor]] = {each.name: each for each in CLASSES}
spec.register_entry_points("restorekv.evictors", EVICTORS)


def make_evictor(text: str) -> Evictor:
    """Return the evictor of a spec."""
    return spec.parse_spec(text, EVICTORS, "evictor", bases=(Evictor,))
