"""The KV connector that gives vLLM compressed documents; vLLM calls this interface experimental.

The scheduler's half finds the document that a prompt's placeholders stand for and promises its m
tokens; the worker's half writes the document's keys and values into the blocks that the scheduler
chose, through the attention backend's own method, so that no cache layout is ours. A document that
a process has not read yet is read and written in a thread, beside the steps of other requests. One
that cannot be had is promised and reported as not loaded, which ends that request alone.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from restorekv.errors import RestoreKVError
from restorekv.model.rope import get_rope_settings
from restorekv.vllm.store import MEMORY, Document, Expected, Store, heads_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.restorekv")
LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Load:
    """The positions `first` to `end` - 1 of a document go to a request's blocks; without one,
    `problem` says why.

    `beside` says that the request waits for it, while steps of other requests go on.
    """

    request: str
    document: Document | None
    problem: str
    first: int
    end: int
    blocks: tuple[int, ...]
    beside: bool = False

    def touched(self, block_size: int) -> set[int]:
        """Returns the blocks that the load writes to."""
        return set(self.blocks[self.first // block_size : -(-self.end // block_size)])


@dataclass
class Loads(KVConnectorMetadata):
    """What the worker loads before its next step."""

    loads: list[Load] = field(default_factory=list)


class RestoreKVConnector(KVConnectorBase_V1):
    """Options in kv_connector_extra_config: `store`, a folder; `fingerprint` of the weights that
    documents must have been made with; `memory`, bytes of documents that each process keeps.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        if "store" not in options:
            raise RestoreKVError(
                "kv_connector_extra_config lacks `store`, the folder of portable documents."
            )
        expected = expected_of(vllm_config, options.get("fingerprint"))
        parallel = vllm_config.parallel_config
        if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
            raise RestoreKVError(
                "Documents cannot be spread over context parallel ranks; use tensor parallel ones."
            )
        self.store = Store(options["store"], expected, int(options.get("memory", MEMORY)))
        if role == KVConnectorRole.SCHEDULER:
            self.store.scan()
            for _, document in self.store.documents.values():
                if document.problem:
                    log.warning("A file of the store is not served: %s", document.problem)
        self.block_size = vllm_config.cache_config.block_size
        self.found: dict[str, tuple[Document | None, str]] = {}  # by request
        self.pending: dict[str, Load] = {}
        self.awaited: dict[str, Document] = {}  # by request: what workers read for the first time
        self.read: set[str] = set()  # documents that workers have read
        self.failed: set[int] = set()
        self.reader = ThreadPoolExecutor(1, "restorekv-reader")
        self.reading: dict[str, Future] = {}  # by request

    # The scheduler's half.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Returns how many tokens of the prompt the document brings beyond those that vLLM still
        has.
        """
        ids = list(request.prompt_token_ids or ())
        wanted = (request.kv_transfer_params or {}).get("document")
        try:
            document = self.store.find(ids, wanted)
            problem = ""
        except RestoreKVError as error:
            document = None
            problem = str(error)
        if document is None and not problem:
            return 0, False
        self.found[request.request_id] = document, problem
        tokens = max((len(document.ids) if document else len(ids) - 1) - num_computed_tokens, 0)
        return tokens, bool(tokens and document and document.name not in self.read)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Remembers which blocks the document goes to."""
        document, problem = self.found.pop(request.request_id, (None, ""))
        if num_external_tokens > 0:
            end = len(document.ids) if document else len(request.prompt_token_ids) - 1
            ids = tuple(blocks.get_block_ids()[0])
            first = end - num_external_tokens
            beside = bool(document and document.name not in self.read)
            self.pending[request.request_id] = Load(
                request.request_id, document, problem, first, end, ids, beside
            )
            if beside:
                self.awaited[request.request_id] = document

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Learns which documents the workers have read; a later request gets them with its first
        step.
        """
        done = connector_output.finished_recving or ()
        self.read |= {self.awaited.pop(name).name for name in done if name in self.awaited}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        loads = Loads(list(self.pending.values()))
        self.pending = {}
        return loads

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self.found.pop(request.request_id, None)
        return False, None

    # The worker's half.

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Writes this step's documents into vLLM's cache, and begins with those that requests wait
        for.
        """
        loads = self._get_connector_metadata().loads
        layers = attention_layers(forward_context) if loads else {}
        for load in loads:
            if load.beside:
                self.reading[load.request] = self.reader.submit(
                    self.load, load, layers, after(layers)
                )
            else:
                self.failed |= self.load(load, layers)

    @torch.inference_mode()
    def load(
        self, load: Load, layers: dict[int, Any], stream: torch.cuda.Stream | None = None
    ) -> set[int]:
        """Writes a document; returns the blocks that lack it because it cannot be had."""
        try:
            if load.document is None:
                raise RestoreKVError(load.problem)
            with on(stream):
                write(load, *self.store.pairs(load.document), layers, self.block_size)
        except (
            Exception
        ) as error:  # in a thread it would be lost, and the request would wait for ever
            log.error(
                "Request %s ends: %s",
                load.request,
                error,
                exc_info=not isinstance(error, RestoreKVError),
            )
            return load.touched(self.block_size)
        return set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """Returns the requests that need not wait any more."""
        done = {name: future for name, future in self.reading.items() if future.done()}
        for name, future in done.items():
            self.failed |= future.result()
            del self.reading[name]
        return None, set(done)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = self.failed
        self.failed = set()
        return failed

    def shutdown(self) -> None:
        """Ends the thread that reads."""
        self.reader.shutdown(cancel_futures=True)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: what this step reads is there when start_load_kv returns."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: documents are made by restorekv, never by vLLM."""

    def wait_for_save(self) -> None:
        """Does nothing; see save_kv_layer."""


