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
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from transformers import PreTrainedTokenizerBase as Tokenizer

from restorekv.serve import schemas
from restorekv.serve.engine import Document, Engine, Reply
from restorekv.serve.store import Upload


@dataclass(frozen=True)
class About:
    """What every part of an answer says: its id, model and time, and the documents that it is
    about.
    """

    id: str
    model: str
    created: int
    documents: Sequence[Document]

    def make_chunk(self, choices: list[chat_completion_chunk.Choice], **more: Any) -> schemas.Chunk:
        """Return one event of a stream with these choices."""
        return schemas.Chunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
            **more,
        )


def completion(
    about: About, reply: Reply, tokenizer: Tokenizer, logprobs: bool | None
) -> schemas.Completion:
    """Return a whole chat completion."""
    choices = []
    for number, answer in enumerate(reply.answers):
        likely = None
        if logprobs:
            rows = zip(answer.ids, answer.logprobs or (), answer.top or (), strict=True)
            likely = chat_completion.ChoiceLogprobs(
                content=likelihoods(rows, tokenizer), refusal=None
            )
        said = ChatCompletionMessage(role="assistant", content=answer.text, refusal=None)
        choices.append(
            chat_completion.Choice(
                index=number, message=said, finish_reason=answer.finish, logprobs=likely
            )
        )
    return schemas.Completion(
        id=about.id,
        object="chat.completion",
        created=about.created,
        model=about.model,
        choices=choices,
        usage=usage(about, reply),
        restorekv=cost(reply),
    )


def chunk(
    about: About,
    number: int,
    delta: ChoiceDelta,
    finish: Literal["stop", "length"] | None = None,
    likely: list[ChatCompletionTokenLogprob] | None = None,
) -> schemas.Chunk:
    """Return a piece of the answer `number`; `likely` are the log-probabilities of its tokens."""
    logprobs = (
        chat_completion_chunk.ChoiceLogprobs(content=likely, refusal=None) if likely else None
    )
    choice = chat_completion_chunk.Choice(
        index=number, delta=delta, finish_reason=finish, logprobs=logprobs
    )
    return about.make_chunk([choice])


def usage_chunk(about: About, reply: Reply) -> schemas.Chunk:
    """Return the last piece of a stream, with what it cost."""
    return about.make_chunk([], usage=usage(about, reply), restorekv=cost(reply))


def usage(about: About, reply: Reply) -> CompletionUsage:
    """Return tokens as the model would have read them, and those that came from a cache."""
    prompt = reply.document_tokens + reply.read
    written = sum(len(answer.ids) for answer in reply.answers)
    fresh = [each.tokens for each in about.documents if each.fresh]
    # Chat prefixes but the first.
    repeated = sum(each.tokens for each in about.documents) - reply.document_tokens
    made = sum(fresh) - repeated // max(len(about.documents) - 1, 1) * max(len(fresh) - 1, 0)
    cached = reply.document_tokens - made - reply.computed
    return CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached, cache_write_tokens=made),
    )


def cost(reply: Reply) -> schemas.Cost:
    """Return what the documents' caches hold, and seconds by phase."""
    return schemas.Cost(pairs=reply.pairs, bytes=reply.bytes, seconds=reply.seconds)


def likelihoods(
    rows: Iterable[tuple[int, float, dict[int, float]]], tokenizer: Tokenizer
) -> list[ChatCompletionTokenLogprob]:
    """Return the log-probabilities of tokens, given with those of the likeliest ones."""

    def describe(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([token])
        return {"token": text, "logprob": value, "bytes": list(text.encode())}

    content = []
    for token, value, top in rows:
        likeliest = [TopLogprob(**describe(*each)) for each in top.items()]
        content.append(ChatCompletionTokenLogprob(**describe(token, value), top_logprobs=likeliest))
    return content


def model(name: str) -> schemas.Model:
    return schemas.Model(id=name, object="model", created=0, owned_by="restorekv")


def upload(file: Upload) -> schemas.File:
    """Return a file as the client sees it."""
    return schemas.File(
        id=file.id,
        object="file",
        bytes=file.bytes,
        created_at=file.created,
        expires_at=file.expires,
        filename=file.name,
        purpose=file.purpose,
        status=file.status,
        status_details=file.problem or None,
    )


class Figures:
    """What Prometheus reads."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> list:
        counted, now = self.engine.figures()
        return [
            *(
                CounterMetricFamily(f"restorekv_{name}", f"Number of {name}.", value=counted[name])
                for name in counted
            ),
            *(
                GaugeMetricFamily(f"restorekv_{name}", name, value=value)
                for name, value in now.items()
            ),
        ]


def metrics(engine: Engine) -> bytes:
    """Returns all figures in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(Figures(engine))
    return generate_latest(registry)
