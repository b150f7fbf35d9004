"""The KV connector that gives vLLM portable documents; vLLM calls this interface experimental.

The scheduler's side finds the document that a prompt's placeholders name and promises its m
tokens. The worker's side writes the document's keys and values into the blocks that the scheduler
chose. It does so through the attention backend's own method and need not know the cache's layout.
A document that a process has not read yet is read and written in a thread, while steps of other
requests continue. One that cannot be loaded is promised and then reported as not loaded, which ends
that request alone (connector_base.py says how).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from restorekv.errors import RestoreKVError
from restorekv.vllm.connector_base import (
    DocumentConnector,
    find_request_problem,
    get_options,
    limit_answer_length,
    refuse_engine,
    require_store,
)
from restorekv.vllm.document_store import EngineModel, StoredDocument, find_heads
from restorekv.vllm.portable_store import MEMORY, PortableStore
from restorekv.vllm.worker_state import LAYER

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.restorekv")


@dataclass(frozen=True)
class Load:
    """A document that is to be written into a request's blocks.

    Args:
        request: The request's id.
        document: The document; None if it cannot be loaded.
        problem: Why it cannot be loaded, "" if it can.
        first: The first position that is written.
        end: The position after the last.
        blocks: The request's blocks, in the order of its positions.
        in_background: Whether the request waits for it, while other requests continue.
    """

    request: str
    document: StoredDocument | None
    problem: str
    first: int
    end: int
    blocks: tuple[int, ...]
    in_background: bool = False

    def list_blocks(self, block_size: int) -> set[int]:
        """Return the blocks that the load writes to."""
        return set(self.blocks[self.first // block_size : -(-self.end // block_size)])


@dataclass
class Loads(KVConnectorMetadata):
    """What the worker loads before its next step."""

    loads: list[Load] = field(default_factory=list)


class RestoreKVConnector(DocumentConnector):
    """A KV connector of vLLM that serves portable documents.

    Options in kv_connector_extra_config: `store`, a folder; `fingerprint` of the weights that
    documents must have been made with; `memory`, bytes of documents that each process keeps.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = get_options(vllm_config)
        folder = require_store(options, "portable documents")
        model = EngineModel.from_vllm(vllm_config, options.get("fingerprint"))
        speculation = vllm_config.speculative_config
        drafts = "with a draft model, which has its own layers; leave out the speculative config"
        # Drafts from n-grams of the text have no layers.
        refuse_engine(
            vllm_config, [(speculation is not None and speculation.method != "ngram", drafts)]
        )
        self.store = PortableStore(folder, model, int(options.get("memory", MEMORY)))
        if role == KVConnectorRole.SCHEDULER:
            self.store.scan()
            for document in self.store.documents:
                if document.problem:
                    log.warning("A file of the store is not served: %s", document.problem)
        self.block_size = vllm_config.cache_config.block_size
        # State of the scheduler's side, all by request except `loaded`.
        self.matched: dict[str, tuple[StoredDocument | None, str]] = {}
        self.pending: dict[str, Load] = {}
        # Documents that workers are reading for the first time, and the blocks they go to.
        self.awaited: dict[str, tuple[StoredDocument, set[int]]] = {}
        self.loaded: set[str] = set()  # names of documents that workers have read
        # State of the worker's side.
        self.failed: set[int] = set()  # blocks without their document
        self.reader = ThreadPoolExecutor(1, "restorekv-reader")
        self.reading: dict[str, Future] = {}  # by request

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return how many tokens the document brings, and whether the request waits for them.

        Tokens that vLLM's prefix cache still has do not count.
        """
        ids = list(request.prompt_token_ids or ())
        wanted = (request.kv_transfer_params or {}).get("document")
        document = None
        problem = ""
        try:
            document = self.store.find_document(ids, wanted)
        except RestoreKVError as error:
            problem = str(error)
        if document is None and not problem:
            return 0, False
        problem = problem or find_request_problem(request)
        if problem:
            document = None
            # vLLM must accept the promised tokens, even if the request skips the prefix cache.
            request.skip_reading_prefix_cache = False
        self.matched[request.request_id] = (document, problem)
        if document is None:
            return request.num_tokens - num_computed_tokens, True
        limit_answer_length(request, self.store, document)
        tokens = max(len(document.ids) - num_computed_tokens, 0)
        return tokens, bool(tokens and self._is_unread(document))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Remember which blocks the document goes to."""
        document, problem = self.matched.pop(request.request_id, (None, ""))
        if num_external_tokens <= 0:
            return
        end = len(document.ids) if document else request.num_tokens
        # Of a request that must end with an error, only the last token's block is reported.
        first = end - num_external_tokens if document else end - 1
        in_background = document is None or self._is_unread(document)
        load = Load(
            request=request.request_id,
            document=document,
            problem=problem,
            first=first,
            end=end,
            blocks=tuple(blocks.get_block_ids()[0]),
            in_background=in_background,
        )
        self.pending[request.request_id] = load
        if document and in_background:
            self.awaited[request.request_id] = document, load.list_blocks(self.block_size)

    def _is_unread(self, document: StoredDocument) -> bool:
        """Return whether the workers have yet to read a document."""
        return document.name not in self.loaded

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Note which documents the workers have read.

        A later request gets them with its first step.
        """
        for request in connector_output.finished_recving or ():
            if request not in self.awaited:
                continue
            document, blocks = self.awaited.pop(request)
            if blocks.isdisjoint(connector_output.invalid_block_ids):
                self.loaded.add(document.name)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        """Return the loads of the worker's next step."""
        loads = Loads(list(self.pending.values()))
        self.pending = {}
        return loads

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Forget a request; its blocks may be freed."""
        self.matched.pop(request.request_id, None)
        return False, None

    # The worker's side.

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Write this step's documents into vLLM's cache; start loading those that requests wait
        for.
        """
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        loads = metadata.loads
        layers = find_attention_layers(forward_context) if loads else {}
        for load in loads:
            if load.in_background:
                stream = open_stream(layers)
                self.reading[load.request] = self.reader.submit(
                    self._load_document, load, layers, stream
                )
            else:
                self.failed |= self._load_document(load, layers)

    @torch.inference_mode()
    def _load_document(
        self, load: Load, layers: dict[int, Any], stream: torch.cuda.Stream | None = None
    ) -> set[int]:
        """Load and write a document; return the blocks that lack it because it cannot be loaded."""
        try:
            if load.document is None:
                raise RestoreKVError(load.problem)
            with use_stream(stream):
                keys, values = self.store.load_pairs(load.document)
                write_pairs(load, keys, values, layers, self.block_size)
        # An exception that left the thread would be lost, and the request would wait forever.
        except Exception as error:
            log.error(
                "Request %s ends: %s",
                load.request,
                error,
                exc_info=not isinstance(error, RestoreKVError),
            )
            return load.list_blocks(self.block_size)
        return set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """Return the requests that need not wait any more."""
        done = {request for request, future in self.reading.items() if future.done()}
        for request in done:
            self.failed |= self.reading.pop(request).result()
        return None, done

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks whose documents could not be loaded since the last call."""
        failed = self.failed
        self.failed = set()
        return failed

    def shutdown(self) -> None:
        """End the thread that reads."""
        self.reader.shutdown(cancel_futures=True)


def find_attention_layers(forward_context: ForwardContext) -> dict[int, Any]:
    """Return the layers that have a cache, by their number."""
    layers: dict[int, Any] = {}
    for name, layer in forward_context.no_compile_layers.items():
        number = LAYER.search(name)
        if number and getattr(layer, "kv_cache", None) is not None:
            if int(number[1]) in layers:
                raise RestoreKVError(
                    f"Two of the engine's layers have the number {number[1]}, so it is not known "
                    "which one a document belongs to; serve the model alone."
                )
            layers[int(number[1])] = layer
    return layers


def open_stream(layers: dict[int, Any]) -> torch.cuda.Stream | None:
    """Return a new stream that first waits for the engine's current work; None on a CPU."""
    if not layers:
        return None
    device = find_pages(next(iter(layers.values()))).device
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@contextmanager
def use_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run the block on a stream, if there is one, and wait until its work is done."""
    with torch.cuda.stream(stream):
        yield
    if stream:
        stream.synchronize()


def find_pages(layer: Any) -> torch.Tensor:
    """Return the pages of a layer's cache, which some versions of vLLM put into a list."""
    return layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache


