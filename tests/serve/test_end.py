"""A server that ends while it works: streams, whole answers, waiting requests, bodies that still
arrive, signals.
"""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

from restorekv.generation import decoding  # noqa: E402
from restorekv.generation.scheduler import Scheduler  # noqa: E402
from restorekv.model.shape import get_backbone  # noqa: E402
from restorekv.serve import questions, run  # noqa: E402
from restorekv.serve.engine import ENDING  # noqa: E402
from restorekv.serve.service import Limits  # noqa: E402
from restorekv.serve.store import Store  # noqa: E402
from tests.helpers.serving import VARIANT, about, client_of, serving, until, upload  # noqa: E402
from tests.hostile.serve import Server, asked, document  # noqa: E402

LONG = {"max_tokens": 3000, "temperature": 2.0}


def seen(url: str, name: str) -> float:
    """Return one of the server's metrics."""
    lines = httpx.get(url.replace("/v1", "/metrics")).text.splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(f"restorekv_{name} ")))


@pytest.fixture
def slow_steps(model):
    """Slow down every pass that writes answers, so that no answer is complete before the server
    ends.
    """
    hook = (
        get_backbone(model)
        .layers[0]
        .register_forward_pre_hook(
            lambda *_: (
                time.sleep(0.03) if threading.current_thread().name == "restorekv-answer" else None
            )
        )
    )
    yield
    hook.remove()


def test_streams_end_with_an_error_event_and_waiting_requests_with_503(
    model, tiny_tokenizer, tmp_path, monkeypatch, slow_steps
):
    monkeypatch.setattr(questions, "GRACE", 0.2)
    monkeypatch.setattr(decoding, "get_stop_ids", lambda *_: set())  # only the limit ends an answer
    begun = threading.Barrier(5)

    def stream(url: str, path: str, body: dict) -> list[str]:
        with httpx.stream(
            "POST", url + path, json={"model": VARIANT, "stream": True, **body}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            first = next(line for line in lines if "delta" in line)
            begun.wait(60)
            return [answer.status_code, first, *filter(None, lines)]

    def whole(url: str, messages: list) -> tuple:
        answer = httpx.post(
            url + "/chat/completions",
            json={"model": VARIANT, "messages": messages, **LONG},
            timeout=60,
        )
        return answer.status_code, answer.headers["content-type"], answer.json()

    with ThreadPoolExecutor(50) as pool:
        with serving(model, tiny_tokenizer, tmp_path, limits=Limits(tokens=3000)) as url:
            made = upload(client_of(url))
            messages = about(made)
            parts = [
                {"type": "input_file", "file_id": made.id},
                {"type": "input_text", "text": "Which code?"},
            ]
            response = {
                "input": [{"role": "user", "content": parts}],
                "temperature": 2.0,
                "max_output_tokens": 3000,
            }
            chats = [
                pool.submit(stream, url, "/chat/completions", {"messages": messages, **LONG})
                for _ in range(2)
            ]
            responses = [pool.submit(stream, url, "/responses", response) for _ in range(2)]
            begun.wait(60)
            # Of which most wait for a row.
            answers = [pool.submit(whole, url, messages) for _ in range(25)]
            until(lambda: seen(url, "questions_waiting") + seen(url, "questions_answering") >= 29)
        ended = [each.result(60) for each in (*chats, *responses)]
        refused = [each.result(60) for each in answers]
    problem = {"message": ENDING, "type": "server_error", "param": None, "code": None}
    for status, _, *lines in ended[:2]:
        assert status == 200 and json.loads(lines[-1].removeprefix("data: ")) == {"error": problem}
    for status, _, *lines in ended[2:]:
        event = json.loads(lines[-1].removeprefix("data: "))
        assert status == 200 and lines[-2] == "event: error" and event["message"] == ENDING
    assert refused == [(503, "application/json", {"error": problem})] * 25


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/completions", {"prompt": "hello"}),
        ("/responses", {"input": "hello"}),
    ],
)
def test_a_stream_that_fails_says_so_whatever_failed(
    model, tiny_tokenizer, tmp_path, monkeypatch, path, body
):
    """An error of any kind is reported in the stream, because its status has been sent already."""
    monkeypatch.setattr(decoding, "get_stop_ids", lambda *_: set())
    step = Scheduler.step

    def fail(self):
        if self.steps == 3:
            raise OSError("the disk burns")
        return step(self)

    monkeypatch.setattr(Scheduler, "step", fail)
    with serving(model, tiny_tokenizer, tmp_path) as url:
        options = {"model": "tiny", "stream": True, **body}
        with httpx.stream("POST", url + path, json=options, timeout=60) as answer:
            lines = [line for line in answer.iter_lines() if line]
    assert answer.status_code == 200
    event = json.loads(lines[-1].removeprefix("data: "))
    assert "The server failed on this" in event.get("error", event)["message"]