def expected_of(vllm_config: VllmConfig, fingerprint: str | None) -> Expected:
    """Returns what documents for the engine's model must be like."""
    model = vllm_config.model_config
    config = model.hf_text_config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return Expected(
        config.num_hidden_layers,
        heads,
        model.get_head_size(),
        get_rope_settings(config),
        str(model.dtype).removeprefix("torch."),
        config.vocab_size,
        fingerprint,
    )


def attention_layers(forward_context: ForwardContext) -> dict[int, Any]:
    """Returns the layers that have a cache, by their number."""
    found = {}
    for name, layer in forward_context.no_compile_layers.items():
        number = LAYER.search(name)
        if number and getattr(layer, "kv_cache", None) is not None:
            found[int(number[1])] = layer
    return found


def after(layers: dict[int, Any]) -> torch.cuda.Stream | None:
    """Returns a stream of the layers' GPU that begins where the engine's is now; None on a CPU."""
    device = cache_of(next(iter(layers.values()))).device if layers else None
    if device is None or device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@contextmanager
def on(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Runs the block on a stream, if one is given, and waits for its end."""
    with torch.cuda.stream(stream):
        yield
    if stream:
        stream.synchronize()


def cache_of(layer: Any) -> torch.Tensor:
    """Returns the pages of a layer."""
    return layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache


def write(
    load: Load, keys: torch.Tensor, values: torch.Tensor, layers: dict[int, Any], block_size: int
) -> None:
    """Writes keys and values (L, H, m, D) of the load's positions; a rank takes the heads that its
    layers have.
    """
    if not set(layers) <= set(range(len(keys))) or len(layers) == 0:
        raise RestoreKVError("The engine's layers are not those of the document.")
    rank = get_tensor_model_parallel_rank()
    ranks = get_tensor_model_parallel_world_size()
    positions = torch.arange(load.first, load.end)
    slots = torch.tensor(load.blocks)[positions // block_size] * block_size + positions % block_size
    for number, layer in layers.items():
        cache = cache_of(layer)
        heads = heads_of(rank, ranks, keys.shape[1], layer.num_kv_heads)
        pair = (
            x[number, heads, load.first : load.end].transpose(0, 1).contiguous()
            for x in (keys, values)
        )
        layer.impl.do_kv_cache_update(
            layer, *(x.to(cache.device) for x in pair), cache, slots.to(cache.device)
        )
