"""The campaign of the server: `python -m tests.hostile.serve --questions 1000`, and `--kills 25` for sudden death.

A real process serves the tiny model. Many clients ask many documents, and every answer is compared with the library's
own; then the server is killed again and again while it takes uploads, compresses and answers, and what it said was
processed must be there and answer as before.
"""

import argparse
import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import openai
import torch

from restorekv import compress, load_model

MODEL, SLOWEST = "tiny:best-0.2", 180
TEXT = "The {0} house belongs to number {0}. The code of the {0} house is {1}. "


def document(number: int) -> str:
    return "".join(TEXT.format(each, each * 7 + number) for each in range(20 + number % 7))


def question(number: int) -> str:
    return f"What is the code of the {number % 20} house?"


class Server:
    """A server process over a folder."""

    def __init__(self, folder: Path, *flags: str, model: str = "tiny") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "restorekv", "serve", "--model", model, "--preset", "best", "--ratio", "0.2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [*command, "--store", str(folder), "--port", str(self.port), *flags], env=environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def client(self, kind: type = openai.OpenAI, retries: int = 0) -> openai.OpenAI:
        return kind(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=retries, timeout=300)

    def wait(self) -> float:
        """Seconds until the server answers."""
        start = time.monotonic()
        while time.monotonic() - start < SLOWEST:
            try:
                self.client().models.list()
                return time.monotonic() - start
            except openai.APIConnectionError:
                if self.process.poll() is not None:
                    raise RuntimeError(f"the server ended with {self.process.returncode}") from None
                time.sleep(0.2)
        raise RuntimeError("the server does not come up")

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait()


def asked(name: str, number: int, model: str = MODEL) -> dict:
    parts = [{"type": "file", "file": {"file_id": name}}, {"type": "text", "text": question(number)}]
    return {"model": model, "messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 12}


def upload(client: openai.OpenAI, number: int) -> str:
    return client.files.create(file=(f"{number}.txt", document(number).encode()), purpose="user_data").id


def load(folder: Path, questions: int, clients: int, documents: int, model: str, memory: str) -> int:
    """Asks everything at once; returns how many answers were wrong."""
    server = Server(folder, "--waiting", "32", "--memory", memory, model=model)
    try:
        server.wait()
        client = server.client()
        names = [upload(client, number) for number in range(documents)]
        for name in names:
            assert client.files.wait_for_processing(name, poll_interval=0.2).status == "processed"
        start = time.monotonic()
        answers, refused = asyncio.run(answered(server, f"{model}:best-0.2", names, questions, clients))
        seconds = time.monotonic() - start
        figures = server.client().get("/../metrics", cast_to=str)
        held = next(line.split()[1] for line in figures.splitlines() if line.startswith("restorekv_bytes_held "))
        pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    finally:
        server.stop()
    expected = library(model, questions, documents)
    wrong = sum(ours != theirs for ours, theirs in zip(answers, expected, strict=True))
    print(f"{questions} questions, {clients} clients, {documents} documents: {wrong} wrong, {refused} times 429, "
          f"{questions / seconds:.1f} answers a second; documents {float(held) / 2**20:.2f} MB of {memory}, "
          f"process {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MB", flush=True)  # fmt: skip
    return wrong


async def answered(server: Server, model: str, names: list[str], questions: int, clients: int) -> tuple[list[str], int]:
    """Returns every answer and how many requests were refused with 429 before they succeeded."""
    client, lines, refused = server.client(openai.AsyncOpenAI), asyncio.Semaphore(clients), 0

    async def one(number: int) -> str:
        nonlocal refused
        async with lines:
            while True:
                try:
                    made = await client.chat.completions.create(**asked(names[number % len(names)], number, model))
                    return made.choices[0].message.content
                except openai.RateLimitError:
                    refused += 1
                    await asyncio.sleep(0.2 + number % 10 / 50)

    return await asyncio.gather(*map(one, range(questions))), refused


def library(name: str, questions: int, documents: int) -> list[str]:
    """The library's own answers."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(name)
    made = [compress(model, tokenizer, document(number), ratio=0.2) for number in range(documents)]
    return [made[number % documents].ask(question(number), 12) for number in range(questions)]


def kills(folder: Path, count: int, seed: int) -> int:
    """Kills the server at random moments; returns how often it came up wrong."""
    chance, known, wrong = random.Random(seed), {}, 0
    for number in range(count):
        server = Server(folder)
        up = server.wait()
        client = server.client()
        for name, (index, answer) in list(known.items()):
            status = client.files.retrieve(name).status
            said = client.chat.completions.create(**asked(name, index)).choices[0].message.content
            wrong += status != "processed" or said != answer
        name = upload(client, number)
        if client.files.wait_for_processing(name, poll_interval=0.05).status == "processed":
            known[name] = number, client.chat.completions.create(**asked(name, number)).choices[0].message.content
        for more in range(3):
            upload(client, 1000 + 10 * number + more)
        time.sleep(chance.random() * 0.6)
        server.stop(signal.SIGKILL)
        halves = [path for path in folder.rglob("*") if path.suffix == ".tmp"]
        print(f"kill {number + 1:3} of {count}: up in {up:.1f} s, {len(known)} documents, {wrong} wrong, "
              f"{len(halves)} temporary files", flush=True)  # fmt: skip
    server = Server(folder)
    server.wait()
    left = [path.name for path in folder.rglob("*") if path.suffix == ".tmp"]
    server.stop()
    return wrong + len(left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"questions": 0, "clients": 64, "documents": 50, "kills": 0, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="tiny", help="of the questions; the kills have the tiny one")
    parser.add_argument("--memory", default="4M", help="of the documents held")
    given, wrong = parser.parse_args(), 0
    with tempfile.TemporaryDirectory(prefix="restorekv-serve-") as name:
        if given.questions:
            wrong += load(
                Path(name) / "load", given.questions, given.clients, given.documents, given.model, given.memory
            )
        if given.kills:
            wrong += kills(Path(name) / "kills", given.kills, given.seed)
    sys.exit(f"{wrong} wrong" if wrong else 0)


if __name__ == "__main__":
    main()
