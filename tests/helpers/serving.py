"""Servers in this process, with the library as their engine, and clients for them."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import uvicorn
from fastapi import FastAPI

from restorekv.generation.decoding import decode_answer, get_stop_ids
from restorekv.serve.run import HTTP, Server, Settings, build_app
from tests.helpers.compressing import compress_with

TEXT = (
    "The code of the red house is seven. The blue house has a green door, and nobody lives there. "
    * 4
)
OTHER = (
    "The green house belongs to the miller, who has two dogs and a cat that sleeps all day long. "
    * 4
)
VARIANT, QUESTION = "tiny:snapkv-0.4", "Which code?"
KEY = "a-key-of-sixteen-characters"


@contextlib.contextmanager
def serving(model, tokenizer, folder: Path, **settings: object) -> Iterator[str]:
    """Yield the address of a server with the library as its engine."""
    with listening(
        build_app(model, tokenizer, Settings(folder, "tiny", VARIANT, **settings))
    ) as url:
        yield url


@contextlib.contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    """Run an application as a server in a thread of this process, and yield its address."""
    config = uvicorn.Config(app, port=0, log_level="error", **HTTP)
    # Else an application of a single part, which has no answers to end.
    whole = hasattr(app.state, "service")
    server = Server(config, app) if whole else uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()


def client_of(url: str, key: str = KEY, kind: type | None = None):
    return (kind or openai.OpenAI)(base_url=url, api_key=key, max_retries=0)


def upload(client, content: str | bytes = TEXT, name: str = "doc.txt", wait: bool = True):
    """Upload `content` and return the client's file, by default once the server has
    compressed it.
    """
    content = content.encode() if isinstance(content, str) else content
    made = client.files.create(file=(name, content), purpose="user_data")
    return (
        client.files.wait_for_processing(made.id, poll_interval=0.02, max_wait_seconds=300)
        if wait
        else made
    )


def about(*parts: object, question: str = QUESTION) -> list[dict]:
    documents = [{"type": "file", "file": {"file_id": part.id}} for part in parts]
    return [{"role": "user", "content": [*documents, {"type": "text", "text": question}]}]


def ask(client, messages, model=VARIANT, **options):
    return client.chat.completions.create(
        model=model, messages=messages, **{"temperature": 0, "max_tokens": 12, **options}
    )


def expected(model, tokenizer, text=TEXT, ratio="0.4"):
    options = {"evictor": "snapkv", "adapter": None} if ratio != 1 else {"adapter": None}
    return compress_with(model, tokenizer, text, ratio=ratio, **options)


def until(holds, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def generate_plainly(model, tokenizer, messages, limit=12):
    """Return transformers' own answer, and the number of tokens of its prompt."""
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    stops = get_stop_ids(model, tokenizer)
    written = model.generate(
        ids, do_sample=False, max_new_tokens=limit, eos_token_id=sorted(stops), pad_token_id=0
    )
    answer = decode_answer(tokenizer, written[0, ids.shape[1] :].tolist(), stops)
    return answer.strip(), ids.shape[1]
