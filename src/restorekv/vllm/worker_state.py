"""What attention layers and the connector share in a worker process: the pool and the step.

vLLM makes attention layers and connectors separately; they have only the process in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from restorekv.vllm.document_batch import DocumentBatch
from restorekv.vllm.page_pool import PagePool

MEMORY = 1 << 30  # bytes of documents, unless the connector's options say otherwise
LAYER = re.compile(r"\blayers\.(\d+)\.")

_pools: dict[str, PagePool] = {}  # of the newest engine of this process, by its instance id
_step_documents: Mapping[int, str] = {}  # see `begin_step`
_batch: DocumentBatch | None = None  # of the last step that asked documents
_layer_numbers: dict[str, int] = {}  # of layers, by their names in vLLM


def serves_documents(config: Any) -> bool:
    """Return whether vLLM was started with the connector that fills the pool."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == "RaggedConnector"


def get_documents_memory(config: Any) -> int:
    """Return the bytes of documents that a worker may hold."""
    transfer = config.kv_transfer_config
    options = transfer.kv_connector_extra_config if transfer else {}
    return int(options.get("documents_memory", MEMORY))


def get_page_size(config: Any) -> int:
    """Return the pairs of a page: the smallest block of the platform's attention kernel."""
    return 32 if config.device_config.device_type == "cpu" else 16


def count_pool_pages(config: Any, head_dim: int) -> int:
    """Return how many pages the pool of a worker has, for heads of `head_dim` numbers."""
    page_bytes = get_page_size(config) * 2 * head_dim * config.model_config.dtype.itemsize
    return get_documents_memory(config) // page_bytes


def reserve_pool(engine: str, make_pool: Callable[[], PagePool]) -> PagePool:
    """Return the pool of an engine, which the first of its attention layers makes.

    Args:
        engine: vLLM's instance id.
        make_pool: Makes the pool; called once per engine, after the pool of an earlier one is gone.
    """
    if engine not in _pools:
        forget_pools()
        _pools[engine] = make_pool()
    return _pools[engine]


def forget_pools() -> None:
    """Release the memory of an engine that has ended."""
    _pools.clear()
    keep_batch(None)


def get_pool() -> PagePool:
    """Return the pool of this process."""
    (only,) = _pools.values()
    return only


def has_pool(engine: str) -> bool:
    """Return whether restorekv's attention layers were made for an engine, by its instance id.

    The pool of an earlier engine of this process says nothing about the layers of this one.
    """
    return engine in _pools


def begin_step(documents: Mapping[int, str]) -> None:
    """Set which documents the step's requests ask: names by the first block of a request."""
    global _step_documents
    _step_documents = documents


def end_step() -> None:
    """Forget the step's documents."""
    begin_step({})


def get_step() -> Mapping[int, str]:
    """Return the documents that `begin_step` was given."""
    return _step_documents


def get_last_batch() -> DocumentBatch | None:
    """Return the batch that `keep_batch` was given last, or None."""
    return _batch


def keep_batch(batch: DocumentBatch | None) -> None:
    """Keep a batch of documents for the next step, which often asks the same ones."""
    global _batch
    _batch = batch


def find_layer_number(name: str) -> int:
    """Return the number of a layer from its name in vLLM, such as model.layers.3.self_attn.attn."""
    number = _layer_numbers.get(name)
    if number is None:
        match = LAYER.search(name)
        if match is None:
            raise ValueError(f"The attention layer {name} has no number.")
        number = _layer_numbers[name] = int(match[1])
    return number
