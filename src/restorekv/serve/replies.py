"""Answers in OpenAI's form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from openai.types import CompletionUsage
from openai.types.chat import (
    ChatCompletionMessage,
    ChatCompletionTokenLogprob,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_usage import PromptTokensDetails
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.generation.answers import Answer
from restorekv.model.tokenize import REPLACEMENT, decode_token
from restorekv.serve import schemas
from restorekv.serve.engine import Engine, Reply, ServedDocument
from restorekv.serve.index import Upload

SECONDS = (0.01, 0.1, 0.3, 1, 3, 10, 30, 100, 300)  # limits of buckets of requests' durations


@dataclass(frozen=True)
class AnswerHeader:
    """What every part of an answer says: its id, model and time, and the question's documents."""

    id: str
    model: str
    created: int
    documents: Sequence[ServedDocument]


def make_completion(
    header: AnswerHeader, reply: Reply, tokenizer: Tokenizer, logprobs: bool | None
) -> schemas.Completion:
    """Return a whole chat completion.

    Args:
        header: The header of the answer.
        reply: What the engine said.
        tokenizer: For the texts of tokens.
        logprobs: Whether the tokens' log-probabilities were asked for.
    """
    choices = []
    for number, answer in enumerate(reply.answers):
        likely = None
        if logprobs:
            rows = zip(answer.ids, answer.logprobs or (), answer.top or (), strict=True)
            likely = chat_completion.ChoiceLogprobs(
                content=describe_logprobs(rows, tokenizer), refusal=None
            )
        message = ChatCompletionMessage(role="assistant", content=answer.text, refusal=None)
        choices.append(
            chat_completion.Choice(
                index=number, message=message, finish_reason=find_finish(answer), logprobs=likely
            )
        )
    return schemas.Completion(
        id=header.id,
        object="chat.completion",
        created=header.created,
        model=header.model,
        choices=choices,
        usage=count_usage(header, reply),
        restorekv=make_cost(header, reply),
    )


def find_finish(answer: Answer) -> Literal["stop", "length"]:
    """Return why an answer ended: at its limit, or by itself."""
    return "length" if answer.finish == "length" else "stop"


def make_chunk(
    header: AnswerHeader,
    number: int,
    delta: ChoiceDelta,
    finish: Literal["stop", "length"] | None = None,
    likely: list[ChatCompletionTokenLogprob] | None = None,
) -> schemas.Chunk:
    """Return a piece of a streamed answer.

    Args:
        header: The header of the answer.
        number: The index of the answer, among several.
        delta: What is new.
        finish: Why the answer ended, in its last piece.
        likely: The log-probabilities of its tokens.
    """
    logprobs = None
    if likely:
        logprobs = chat_completion_chunk.ChoiceLogprobs(content=likely, refusal=None)
    choice = chat_completion_chunk.Choice(
        index=number, delta=delta, finish_reason=finish, logprobs=logprobs
    )
    return schemas.Chunk(
        id=header.id,
        object="chat.completion.chunk",
        created=header.created,
        model=header.model,
        choices=[choice],
    )


def make_usage_chunk(header: AnswerHeader, reply: Reply) -> schemas.Chunk:
    """Return the last piece of a stream, with what it cost."""
    return schemas.Chunk(
        id=header.id,
        object="chat.completion.chunk",
        created=header.created,
        model=header.model,
        choices=[],
        usage=count_usage(header, reply),
        restorekv=make_cost(header, reply),
    )


def count_usage(header: AnswerHeader, reply: Reply) -> CompletionUsage:
    """Return how many tokens the model would have read, and how many came from a cache."""
    prompt = reply.document_tokens + reply.read
    written = sum(len(answer.ids) for answer in reply.answers)
    fresh = [document.tokens for document in header.documents if document.fresh]
    # Several documents are asked as one, with the chat prefix of the first alone. So their lengths
    # add up to more than was read: `repeated` tokens, the same number for each document but one.
    repeated = sum(document.tokens for document in header.documents) - reply.document_tokens
    prefix = repeated // max(len(header.documents) - 1, 1)
    made = sum(fresh) - prefix * max(len(fresh) - 1, 0)
    cached = reply.document_tokens - made - reply.computed
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached, cache_write_tokens=made),
    )


def make_cost(header: AnswerHeader, reply: Reply) -> schemas.Cost:
    """Return how many documents were asked, what their caches hold, and seconds by phase."""
    return schemas.Cost(
        documents=len(header.documents),
        pairs=reply.pairs,
        bytes=reply.bytes,
        seconds=reply.seconds,
    )


def describe_logprobs(
    rows: Iterable[tuple[int, float, dict[int, float]]], tokenizer: Tokenizer
) -> list[ChatCompletionTokenLogprob]:
    """Return the log-probabilities of tokens, given with those of the likeliest ones."""

    def describe(token: int, value: float) -> dict[str, Any]:
        text = decode_token(tokenizer, token)
        # A part of a character decodes to U+FFFD, whose bytes are not the token's.
        known = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": value, "bytes": known}

    content = []
    for token, value, top in rows:
        likeliest = [TopLogprob(**describe(other, logprob)) for other, logprob in top.items()]
        content.append(ChatCompletionTokenLogprob(**describe(token, value), top_logprobs=likeliest))
    return content


def describe_model(name: str, created: int) -> schemas.Model:
    """Return a model as the client sees it; `created` is the start of the server, in Unix time."""
    return schemas.Model(id=name, object="model", created=created, owned_by="restorekv")


def describe_upload(upload: Upload) -> schemas.File:
    """Return a file as the client sees it."""
    return schemas.File(
        id=upload.id,
        object="file",
        bytes=upload.bytes,
        created_at=upload.created,
        expires_at=upload.expires,
        filename=upload.name,
        purpose=upload.purpose,
        status=upload.status,
        status_details=upload.problem or None,
    )


class EngineCollector:
    """A collector that gives Prometheus an engine's counters and gauges."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> list[CounterMetricFamily | GaugeMetricFamily]:
        """Return one family of metrics for each number."""
        counted, now = self.engine.collect_metrics()
        families: list[CounterMetricFamily | GaugeMetricFamily] = []
        for name, value in counted.items():
            words = name.replace("_", " ")
            families.append(
                CounterMetricFamily(
                    f"restorekv_{name}", f"{words}, since the server started.", value=value
                )
            )
        for name, value in now.items():
            words = name.replace("_", " ")
            families.append(GaugeMetricFamily(f"restorekv_{name}", f"{words}, now.", value=value))
        return families


class RequestMetrics:
    """Counters of requests by path and status, and histograms of how long they took."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "restorekv_http_requests",
            "Requests by path and status; 429 is a full queue, 503 a server that ends.",
            ["path", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "restorekv_http_request_seconds",
            "Seconds from a request to the end of its answer.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )

    def note(self, path: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)


def format_metrics(engine: Engine, requests: RequestMetrics) -> bytes:
    """Return all numbers in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    # The process's own metrics, and vLLM's if it runs in this process.
    others = generate_latest(REGISTRY)
    return generate_latest(registry) + generate_latest(requests.registry) + others
