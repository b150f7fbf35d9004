"""The two ways to vLLM: its engine in this process, or a server that runs elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import httpx2

from restorekv.errors import RestoreKVError, summarize_error
from restorekv.serve.engine import AwayError
from restorekv.storage.portable import MARK, mark
from restorekv.vllm import transfer_config
from restorekv.vllm.store import Store

ENDED = "vLLM ended the request with an error; its log says why"
# A token's log-probability, and the likeliest ids with theirs.
Likely = tuple[float, dict[int, float]]


@dataclass(frozen=True)
class Piece:
    """The next ids of one answer. `cached` is how much of the prompt vLLM did not compute, None
    where it says nothing.

    `ended` is vLLM's reason with the last piece.
    """

    sample: int
    ids: Sequence[int]
    likely: Sequence[Likely] = ()
    ended: str | None = None
    cached: int | None = None


class Side(Protocol):
    """Writes answers; `longest` is how many tokens a prompt and its answer may have, None where
    nobody says.
    """

    longest: int | None

    def start(self) -> None: ...

    def close(self) -> None: ...

    def written(
        self, ids: list[int], how: Mapping[str, Any], schema: str | dict | None
    ) -> AsyncIterator[Piece]:
        """Yields pieces of the answers to a prompt; `how` has the names of vLLM's SamplingParams.

        Whoever stops listening ends the writing. Raises RestoreKVError for a prompt that cannot be
        answered.
        """


class Inside:
    """vLLM's asynchronous engine, whose scheduler and workers are processes of their own."""

    longest: int | None = None

    def __init__(
        self, model: str, dtype: str, store: Path, fingerprint: str, options: Mapping[str, Any]
    ) -> None:
        own = {"structured_outputs_config": {"backend": "guidance"}, "enable_log_requests": False}
        own["trust_remote_code"] = False
        self.options = {**own, "model": model, "dtype": dtype, **options}
        self.store = store
        self.fingerprint = fingerprint

    def start(self) -> None:
        """Starts the engine in the event loop that runs."""
        arguments = import_module("vllm.engine.arg_utils")
        config = import_module("vllm.config")
        connector = transfer_config(self.store, fingerprint=self.fingerprint)
        given = {**self.options, "kv_transfer_config": config.KVTransferConfig(**connector)}
        given["structured_outputs_config"] = config.StructuredOutputsConfig(
            **given["structured_outputs_config"]
        )
        try:
            made = arguments.AsyncEngineArgs(**given)
            self.llm = import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(made)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RestoreKVError(
                f"vLLM did not start ({summarize_error(error)}); its log says why; --vllm-options has its arguments."
            ) from error
        self.longest = self.llm.vllm_config.model_config.max_model_len

    def close(self) -> None:
        self.llm.shutdown()

    async def written(
        self, ids: list[int], how: Mapping[str, Any], schema: str | dict | None
    ) -> AsyncIterator[Piece]:
        """See `Side`."""
        sampling = import_module("vllm.sampling_params")
        known = import_module("vllm.v1.engine.exceptions")
        more = (
            {"structured_outputs": sampling.StructuredOutputsParams(json=schema)}
            if schema is not None
            else {}
        )
        try:
            params = sampling.SamplingParams(
                **how,
                **more,
                output_kind=sampling.RequestOutputKind.DELTA,
                detokenize=bool(how.get("stop")),
            )
            outputs = self.llm.generate({"prompt_token_ids": ids}, params, secrets.token_hex(8))
            async with aclosing(outputs):
                async for output in outputs:
                    for each in output.outputs:
                        if each.finish_reason == "error":
                            raise RestoreKVError(await asyncio.to_thread(self.problem, ids))
                        likely = [
                            likely_of(*pair)
                            for pair in zip(each.token_ids, each.logprobs or (), strict=False)
                        ]
                        ended = each.finish_reason
                        cached = output.num_cached_tokens
                        yield Piece(each.index, each.token_ids, likely, ended, cached)
        except known.EngineDeadError:
            raise AwayError(
                "vLLM has ended; the server's log says why. Start the server again."
            ) from None
        except (
            import_module("vllm.exceptions").VLLMClientError,
            known.EngineGenerateError,
        ) as error:
            why = summarize_error(error.__cause__ or error)
            raise RestoreKVError(f"vLLM refuses the request: {why}.") from error

    def problem(self, ids: Sequence[int]) -> str:
        """Returns why a prompt's document cannot be had."""
        expected_of = import_module("restorekv.vllm.connector").expected_of
        store = Store(self.store, expected_of(self.llm.vllm_config, self.fingerprint))
        try:
            document = store.find(ids)
            if document:
                store.pairs(document)
        except RestoreKVError as error:
            return str(error)
        return f"{ENDED}."


