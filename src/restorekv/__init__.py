"""Compress a long context's KV cache once, restore what eviction lost, ask anything.

The public names are loaded on first use, so that `restorekv --help` does not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from restorekv.compression.budget import Budget
    from restorekv.compression.compressor import PreparedContext
    from restorekv.compression.config import CompressionConfig
    from restorekv.compression.eviction import Eviction
    from restorekv.compression.prepared_cache import PreparedContextCache
    from restorekv.context import CompressedContext
    from restorekv.errors import RestoreKVError, RestoreKVWarning
    from restorekv.generation.answers import Answer
    from restorekv.generation.chat import Chat
    from restorekv.generation.sampling import SamplingConfig
    from restorekv.many_contexts import ask_many, compose
    from restorekv.model.load import load_model
    from restorekv.pipeline import compress
    from restorekv.restore.adapter import RestoreAdapter
    from restorekv.storage.portable import Portable, load_portable

__all__ = [
    "Answer",
    "Budget",
    "Chat",
    "CompressedContext",
    "CompressionConfig",
    "Eviction",
    "Portable",
    "PreparedContext",
    "PreparedContextCache",
    "RestoreAdapter",
    "RestoreKVError",
    "RestoreKVWarning",
    "SamplingConfig",
    "ask_many",
    "compose",
    "compress",
    "load_model",
    "load_portable",
]
_MODULES = {
    "Answer": "generation.answers",
    "Budget": "compression.budget",
    "Chat": "generation.chat",
    "CompressedContext": "context",
    "CompressionConfig": "compression.config",
    "Eviction": "compression.eviction",
    "Portable": "storage.portable",
    "PreparedContext": "compression.compressor",
    "PreparedContextCache": "compression.prepared_cache",
    "RestoreAdapter": "restore.adapter",
    "RestoreKVError": "errors",
    "RestoreKVWarning": "errors",
    "SamplingConfig": "generation.sampling",
    "ask_many": "many_contexts",
    "compose": "many_contexts",
    "compress": "pipeline",
    "load_model": "model.load",
    "load_portable": "storage.portable",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'restorekv' has no attribute {name!r}")
    return getattr(import_module(f"restorekv.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
