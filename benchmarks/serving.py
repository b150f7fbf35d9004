"""The benchmark `serving`: `restorekv serve` compared with `transformers serve`, with the same
model, document and questions, asked by several clients.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import openai
import torch

from benchmarks.workload import cut_texts, describe_machine
from restorekv.errors import RestoreKVError
from restorekv.evaluation.tables import Table
from restorekv.model.load import load_model
from restorekv.model.prefill import prefill
from restorekv.pipeline import compress

SLOWEST = 600  # seconds that a server may take until it answers
ROUNDS = 3


@dataclass(frozen=True)
class Options:
    """The options of `serving`, which the command's --help explains."""

    model: str
    tokens: int
    questions: int
    clients: int
    preset: str
    ratio: str
    answer: int


def run_serving(options: Options, tell: Callable[[str], None]) -> dict:
    """Measure batches of the library itself, our server, and transformers' server."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    (text,) = cut_texts(tokenizer, options.tokens)
    questions = [
        f"What happens in part {number} of the story?" for number in range(options.questions)
    ]
    start = time.perf_counter()
    small = compress(model, tokenizer, text, evictor=options.preset, ratio=options.ratio)
    rows = {"compress": time.perf_counter() - start}
    start = time.perf_counter()
    prefill(model, small.context.ids)
    rows["prefill"] = time.perf_counter() - start

    def library() -> float:
        start = time.perf_counter()
        # Batches as large as the clients can make them.
        for first in range(0, len(questions), options.clients):
            small.ask(questions[first : first + options.clients], options.answer)
        return time.perf_counter() - start

    with tempfile.TemporaryDirectory(prefix="restorekv-serving-") as name:
        folder = Path(name)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        rows |= _measure_ours(options, folder, text, questions, library, tell)
        rows["transformers"] = _measure_transformers(options, folder, text, questions, tell)
    return {
        "options": asdict(options),
        "machine": describe_machine(1),
        "rounds": ROUNDS,
        "seconds": rows,
    }


def _measure_transformers(
    options: Options,
    folder: Path,
    text: str,
    questions: list[str],
    tell: Callable[[str], None],
) -> float:
    """Return the seconds in which transformers' server answers everything: the fastest of ROUNDS,
    as for ours.
    """
    command = ["transformers.cli.transformers", "serve", str(folder / "model")]
    rounds = []
    with run_server(command) as client:
        for number in range(ROUNDS):
            tell(f"transformers serve, round {number + 1} of {ROUNDS}")
            seconds = _ask_together(
                options,
                questions,
                lambda each: _ask_transformers(client, options, folder, text, each),
            )
            rounds.append(seconds)
    return min(rounds)


def _measure_ours(
    options: Options,
    folder: Path,
    text: str,
    questions: list[str],
    library: Callable[[], float],
    tell: Callable[[str], None],
) -> dict[str, float]:
    """Return the seconds of the upload, of all answers, and of the first token after a restart.

    The library's own batches and the server take turns, and the fastest of ROUNDS counts, because
    other work on the machine comes and goes.
    """
    name = str(folder / "model")
    variant = f"{name}:{options.preset}-{options.ratio}"
    command = [
        "restorekv",
        "serve",
        "--model",
        name,
        "--preset",
        options.preset,
        "--ratio",
        options.ratio,
    ]
    command += ["--store", str(folder / "store")]
    tell("restorekv serve")
    with run_server(command) as client:
        start = time.perf_counter()
        upload = client.files.create(file=("doc.txt", text.encode()), purpose="user_data")
        client.files.wait_for_processing(upload.id, poll_interval=0.1)
        rows = {"upload": time.perf_counter() - start}
        turns = []
        for number in range(ROUNDS):
            tell(f"the library's own batches, and the server's, round {number + 1} of {ROUNDS}")
            served = _ask_together(
                options,
                questions,
                lambda each: ask_about_upload(client, variant, upload.id, each, options.answer),
            )
            turns.append((library(), served))
        rows |= {
            name: min(each)
            for name, each in zip(("library", "restorekv"), zip(*turns, strict=True), strict=True)
        }
    tell("restorekv serve, after a restart")
    with run_server(command) as client:
        start = time.perf_counter()
        answer = ask_about_upload(
            client, variant, upload.id, questions[0], options.answer, stream=True
        )
        next(iter(answer))
        rows["first token after a restart"] = time.perf_counter() - start
    return rows


def ask_about_upload(
    client: openai.OpenAI,
    model: str,
    upload_id: str,
    question: str,
    max_tokens: int,
    **more: Any,
) -> Any:
    """Ask our server a question about an upload, greedily."""
    parts = [{"type": "file", "file": {"file_id": upload_id}}, {"type": "text", "text": question}]
    return client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": parts}],
        temperature=0,
        max_tokens=max_tokens,
        **more,
    )


def _ask_transformers(
    client: openai.OpenAI, options: Options, folder: Path, text: str, question: str
) -> object:
    """Ask transformers' server, with the document in the message."""
    return client.chat.completions.create(
        model=str(folder / "model"),
        messages=[{"role": "user", "content": f"{text}\n\n{question}"}],
        temperature=0,
        max_tokens=options.answer,
    )


def _ask_together(options: Options, questions: list[str], ask: Callable[[str], object]) -> float:
    """Return the seconds of all questions, asked by `options.clients` clients at the same time."""
    ask(questions[0])  # a warm-up, for what a server does only once
    start = time.perf_counter()
    with ThreadPoolExecutor(options.clients) as pool:
        list(pool.map(ask, questions))
    return time.perf_counter() - start


@contextmanager
def run_server(
    command: list[str], environment: Mapping[str, str] | None = None
) -> Iterator[openai.OpenAI]:
    """Run a server as a process while the block lasts, and yield a client of it.

    Args:
        command: A module and its arguments; the port is added.
        environment: Variables that are set for the server in addition to this process's.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", *command, "--port", str(port)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    client = openai.OpenAI(
        base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0, timeout=3600
    )
    try:
        start = time.monotonic()
        while time.monotonic() - start < SLOWEST:
            try:
                urlopen(f"http://localhost:{port}/health", timeout=10).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise RestoreKVError(
                        f"The server {' '.join(command)} ended with status {process.returncode}; "
                        "run it by hand to see why."
                    ) from None
                time.sleep(0.2)
        yield client
    finally:
        process.terminate()
        process.wait()


def make_tables(result: dict) -> Iterator[Table | str]:
    """Yield the table of answers a minute of each side, then sentences with the other figures."""
    options = result["options"]
    seconds = result["seconds"]
    rounds = (
        f"; each side is the fastest of {result['rounds']} rounds" if "rounds" in result else ""
    )
    rates = {
        name: 60 * options["questions"] / seconds[name]
        for name in ("library", "restorekv", "transformers")
    }
    lines = [
        [name, f"{rate:.1f}", f"{rate / rates['transformers']:.1f}"] for name, rate in rates.items()
    ]
    yield Table(
        "serving", "Answers a minute", ["side", "answers", "times transformers serve"], lines
    )
    yield f"Through HTTP, {rates['restorekv'] / rates['library']:.2f} of the library's own batches."
    yield (
        f"Prefill {seconds['prefill']:.2f} s, compress {seconds['compress']:.2f} s; first token "
        "after a restart "
        f"{seconds['first token after a restart']:.2f} s."
    )
    yield (
        f"{options['model']}, {options['tokens']:,} tokens, {options['questions']} questions of "
        f"{options['clients']} "
        f"clients, answers of {options['answer']} tokens at most, {result['machine']['processor']}"
        f"{rounds}."
    )
