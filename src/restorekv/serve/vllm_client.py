"""The two clients of vLLM: of its engine in this process, and of a server that runs elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2

from restorekv.errors import RestoreKVError, summarize_error
from restorekv.serve.engine import UnavailableError
from restorekv.serve.vllm_documents import FORMS, DocumentForm
from restorekv.storage.portable import MARK
from restorekv.vllm import plugin

ENDED = "vLLM ended the request with an error; its log says why"

# A token's log-probability, and the likeliest ids with theirs.
TokenLogprobs = tuple[float, dict[int, float]]


@dataclass(frozen=True)
class Piece:
    """The next ids of one answer.

    Args:
        sample: The number of the answer.
        ids: Its next ids.
        likely: Their log-probabilities, if they were asked for.
        ended: Why vLLM ended the answer; only its last piece has it.
        cached: How many tokens of the prompt came from vLLM's prefix cache; None if vLLM does not
            report it.
    """

    sample: int
    ids: Sequence[int]
    likely: Sequence[TokenLogprobs] = ()
    ended: str | None = None
    cached: int | None = None


class InProcessVllm:
    """vLLM's asynchronous engine, whose scheduler and workers are separate processes.

    `longest` is how many tokens a prompt and its answer may have; None before vLLM has started.
    `on_cpu` is whether it runs on a CPU; False before it has started.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        store: Path,
        fingerprint: str,
        options: Mapping[str, Any],
        form: DocumentForm,
        documents_memory: int | None = None,
    ) -> None:
        """Note how `start` is to start vLLM.

        Args:
            model: The folder of the model.
            dtype: The dtype of the library's model.
            store: The folder of documents.
            fingerprint: The fingerprint of the model's weights.
            options: Arguments for AsyncEngineArgs.
            form: The form of the documents.
            documents_memory: Bytes of documents that each worker holds.
        """
        self.longest: int | None = None
        self.on_cpu = False
        self.options: dict[str, Any] = {
            "structured_outputs_config": {"backend": "guidance"},
            "enable_log_requests": False,
            "trust_remote_code": False,
            "model": model,
            "dtype": dtype,
            **form.engine_options,
            **options,
        }
        self.store = store
        self.fingerprint = fingerprint
        self.form = form
        self.documents_memory = documents_memory

    def start(self) -> None:
        """Start the engine in the running event loop."""
        self.form.check_version()
        # Importing vLLM takes many seconds, and no other engine needs it.
        arguments = import_module("vllm.engine.arg_utils")
        config = import_module("vllm.config")
        connector = self.form.make_config(self.store, self.fingerprint, self.documents_memory)
        options = {**self.options, "kv_transfer_config": config.KVTransferConfig(**connector)}
        options = limit_cpu_memory(options)
        options["structured_outputs_config"] = config.StructuredOutputsConfig(
            **options["structured_outputs_config"]
        )
        try:
            engine = import_module("vllm.v1.engine.async_llm").AsyncLLM
            # vLLM's processes end with this one (plugin.py).
            server = {plugin.SERVER: str(os.getpid())}
            # The processes that vLLM starts read these variables once, when they begin.
            with _set_environment({**self.form.environment, **server}):
                self.llm = engine.from_engine_args(arguments.AsyncEngineArgs(**options))
        except (TypeError, ValueError, RuntimeError) as error:
            raise RestoreKVError(
                f"vLLM did not start ({summarize_error(error)}); its log says why; "
                "--vllm-options has its arguments, and --vllm-documents portable asks less of it."
            ) from error
        self.longest = self.llm.vllm_config.model_config.max_model_len
        self.on_cpu = _is_on_cpu()

    def close(self) -> None:
        """End vLLM's processes."""
        self.llm.shutdown()

    async def generate(
        self, ids: list[int], params: Mapping[str, Any], schema: str | dict | None
    ) -> AsyncGenerator[Piece]:
        """Yield pieces of the answers to a prompt; closing the generator aborts the answers.

        Args:
            ids: The prompt.
            params: How to write the answers, as arguments of vLLM's SamplingParams.
            schema: A JSON schema that answers follow.

        Raises:
            RestoreKVError: The prompt cannot be answered.
            UnavailableError: vLLM does not answer.
        """
        sampling = import_module("vllm.sampling_params")
        exceptions = import_module("vllm.v1.engine.exceptions")
        client_error = import_module("vllm.exceptions").VLLMClientError
        structured = None
        if schema is not None:
            structured = sampling.StructuredOutputsParams(json=schema)
        try:
            sampling_params = sampling.SamplingParams(
                **params,
                structured_outputs=structured,
                # Only what is new, not the whole answer at every token.
                output_kind=sampling.RequestOutputKind.DELTA,
                # The library makes the text itself; vLLM needs it only to look for stop strings.
                detokenize=bool(params.get("stop")),
            )
            outputs = self.llm.generate(
                {"prompt_token_ids": ids}, sampling_params, secrets.token_hex(8)
            )
            # Closing vLLM's generator aborts the request.
            async with aclosing(outputs):
                async for output in outputs:
                    for each in output.outputs:
                        if each.finish_reason == "error":
                            # vLLM says only that something failed. Loading the document here finds
                            # out what.
                            problem = await asyncio.to_thread(self._explain_failure, ids)
                            raise RestoreKVError(problem)
                        yield Piece(
                            sample=each.index,
                            ids=each.token_ids,
                            likely=_get_output_logprobs(each),
                            ended=each.finish_reason,
                            cached=output.num_cached_tokens,
                        )
        except exceptions.EngineDeadError:
            raise UnavailableError(
                "vLLM has ended; the server's log says why. Start the server again."
            ) from None
        except (client_error, exceptions.EngineGenerateError) as error:
            why = summarize_error(error.__cause__ or error)
            raise RestoreKVError(f"vLLM refuses the request: {why}.") from error

    def _explain_failure(self, ids: Sequence[int]) -> str:
        """Return why the document that a prompt names could not be loaded."""
        try:
            self.form.load_as_vllm(self.llm.vllm_config, self.store, self.fingerprint, ids)
        except RestoreKVError as error:
            return str(error)
        return f"{ENDED}."


