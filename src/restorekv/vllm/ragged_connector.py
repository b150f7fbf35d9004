"""The KV connector that gives an unpatched vLLM documents whose heads keep different lengths.

The scheduler's side finds the document that a prompt's placeholders name, promises vLLM that the
placeholders are computed, and decides which documents are in the workers' pools. A request
whose document is not there yet waits, while others continue. The worker's side reads documents in a
thread and, at every step, gives the attention backend the document of each request. Nothing is
written into vLLM's own pool.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)

from restorekv.errors import RestoreKVError
from restorekv.model.rope import shift_keys
from restorekv.vllm import composition, worker_state
from restorekv.vllm.connector_base import (
    DocumentConnector,
    find_request_problem,
    get_options,
    limit_answer_length,
    refuse_engine,
    require_store,
)
from restorekv.vllm.document_store import EngineModel, StoredDocument, find_heads
from restorekv.vllm.page_pool import DocumentPairs, PoolLedger, Residency
from restorekv.vllm.ragged_documents import (
    PLACEHOLDERS,
    build_rope_model,
    gather_pairs,
    load_file,
)
from restorekv.vllm.ragged_store import RaggedStore, count_pages_of_largest_rank, describe_excess

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.restorekv")
LOAD_WAIT_SECONDS = 0.002  # how long a step waits for documents that are being read


@dataclass(frozen=True)
class LoadOrder:
    """A document to load.

    Args:
        name: The document.
        files: Name and path of every file, several for a composition.
        number: The running number of the scheduler's loads, which distinguishes this load from
            earlier ones of the same document.
    """

    name: str
    files: tuple[tuple[str, Path], ...]
    number: int


@dataclass
class RaggedConnectorMetadata(KVConnectorMetadata):
    """The scheduler's orders: what workers do before and in a step.

    Args:
        documents: The documents that scheduled requests are about, by the request's first block.
        drops: Documents that leave the pool.
        loads: Documents that enter it.
        refused: The requests that end with an error, each with the block of its last token. Such a
            request waits for a load, although nothing is loaded; see connector_base.
    """

    documents: dict[int, str] = field(default_factory=dict)
    drops: list[str] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)


@dataclass
class RaggedWorkerMetadata(KVConnectorWorkerMetadata):
    """Results of loads, by (document, number of the load).

    Args:
        loaded: How many workers have finished the load.
        failed: Why the load failed.
    """

    loaded: dict[tuple[str, int], int] = field(default_factory=dict)
    failed: dict[tuple[str, int], str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RaggedWorkerMetadata:
        """Add the report of another rank."""
        assert isinstance(other, RaggedWorkerMetadata)
        loaded = dict(self.loaded)
        for load, count in other.loaded.items():
            loaded[load] = loaded.get(load, 0) + count
        # One rank that fails decides for all: a document is in every pool or in none.
        return RaggedWorkerMetadata(loaded, {**other.failed, **self.failed})


class RaggedConnector(DocumentConnector):
    """A KV connector of vLLM that serves the documents of `.rkv` files.

    Options, in kv_connector_extra_config:

    - store: The folder of the files.
    - fingerprint: The fingerprint of the weights that the caches must have been made with.
    - documents_memory: Bytes of documents that each worker keeps at a time.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = get_options(vllm_config)
        folder = require_store(options, ".rkv files")
        refuse_unsupported(vllm_config, kv_cache_config)
        model = EngineModel.from_vllm(vllm_config, options.get("fingerprint"))
        self._scheduler: RaggedConnectorScheduler | None = None
        self._worker: RaggedConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = RaggedConnectorScheduler(vllm_config, RaggedStore(folder, model))
        else:
            self._worker = RaggedConnectorWorker(vllm_config, model)

    @property
    def scheduler(self) -> RaggedConnectorScheduler:
        """The side of a connector that vLLM made for its scheduler."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> RaggedConnectorWorker:
        """The side of a connector that vLLM made for a worker."""
        assert self._worker is not None
        return self._worker

    # The scheduler's side.

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self.scheduler.admit_request(request, num_computed_tokens)
        # The tokens count as computed immediately: nothing is loaded into vLLM's own pool. Only
        # a request that must end with an error waits for it; see connector_base.
        return tokens, request.request_id in self.scheduler.problems

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.note_blocks(request, blocks.get_block_ids()[0])

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RaggedWorkerMetadata):
            self.scheduler.apply_report(report)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> RaggedConnectorMetadata:
        return self.scheduler.make_orders(scheduler_output.num_scheduled_tokens)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        self.scheduler.forget_request(request.request_id)
        return False, None

    # The worker's side.

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, RaggedConnectorMetadata)
        self.worker.begin_step(connector_metadata)

    def clear_connector_metadata(self) -> None:
        worker_state.end_step()
        super().clear_connector_metadata()

    def build_connector_worker_meta(self) -> RaggedWorkerMetadata | None:
        return self.worker.report_loads()

    # vLLM calls both once a step, before it clears the step's orders.

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        """Report the requests that wait for their error; none is loaded into vLLM's own pool."""
        return None, set(self._get_orders().refused) or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set(self._get_orders().refused.values())

    def _get_orders(self) -> RaggedConnectorMetadata:
        orders = self._get_connector_metadata()
        assert isinstance(orders, RaggedConnectorMetadata)
        return orders

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: loads begin when the step's orders arrive."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether graphs must leave attention out: yes, documents change from step to step."""
        return True


