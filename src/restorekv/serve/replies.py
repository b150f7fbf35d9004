"""Answers in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.serve.engine import Document, Engine, Reply
from restorekv.serve.store import Upload


@dataclass(frozen=True)
class About:
    """What every part of an answer says: its id, model and time, and the documents that it is about."""

    id: str
    model: str
    created: int
    documents: Sequence[Document]

    def described(self, kind: str) -> dict:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def completion(about: About, reply: Reply, tokenizer: Tokenizer, logprobs: bool | None) -> dict:
    """Returns a whole chat completion."""
    choices = [
        {
            "index": number, "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "finish_reason": answer.finish,
            "logprobs": likelihoods(zip(answer.ids, answer.logprobs or (), answer.top or (), strict=True), tokenizer)
            if logprobs else None,
        }
        for number, answer in enumerate(reply.answers)
    ]  # fmt: skip
    return {**about.described("chat.completion"), "choices": choices, **usage(about, reply)}


def chunk(about: About, number: int, delta: dict, finish: str | None = None, logprobs: dict | None = None) -> dict:
    """Returns a piece of one answer."""
    choices = [{"index": number, "delta": delta, "finish_reason": finish, "logprobs": logprobs}]
    return {**about.described("chat.completion.chunk"), "choices": choices}


def usage_chunk(about: About, reply: Reply) -> dict:
    """Returns the last piece of a stream, with what it cost."""
    return {**about.described("chat.completion.chunk"), "choices": [], **usage(about, reply)}


def usage(about: About, reply: Reply) -> dict:
    """Returns tokens as the model would have read them, those that came from a cache, and what is held."""
    prompt, written = reply.document_tokens + reply.read, sum(len(answer.ids) for answer in reply.answers)
    fresh = [each.tokens for each in about.documents if each.fresh]
    repeated = sum(each.tokens for each in about.documents) - reply.document_tokens  # chat prefixes but the first
    made = sum(fresh) - repeated // max(len(about.documents) - 1, 1) * max(len(fresh) - 1, 0)
    details = {"cached_tokens": reply.document_tokens - made - reply.computed, "cache_write_tokens": made}
    tokens = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    held = {"pairs": reply.pairs, "bytes": reply.bytes, "seconds": reply.seconds}
    return {"usage": {**tokens, "prompt_tokens_details": details}, "restorekv": held}


def likelihoods(rows: Iterable[tuple[int, float, dict[int, float]]], tokenizer: Tokenizer) -> dict:
    """Returns the log-probabilities of tokens, given with those of the likeliest ones."""

    def shown(token: int, value: float) -> dict:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    return {"content": [{**shown(token, value), "top_logprobs": [shown(*each) for each in top.items()]}
                        for token, value, top in rows], "refusal": None}  # fmt: skip


def model(name: str) -> dict:
    return {"id": name, "object": "model", "created": 0, "owned_by": "restorekv"}


def upload(file: Upload) -> dict:
    """Returns a file as the client sees it."""
    return {
        "id": file.id, "object": "file", "bytes": file.bytes, "created_at": file.created, "expires_at": file.expires,
        "filename": file.name, "purpose": file.purpose, "status": file.status,
        "status_details": file.problem or None,
    }  # fmt: skip


class Figures:
    """What Prometheus reads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> list:
        counted, now = self.engine.figures()
        return [
            *(CounterMetricFamily(f"restorekv_{name}", f"Number of {name}.", value=counted[name]) for name in counted),
            *(GaugeMetricFamily(f"restorekv_{name}", name, value=value) for name, value in now.items()),
        ]


def metrics(engine: Engine) -> bytes:
    """Returns all figures in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(Figures(engine))
    return generate_latest(registry)