def test_a_short_answer_is_still_written(model, tiny_tokenizer, tmp_path, slow_steps):
    with ThreadPoolExecutor(1) as pool:
        with serving(model, tiny_tokenizer, tmp_path) as url:
            client = client_of(url)
            made = upload(client)
            stream = client.chat.completions.create(
                model=VARIANT, messages=about(made), max_tokens=20, temperature=0, stream=True
            )
            first = next(iter(stream))
            rest = pool.submit(list, stream)
        chunks = [first, *rest.result(60)]
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_a_body_that_still_arrives_is_refused_and_an_upload_goes_on_later(
    model, tiny_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(run, "CLOSING", 0.1)
    inside = threading.Event()

    def wait(*_: object) -> None:
        if threading.current_thread().name.startswith("restorekv-compress"):
            inside.set()
            time.sleep(0.2)

    hook = get_backbone(model).layers[1].register_forward_pre_hook(wait)
    with serving(model, tiny_tokenizer, tmp_path) as url:
        made = upload(client_of(url), wait=False)
        assert inside.wait(60)
        port = int(url.split(":")[2].split("/")[0])
        half = socket.create_connection(("127.0.0.1", port))
        half.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
        )
        time.sleep(0.3)
    hook.remove()
    answer = half.recv(10_000).decode()
    half.close()
    assert answer.startswith("HTTP/1.1 503") and ENDING in answer and "application/json" in answer
    store = Store(tmp_path, 1 << 30)
    assert store.get_upload(made.id).status == "uploaded"
    store.close()
    with serving(model, tiny_tokenizer, tmp_path) as url:
        again = client_of(url).files.wait_for_processing(made.id, poll_interval=0.02)
        assert again.status == "processed"


def test_the_end_refuses_waits_and_then_breaks_off_in_this_order(monkeypatch):
    """The order is checked with a list of events, not with a clock."""
    done = []

    async def end() -> None:
        done.append("answers end")

    class Left:
        tasks = ()

        def abort_all(self) -> None:
            done.append("requests are broken off")

    async def shut(self, sockets) -> None:
        done.append("no new connections")
        await asyncio.sleep(0.5)
        done.append("closed")

    transport = SimpleNamespace(
        abort=lambda: done.append("connection aborted"), get_write_buffer_size=lambda: 1
    )
    left = SimpleNamespace(transport=transport)
    connections = [left]
    monkeypatch.setattr(run.uvicorn.Server, "shutdown", shut)
    state = SimpleNamespace(questions=SimpleNamespace(end=end), open_requests=Left())
    app = SimpleNamespace(state=state)
    server = run.Server(run.uvicorn.Config(app), app)
    server.server_state.connections = connections
    asyncio.run(server.shutdown())
    assert done == [
        "no new connections",
        "answers end",
        "requests are broken off",
        "connection aborted",
        "closed",
    ]


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    ended, timers = [], []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(
        threading.Timer, "start", lambda self: timers.append((self.interval, self.args))
    )
    state = SimpleNamespace(
        service=SimpleNamespace(engine=SimpleNamespace(shutdown_grace=0.0)), exit_code=None
    )
    server = run.Server(run.uvicorn.Config(None), SimpleNamespace(state=state))
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit and not ended and state.exit_code == 0
    assert timers == [(run.LAST, [0])] and run.LAST < 5
    assert questions.GRACE + run.CLOSING < run.LAST
    server.handle_exit(signal.SIGINT, None)
    assert ended == [130]


@pytest.mark.slow
@pytest.mark.parametrize("how, code", [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_of_an_answer_leaves_no_traceback(tmp_path, how, code):
    server = Server(tmp_path)
    try:
        server.wait()
        client = server.client()
        made = client.files.create(file=("a.txt", document(1).encode()), purpose="user_data")
        assert client.files.wait_for_processing(made.id, poll_interval=0.1).status == "processed"
        body = {**asked(made.id, 1), "max_tokens": 1000, "temperature": 2.0, "n": 8}
        stream = client.chat.completions.create(**body, stream=True)
        next(iter(stream))
        server.process.send_signal(how)
        try:  # an answer that is whole within the grace is as good
            assert [each for chunk in stream for each in chunk.choices][-1].finish_reason
        except openai.APIError as error:
            assert error.message == ENDING
        assert server.process.wait(60) == code
        assert "Traceback" not in server.said() and "Stopped; the documents stay" in server.said()
    finally:
        server.process.kill()