class RaggedConnectorScheduler:
    """The scheduler's side: it knows which document every request is about, whether the document
    is in the pool, and where the request's blocks are.
    """

    def __init__(self, config: VllmConfig, store: RaggedStore) -> None:
        self.store = store
        self.block_size = config.cache_config.block_size
        # Equal, since pipeline parallel ranks are refused: heads are split over ranks, and loads
        # are counted in workers.
        self.ranks = config.parallel_config.tensor_parallel_size
        self.workers = config.parallel_config.world_size
        store.scan()
        for document in store.documents:
            if document.problem:
                log.warning("A file of the store is not served: %s", document.problem)
        self.page_size = worker_state.get_page_size(config)
        self.ledger = PoolLedger(worker_state.count_pool_pages(config, store.model.head_dim))
        self.documents: dict[str, StoredDocument] = {}  # by request id
        self.problems: dict[str, str] = {}  # by request id: why the request ends
        self.first_blocks: dict[str, int] = {}  # by request id
        self.newest_load: dict[str, int] = {}  # number of the newest load, by document
        self.finished_workers: dict[str, int] = {}  # how many workers finished it, by document
        self.files: dict[str, tuple[tuple[str, Path], ...]] = {}  # by document
        self.page_counts: dict[str, int] = {}  # by document
        self.load_number = 0
        self.refused: dict[str, int] = {}  # of the next step's orders

    def admit_request(self, request: Request, computed: int) -> int | None:
        """Return how many more tokens of a request count as computed; None while it must wait.

        The document of a new request is found and pinned here, because this is vLLM's first call
        about a request.

        Args:
            request: vLLM's.
            computed: Tokens that vLLM's prefix cache has.
        """
        request_id = request.request_id
        ids: list[int] = list(request.prompt_token_ids or ())
        # vLLM asks again in every step in which the request waits.
        if request_id not in self.documents and request_id not in self.problems:
            self._assign_document(request, ids)
        document = self.documents.get(request_id)
        if document is not None:
            residency = self._pin_document(request_id, document)
            if residency in (Residency.LOADING, Residency.NO_ROOM):
                return None
            if residency is Residency.TOO_LARGE:
                # It will never fit, so the request must not wait for room.
                pages = self.page_counts[document.name]
                problem = describe_excess(document.path, pages, self.ledger.pages)
                self._fail_request(request_id, problem)
                document = None
        if request_id in self.problems:
            # vLLM must accept the promised tokens, even if the request skips the prefix cache.
            request.skip_reading_prefix_cache = False
            return request.num_tokens - computed
        # The placeholders count as computed: nothing ever attends to their blocks.
        return 0 if document is None else max(PLACEHOLDERS - computed, 0)

    def _assign_document(self, request: Request, ids: list[int]) -> None:
        """Record which document a new request is about, or why the request must fail."""
        wanted = (request.kv_transfer_params or {}).get("document")
        try:
            document = self.store.find_document(ids, wanted)
        except RestoreKVError as error:
            self._fail_request(request.request_id, str(error))
            return
        if document is None:
            return
        problem = find_request_problem(request)
        if problem:
            self._fail_request(request.request_id, problem)
            return
        limit_answer_length(request, self.store, document)
        self.documents[request.request_id] = document

    def _pin_document(self, request_id: str, document: StoredDocument) -> Residency:
        """Pin a request's document in the pool, or order its load; return the ledger's answer."""
        self.files[document.name] = document.files
        pages = self.page_counts.get(document.name)
        if pages is None:
            assert document.lengths is not None
            # Heads differ in length and ranks hold different heads, so the fullest rank decides.
            pages = count_pages_of_largest_rank(document.lengths, self.ranks, self.page_size)
            self.page_counts[document.name] = pages
        return self.ledger.pin_or_load(request_id, document.name, pages)

    def _fail_request(self, request_id: str, problem: str) -> None:
        """End a request with an error, and log the reason."""
        log.error("Request %s ends: %s", request_id, problem)
        self.ledger.release(request_id)
        self.documents.pop(request_id, None)
        self.problems[request_id] = problem

    def note_blocks(self, request: Request, blocks: Sequence[int]) -> None:
        """Note where a request's tokens lie."""
        request_id = request.request_id
        if request_id in self.documents:
            self.first_blocks[request_id] = blocks[0]
        elif request_id in self.problems:
            self.refused[request_id] = blocks[(request.num_tokens - 1) // self.block_size]

    def apply_report(self, report: RaggedWorkerMetadata) -> None:
        """Record which loads workers have finished, and end the requests whose loads failed."""
        for (name, number), count in report.loaded.items():
            if number != self.newest_load.get(name):
                continue  # an earlier load, which failed on another worker and was dropped on all
            self.finished_workers[name] = self.finished_workers.get(name, 0) + count
            # Requests continue once every rank has the document.
            if self.finished_workers[name] >= self.workers:
                self.ledger.finish_load(name)
        for (name, number), problem in report.failed.items():
            if number != self.newest_load.get(name):
                continue
            del self.newest_load[name]
            for request_id, document in list(self.documents.items()):
                if document.name == name:
                    self._fail_request(request_id, problem)
            self.ledger.forget(name)

    def make_orders(self, scheduled: Mapping[str, int]) -> RaggedConnectorMetadata:
        """Return the workers' orders for a step with these requests."""
        documents = {
            self.first_blocks[request_id]: document.name
            for request_id, document in self.documents.items()
            if request_id in scheduled and request_id in self.first_blocks
        }
        # Drops come first: a load may need the pages of what leaves.
        drops, names = self.ledger.take_orders()
        loads = []
        for name in names:
            self.load_number += 1
            self.newest_load[name] = self.load_number
            self.finished_workers[name] = 0
            loads.append(LoadOrder(name, self.files[name], self.load_number))
        refused = self.refused
        self.refused = {}
        return RaggedConnectorMetadata(documents, drops, loads, refused)

    def forget_request(self, request_id: str) -> None:
        """Release what a finished request held."""
        self.ledger.release(request_id)
        # Not `refused`, which the step that scheduled the request has emptied.
        for table in (self.documents, self.problems, self.first_blocks):
            table.pop(request_id, None)


class RaggedConnectorWorker:
    """Reads documents into the pool of this worker."""

    def __init__(self, config: VllmConfig, model: EngineModel) -> None:
        if not worker_state.has_pool(config.instance_id):
            raise RestoreKVError(
                "vLLM runs without restorekv's attention backend, which documents need; set the "
                "environment variable RESTOREKV_VLLM=1 before vLLM starts, with RaggedConnector as "
                "its only connector."
            )
        self.model = model
        self.dtype = config.model_config.dtype
        self.rope_model = build_rope_model(config.model_config.hf_text_config)
        # Refuse a model whose keys cannot be rotated when vLLM starts, not at the first document.
        shift_keys(self.rope_model, torch.zeros(1, model.head_dim), 1)
        rank = get_tensor_model_parallel_rank()
        ranks = get_tensor_model_parallel_world_size()
        self.heads = find_heads(rank, ranks, model.heads)
        # Reading and checking a file takes as long as many steps, and vLLM must not wait for that.
        # One thread keeps the order of the loads.
        self.loader = ThreadPoolExecutor(1, "restorekv-reader")
        # By document, with the number of the load.
        self.pending_loads: dict[str, tuple[int, Future[DocumentPairs]]] = {}

    def begin_step(self, orders: RaggedConnectorMetadata) -> None:
        """Follow the scheduler's orders, and record for the attention layers which rows belong to
        which document.
        """
        pool = worker_state.get_pool()
        for name in orders.drops:
            # A load that failed on another worker is dropped on all, so it is forgotten here even
            # if this worker still reads the files.
            self.pending_loads.pop(name, None)
            pool.drop(name)
        for load in orders.loads:
            future = self.loader.submit(self._load_pairs, load.files)
            self.pending_loads[load.name] = load.number, future
        # Otherwise attention would read wrong pages: better no answer than a wrong one.
        missing = set(orders.documents.values()) - set(pool.tables)
        if missing:
            raise RuntimeError(
                f"Not in this worker's pool of documents: {', '.join(sorted(missing))}. This is a "
                "bug in restorekv; please report it."
            )
        worker_state.begin_step(orders.documents)

    @torch.inference_mode()
    def _load_pairs(self, files: Sequence[tuple[str, Path]]) -> DocumentPairs:
        """Read and check a document's files, and return its pairs; this runs in the thread."""
        opened = []
        for name, path in files:
            file = load_file(path, name)
            self.model.check(file.manifest, path)
            opened.append(file)
        if len(opened) == 1:
            cache = opened[0].make_cache()
        else:
            cache = composition.compose_files(opened, self.rope_model)
        return gather_pairs(cache, self.rope_model, self.heads, self.dtype)

    def report_loads(self) -> RaggedWorkerMetadata | None:
        """Put what the thread has read into the pool; return what is new, if anything is."""
        # While all requests wait for documents, vLLM takes one empty step after the other, which
        # would leave the reading thread hardly any of the interpreter's time.
        wait([future for _, future in self.pending_loads.values()], timeout=LOAD_WAIT_SECONDS)
        # The pool is written between two steps, in this thread, and never while a layer reads it.
        done = [name for name, (_, future) in self.pending_loads.items() if future.done()]
        report = RaggedWorkerMetadata()
        for name in done:
            number, future = self.pending_loads.pop(name)
            try:
                worker_state.get_pool().put(name, future.result())
                report.loaded[name, number] = 1
            except Exception as error:  # otherwise requests would wait for it forever
                if not isinstance(error, RestoreKVError):
                    log.exception("The document %s cannot be read.", name)
                report.failed[name, number] = str(error)
        return report if done else None

    def shutdown(self) -> None:
        """End the thread."""
        self.loader.shutdown(cancel_futures=True)


def refuse_unsupported(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise RestoreKVError for engines whose attention over documents is not known to be right."""
    block_size = config.cache_config.block_size
    # Each completes a sentence of `refuse_engine`: the obstacle, and what to do about it.
    obstacles = [
        (
            config.parallel_config.pipeline_parallel_size > 1,
            "over pipeline parallel ranks; use one, or tensor parallel ranks",
        ),
        (
            config.speculative_config is not None,
            "with speculative decoding; leave out the speculative config",
        ),
        (
            config.model_config.use_mla,
            "for a model with multi-head latent attention; use another model",
        ),
        (
            len(cache.kv_cache_groups) != 1,
            "for a model with sliding-window or other special layers; use another model",
        ),
        (
            PLACEHOLDERS % block_size != 0,
            f"with blocks of {block_size} tokens, which do not divide {PLACEHOLDERS}; set "
            f"block_size to {PLACEHOLDERS}",
        ),
        # float16 cannot hold the log-sum-exp that is recovered from a sink's share of the weights
        # accurately enough.
        (
            config.model_config.dtype == torch.float16,
            "in float16; set dtype to bfloat16 or float32",
        ),
    ]
    refuse_engine(config, obstacles)
