"""Documents with questions, and vLLM in this process or as a server; vLLM is only installed by
`make vllm`.
"""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from restorekv.serve.vllm_documents import find_form
from restorekv.storage.portable import Portable
from restorekv.vllm import prompt, transfer_config
from tests.helpers.compressing import compress_with

TOKENS = 24  # of an answer
PORT = 8765
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class World:
    """Documents in a store, and the answers `expected[document][question]` of restorekv from the
    same caches.
    """

    folder: str  # of the model
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    store: Path
    documents: list[Portable]
    questions: Sequence[str]
    expected: list[list[str]]

    def prompt(self, document: int, question: int) -> list[int]:
        return prompt(self.documents[document], self.questions[question], self.tokenizer)


def make_world(
    place: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: dict[str, str],
    questions: Sequence[str],
    tokens: int = TOKENS,
    **options: Any,
) -> World:
    """Compress texts, given by the names of their files, and ask each all questions, for answers of
    `tokens` tokens.
    """
    folder, store = place / "model", place / "store"
    store.mkdir(parents=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    documents = []
    for name, text in texts.items():
        portable = compress_with(
            model, tokenizer, text, adapter=None, allocation="per-head", **options
        ).portable()
        portable.save(store / f"{name}.safetensors")
        documents.append(portable)
    expected = [document.ask(model, tokenizer, questions, tokens) for document in documents]
    return World(str(folder), model, tokenizer, store, documents, questions, expected)


@contextmanager
def engine(world: World, **options: Any) -> Iterator[Any]:
    """Start vLLM in this process."""
    os.environ.update(ENVIRONMENT)
    import vllm
    from vllm.distributed.kv_transfer import kv_transfer_state

    # vLLM keeps one connector for the workers of a process: that of the first engine that lives.
    earlier = kv_transfer_state._KV_CONNECTOR_AGENT
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    own = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024}
    llm = vllm.LLM(
        world.folder, kv_transfer_config=transfer_config(world.store), **{**own, **options}
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = earlier


def ask(llm: Any, prompts: Sequence[list[int]], **options: Any) -> list[Any]:
    """Return vLLM's outputs for token ids, decoded greedily unless the options say otherwise."""
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, **options})
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def answers(llm: Any, prompts: Sequence[list[int]], **options: Any) -> list[str]:
    return [output.text for output in ask(llm, prompts, **options)]


def ask_and_leave(llm: Any, ids: list[int]) -> None:
    """Ask, and cancel while the first step of the request runs, as when a client disconnects."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    core = engine.engine_core.engine_core  # in this process
    execute = core.model_executor.execute_model

    def execute_and_cancel(*args: Any, **options: Any) -> Any:
        result = execute(*args, **options)
        core.abort_requests(list(core.scheduler.requests))
        engine.abort_request(["leaves"])
        return result

    core.model_executor.execute_model = execute_and_cancel
    try:
        prompt_ids: Any = {"prompt_token_ids": ids}
        engine.add_request("leaves", prompt_ids, SamplingParams(temperature=0, max_tokens=TOKENS))
        for _ in range(3):
            engine.step()
    finally:
        core.model_executor.execute_model = execute


def without_halves(texts: Sequence[str]) -> list[str]:
    """Return texts without what `ask` or vLLM leaves out: leading space, and half a character at
    the end.
    """
    return [text.lstrip().rstrip("\ufffd") for text in texts]


@contextmanager
def server(world: World, form: str = "portable") -> Iterator[None]:
    """Start vLLM's own server for documents of a form, and wait until it answers."""
    documents = find_form(form)
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        world.folder,
        "--port",
        str(PORT),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--block-size",
        "32",
        "--max-model-len",
        "1024",
        "--kv-transfer-config",
        json.dumps(documents.make_config(world.store)),
    ]
    process = subprocess.Popen(
        command,
        env={**os.environ, **ENVIRONMENT, **documents.environment},
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, "the server ended"
                time.sleep(1)
        yield
    finally:
        process.terminate()
        process.wait(60)


def post(route: str, body: dict) -> dict:
    """Return the first choice of the server's answer; raise HTTPError for its errors."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/{route}", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)["choices"][0]