def write_pairs(
    load: Load, keys: torch.Tensor, values: torch.Tensor, layers: dict[int, Any], block_size: int
) -> None:
    """Write a document into the layers' pages.

    Args:
        load: Which positions go to which blocks.
        keys: The document's keys (L, H, m, D).
        values: The document's values (L, H, m, D).
        layers: The engine's layers by number. A tensor parallel rank writes only its own heads.
        block_size: Positions of a block.
    """
    if not layers or not set(layers) <= set(range(len(keys))):
        raise RestoreKVError("The engine's layers are not those of the document.")
    rank = get_tensor_model_parallel_rank()
    ranks = get_tensor_model_parallel_world_size()
    positions = torch.arange(load.first, load.end)
    blocks = torch.tensor(load.blocks)[positions // block_size]
    slots = blocks * block_size + positions % block_size
    for number, layer in layers.items():
        pages = find_pages(layer)
        heads = find_heads(rank, ranks, keys.shape[1])
        # vLLM wants (tokens, heads, D).
        own_keys = keys[number, heads, load.first : load.end].transpose(0, 1).contiguous()
        own_values = values[number, heads, load.first : load.end].transpose(0, 1).contiguous()
        layer.impl.do_kv_cache_update(
            layer,
            own_keys.to(pages.device),
            own_values.to(pages.device),
            pages,
            slots.to(pages.device),
        )