def likely_of(token: int, given: Mapping[int, Any]) -> Likely:
    return given[token].logprob, {other: each.logprob for other, each in given.items()}


class Elsewhere:
    """A server of vLLM's, reached through its completions API."""

    def __init__(self, url: str, store: Path, vocabulary: int) -> None:
        self.url = url.rstrip("/")
        self.store = store
        self.vocabulary = vocabulary
        key = os.environ.get("VLLM_API_KEY")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.model = ""
        self.longest = None

    def start(self) -> None:
        """Asks the server for its model, and whether it has our connector."""
        with httpx2.Client(headers=self.headers, timeout=60) as client:
            try:
                found = client.get(f"{self.url}/models")
                found.raise_for_status()
                card = found.json()["data"][0]
                self.model = card["id"]
                self.longest = card.get("max_model_len")
            except (httpx2.HTTPError, ValueError, LookupError) as error:
                raise RestoreKVError(
                    f"There is no vLLM server at {self.url} ({summarize_error(error)}); give its address as "
                    "http://HOST:8000/v1 and start it before this one."
                ) from None
            ids = [*mark(self.vocabulary), *range(MARK)]  # placeholders that stand for no document
            body = {"model": self.model, "prompt": ids, "max_tokens": 1}
            if client.post(f"{self.url}/completions", json=body).is_success:
                config = json.dumps(transfer_config(self.store.resolve()))
                raise RestoreKVError(
                    f"The vLLM server at {self.url} reads no documents; start it with --kv-transfer-config '{config}'."
                )
        limits = httpx2.Limits(max_connections=None)  # whoever serves bounds the questions
        self.client = httpx2.AsyncClient(
            headers=self.headers, timeout=httpx2.Timeout(None, connect=10), limits=limits
        )

    def close(self) -> None:
        """Does nothing: connections end with the process."""

    async def written(
        self, ids: list[int], how: Mapping[str, Any], schema: str | dict | None
    ) -> AsyncIterator[Piece]:
        """See `Side`."""
        body = {
            **how,
            "model": self.model,
            "prompt": ids,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if schema is not None:
            body["structured_outputs"] = {"json": schema}
        try:
            async with self.client.stream("POST", f"{self.url}/completions", json=body) as response:
                if not response.is_success:
                    raise self.refused((await response.aread()).decode("utf-8", "replace"))
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        for piece in self.pieces(json.loads(line[6:])):
                            yield piece
        except httpx2.HTTPError as error:
            why = summarize_error(error)
            raise AwayError(
                f"The vLLM server at {self.url} does not answer ({why}); start it again."
            ) from None

    def pieces(self, event: dict) -> list[Piece]:
        """Reads one event of a stream."""
        if "error" in event:
            raise self.refused(json.dumps(event))
        usage = event.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if not event.get("choices") and cached is not None:
            return [Piece(0, (), cached=cached)]
        return [
            Piece(
                each["index"],
                each.get("token_ids") or (),
                likely_in(each.get("logprobs")),
                each["finish_reason"],
            )
            for each in event.get("choices", ())
        ]

    def refused(self, answer: str) -> RestoreKVError:
        """Returns an error with what the server said, and what may be behind it."""
        try:
            said = json.loads(answer)
            said = (said.get("error") or said)["message"]
        except (ValueError, LookupError, AttributeError, TypeError):
            said = answer
        if "internal" in said.lower():  # what vLLM says where a document could not be loaded
            return RestoreKVError(
                f"{ENDED}. It must see {self.store.resolve()} and have the model of this server."
            )
        return RestoreKVError(
            f"vLLM refuses the request: {summarize_error(ValueError(said[:300]))}."
        )


def likely_in(given: Mapping[str, Any] | None) -> list[Likely]:
    """Reads the log-probabilities of a choice, whose tokens are named token_id:NUMBER."""
    rows = zip(given["token_logprobs"], given["top_logprobs"], strict=True) if given else ()
    return [
        (value, {int(name.split(":")[1]): other for name, other in top.items()})
        for value, top in rows
    ]