def limit_cpu_memory(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of vLLM's engine that leave half of the free memory to this server.

    On a CPU, vLLM takes nine tenths of all memory by default, and does not start if other processes
    hold more than the rest. On a GPU nothing is changed: the server's model may be elsewhere.
    """
    told = {"kv_cache_memory_bytes", "gpu_memory_utilization"} & options.keys()
    if told or "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return dict(options)
    if not _is_on_cpu():
        return dict(options)
    free = import_module("psutil").virtual_memory().available
    return {**options, "kv_cache_memory_bytes": free // 2}


def _is_on_cpu() -> bool:
    """Return whether vLLM runs on a CPU in this environment."""
    return import_module("vllm.platforms").current_platform.is_cpu()


@contextmanager
def _set_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that the block starts, and restore them after it."""
    # None for those that were not set, which are removed again.
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _get_output_logprobs(output: Any) -> list[TokenLogprobs]:
    """Return the log-probabilities of one of vLLM's outputs."""
    if not output.logprobs:
        return []
    found = []
    for token, given in zip(output.token_ids, output.logprobs, strict=False):
        likeliest = {other: each.logprob for other, each in given.items()}
        found.append((given[token].logprob, likeliest))
    return found


class RemoteVllm:
    """A vLLM server, reached through its completions API.

    `longest` is how many tokens a prompt and its answer may have; None if the server does not
    report it. `on_cpu` is True if the form of the documents is read on CPUs alone; otherwise it is
    not known where the server runs.
    """

    def __init__(self, url: str, store: Path, vocabulary: int, form: DocumentForm) -> None:
        self.url = url.rstrip("/")
        self.store = store
        self.vocabulary = vocabulary
        self.form = form
        self.on_cpu = form.needs_cpu
        key = os.environ.get("VLLM_API_KEY")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.model = ""
        self.longest: int | None = None

    def start(self) -> None:
        """Ask the server for its model, and check that it has our connector."""
        with httpx2.Client(headers=self.headers, timeout=60) as client:
            try:
                found = client.get(f"{self.url}/models")
                found.raise_for_status()
                card = found.json()["data"][0]
                self.model = card["id"]
                self.longest = card.get("max_model_len")
            except (httpx2.HTTPError, ValueError, LookupError) as error:
                raise RestoreKVError(
                    f"There is no vLLM server at {self.url} ({summarize_error(error)}); pass its "
                    "address as http://HOST:8000/v1 and start it before this one."
                ) from None
            # Our connector refuses placeholders that name no document; a server without it answers.
            ids = [*self.form.make_mark(self.vocabulary), *range(MARK)]
            body = {"model": self.model, "prompt": ids, "max_tokens": 1}
            if client.post(f"{self.url}/completions", json=body).is_success:
                raise RestoreKVError(self._describe_start())
        self.client = httpx2.AsyncClient(
            headers=self.headers,
            # An answer may take any time, and the first token waits for a document to be loaded.
            timeout=httpx2.Timeout(None, connect=10),
            limits=httpx2.Limits(max_connections=None),  # the engine bounds the questions
        )

    def _describe_start(self) -> str:
        """Return the error about a server that does not read documents of this form."""
        config = json.dumps(self.form.make_config(self.store.resolve()))
        variables = "".join(f"{name}={value} and " for name, value in self.form.environment.items())
        others = " or ".join(name for name in FORMS if name != self.form.name)
        return (
            f"The vLLM server at {self.url} reads no {self.form.name} documents; start it with "
            f"{variables}--kv-transfer-config '{config}', or pass --vllm-documents {others} here "
            "if it was started for those."
        )

    def close(self) -> None:
        """Do nothing: connections end with the process."""

    async def generate(
        self, ids: list[int], params: Mapping[str, Any], schema: str | dict | None
    ) -> AsyncGenerator[Piece]:
        """Yield pieces of the answers to a prompt, as `InProcessVllm.generate` does."""
        body = {
            **params,
            "model": self.model,
            "prompt": ids,
            "stream": True,
            "stream_options": {"include_usage": True},
            # The library decodes ids by its own rules, as its own engine does.
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        if schema is not None:
            body["structured_outputs"] = {"json": schema}
        try:
            async with self.client.stream("POST", f"{self.url}/completions", json=body) as response:
                if not response.is_success:
                    refusal = (await response.aread()).decode("utf-8", "replace")
                    raise self._make_refusal(refusal, response.status_code)
                async for line in _iter_lines(response):
                    if line.startswith(b"data: {"):
                        for piece in self._parse_event(json.loads(line.removeprefix(b"data: "))):
                            yield piece
        except httpx2.HTTPError as error:
            why = summarize_error(error)
            raise UnavailableError(
                f"The vLLM server at {self.url} does not answer ({why}); start it again."
            ) from None

    def _parse_event(self, event: dict) -> list[Piece]:
        """Return the pieces in one event of a stream."""
        if "error" in event:
            status = event["error"].get("code") if isinstance(event["error"], dict) else None
            raise self._make_refusal(json.dumps(event), status)
        usage = event.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        # The last event of a stream has the usage and no tokens.
        if not event.get("choices") and cached is not None:
            return [Piece(0, (), cached=cached)]
        pieces = []
        for choice in event.get("choices", ()):
            pieces.append(
                Piece(
                    sample=choice["index"],
                    ids=choice.get("token_ids") or (),
                    likely=_parse_choice_logprobs(choice.get("logprobs")),
                    ended=choice["finish_reason"],
                )
            )
        return pieces

    def _make_refusal(self, answer: str, status: object) -> RestoreKVError:
        """Return the error for a refused request: what the server said, and what to do about it.

        Args:
            answer: The body of its answer.
            status: The answer's HTTP status, or the code of an error within a stream.
        """
        try:
            parsed = json.loads(answer)
            message = (parsed.get("error") or parsed)["message"]
        except (ValueError, LookupError, AttributeError, TypeError):
            message = answer
        if "internal" in message.lower():  # vLLM says so if a document could not be loaded
            return UnavailableError(
                f"{ENDED}. It must see {self.store.resolve()} and have the model of this server."
            )
        why = summarize_error(ValueError(message[:300]))
        if status in (401, 403):
            return UnavailableError(
                f"The vLLM server at {self.url} refuses this server ({why}); set VLLM_API_KEY to "
                "its key."
            )
        # A busy or broken server is not the request's fault, and the client may retry.
        if status in (408, 429) or (isinstance(status, int) and status >= 500):
            return UnavailableError(f"The vLLM server at {self.url} cannot answer now: {why}.")
        return RestoreKVError(f"vLLM refuses the request: {why}.")


async def _iter_lines(response: httpx2.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream of events.

    Only a line feed ends a line. The HTTP client's own lines would also end at Unicode's
    separators, which may occur in the JSON of an event.
    """
    begun = b""
    async for part in response.aiter_bytes():
        *lines, begun = (begun + part).split(b"\n")
        for line in lines:
            yield line
    yield begun


def _parse_choice_logprobs(given: Mapping[str, Any] | None) -> list[TokenLogprobs]:
    """Return the log-probabilities of a choice, whose tokens are named token_id:NUMBER."""
    if not given:
        return []
    found = []
    for value, top in zip(given["token_logprobs"], given["top_logprobs"], strict=True):
        likeliest = {int(name.split(":")[1]): other for name, other in top.items()}
        found.append((value, likeliest))
    return found
