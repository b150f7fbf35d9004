"""The campaign of the server: `python -m tests.hostile.serve --questions 1000`, `--kills 25` for
sudden death, `--mixed 300` for questions of all kinds that come and leave at any time, `--ends 10`
for Ctrl-C in the middle.

A real process serves the tiny model. Many clients ask about many documents, and every answer is
compared with the library's own.

Kills: the server is killed again and again while it takes uploads, compresses and answers. Whatever
it reported as processed must still be there and answer as before.

Disks (`--disks 10`, needs the right to mount): the disk with its store and log is full to the last
byte while it runs and when it starts again. Reading, asking and deleting must continue, and
everything else must be a 507 with a sentence. Then the disk becomes read-only.

Mixed: streams run all the time; short, long and sampled questions join them, and some clients
leave. Every text, as far as it was read, must be the library's own. No question may wait more than
MOST_STEPS steps for its first token, not counting its own prefill; the server counts them.

Ends: the server gets SIGINT or SIGTERM during streams, whole answers and uploads. Streams must end
with an error event or their answer, whole requests with 503 as JSON or their answer, the process
with its usual code, and stderr must have no traceback.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx2 as httpx
import openai
import torch

from restorekv import compress, load_model

MODEL, SLOWEST = "tiny:best-0.2", 600
# Flags of `restorekv serve`; vLLM is tested where it is installed (`make vllm`).
ENGINES = {
    "embedded": [],
    "vllm": [
        *("--engine", "vllm", "--documents-memory", "4M"),
        *("--vllm-options", '{"max_model_len": 2048, "enforce_eager": true, "block_size": 32}'),
    ],
}
MOST_STEPS = 3
SLOWEST_END = 60  # seconds, on a machine that does much else; the figure that counts is printed
TEXT = "The {0} house belongs to number {0}. The code of the {0} house is {1}. "


def document(number: int) -> str:
    return "".join(TEXT.format(each, each * 7 + number) for each in range(20 + number % 7))


def question(number: int) -> str:
    return f"What is the code of the {number % 20} house?"


class Server:
    """A server process with its store in a folder."""

    def __init__(
        self, folder: Path, *flags: str, model: str = "tiny", log: int = subprocess.DEVNULL
    ) -> None:
        # Held, but not listened at, until the campaign ends: nobody else gets this port while the
        # server starts.
        self.place = socket.socket()
        self.place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.place.bind(("127.0.0.1", 0))
        self.port = self.place.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "restorekv",
            "serve",
            "--model",
            model,
            "--preset",
            "best",
            "--ratio",
            "0.2",
        ]
        # Else vLLM takes half of the memory, beside whatever runs here.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, "--store", str(folder), "--port", str(self.port), *flags],
            env=environment,
            stdout=log,
            stderr=self.errors if log == subprocess.DEVNULL else log,
        )

    def client(self, kind: type = openai.OpenAI, retries: int = 0) -> openai.OpenAI:
        return kind(
            base_url=f"http://127.0.0.1:{self.port}/v1",
            api_key="none",
            max_retries=retries,
            timeout=300,
        )

    def wait(self) -> float:
        """Wait until the server answers; return the seconds that it took."""
        start = time.monotonic()
        while time.monotonic() - start < SLOWEST:
            try:
                self.client().models.list()
                return time.monotonic() - start
            except openai.APIConnectionError:
                if self.process.poll() is not None:
                    raise RuntimeError(
                        f"the server ended with {self.process.returncode}: {self.said()}"
                    ) from None
                time.sleep(0.2)
        raise RuntimeError("the server does not come up")

    def figure(self, name: str) -> float:
        """Return one of the server's metrics."""
        lines = self.client().get("/../metrics", cast_to=str).splitlines()
        return float(
            next(line.split()[1] for line in lines if line.startswith(f"restorekv_{name} "))
        )

    def said(self) -> str:
        """Return what the server wrote to stderr."""
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait()


def asked(name: str, number: int, model: str = MODEL) -> dict:
    parts = [
        {"type": "file", "file": {"file_id": name}},
        {"type": "text", "text": question(number)},
    ]
    return {
        "model": model,
        "messages": [{"role": "user", "content": parts}],
        "temperature": 0,
        "max_tokens": 12,
    }


def upload(client: openai.OpenAI, number: int) -> str:
    return client.files.create(
        file=(f"{number}.txt", document(number).encode()), purpose="user_data"
    ).id


def upload_all(client: openai.OpenAI, documents: int) -> list[str]:
    """Upload documents, and return their names once the server has processed them."""
    names = [upload(client, number) for number in range(documents)]
    for name in names:
        assert client.files.wait_for_processing(name, poll_interval=0.2).status == "processed"
    return names


def load(
    folder: Path,
    questions: int,
    clients: int,
    documents: int,
    model: str,
    memory: str,
    engine: Sequence[str],
) -> int:
    """Ask all questions by many clients at the same time; return how many answers were wrong."""
    server = Server(folder, "--waiting", "32", "--memory", memory, *engine, model=model)
    try:
        server.wait()
        names = upload_all(server.client(), documents)
        start = time.monotonic()
        answers, refused = asyncio.run(
            answered(server, f"{model}:best-0.2", names, questions, clients)
        )
        seconds = time.monotonic() - start
        figures = server.client().get("/../metrics", cast_to=str)
        held = next(
            line.split()[1]
            for line in figures.splitlines()
            if line.startswith("restorekv_bytes_held ")
        )
        pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    finally:
        server.stop()
    expected = library(model, questions, documents)
    wrong = sum(ours != theirs for ours, theirs in zip(answers, expected, strict=True))
    print(
        f"{questions} questions, {clients} clients, {documents} documents: {wrong} wrong, "
        f"{refused} times 429, "
        f"{questions / seconds:.1f} answers a second; documents {float(held) / 2**20:.2f} MB of "
        f"{memory}, "
        f"process {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MB",
        flush=True,
    )
    return wrong


async def answered(
    server: Server, model: str, names: list[str], questions: int, clients: int
) -> tuple[list[str], int]:
    """Return every answer, and how many requests were refused with 429 before they succeeded."""
    client, lines, refused = server.client(openai.AsyncOpenAI), asyncio.Semaphore(clients), 0

    async def one(number: int) -> str:
        nonlocal refused
        async with lines:
            while True:
                try:
                    made = await client.chat.completions.create(
                        **asked(names[number % len(names)], number, model)
                    )
                    return made.choices[0].message.content
                except openai.RateLimitError:
                    refused += 1
                    await asyncio.sleep(0.2 + number % 10 / 50)

    return await asyncio.gather(*map(one, range(questions))), refused


def library(name: str, questions: int, documents: int) -> list[str]:
    """Return the library's own answers."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(name)
    made = [compress(model, tokenizer, document(number), ratio=0.2) for number in range(documents)]
    return [made[number % documents].ask(question(number), 12) for number in range(questions)]


def kills(folder: Path, count: int, seed: int, engine: Sequence[str]) -> int:
    """Kill the server at random moments; return how often something was wrong afterwards."""
    chance, known, wrong = random.Random(seed), {}, 0
    for number in range(count):
        server = Server(folder, *engine)
        up = server.wait()
        client = server.client()
        for name, (index, answer) in list(known.items()):
            status = client.files.retrieve(name).status
            said = client.chat.completions.create(**asked(name, index)).choices[0].message.content
            wrong += status != "processed" or said != answer
        name = upload(client, number)
        if client.files.wait_for_processing(name, poll_interval=0.05).status == "processed":
            known[name] = (
                number,
                client.chat.completions.create(**asked(name, number)).choices[0].message.content,
            )
        for more in range(3):
            upload(client, 1000 + 10 * number + more)
        time.sleep(chance.random() * 0.6)
        server.stop(signal.SIGKILL)
        halves = [path for path in folder.rglob("*") if path.suffix == ".tmp"]
        print(
            f"kill {number + 1:3} of {count}: up in {up:.1f} s, {len(known)} documents, {wrong} "
            f"wrong, "
            f"{len(halves)} temporary files",
            flush=True,
        )
    server = Server(folder, *engine)
    server.wait()
    left = [path.name for path in folder.rglob("*") if path.suffix == ".tmp"]
    server.stop()
    return wrong + len(left)


class FullDisk:
    """A server with its store and log on a small disk, and what it must and may do when that is
    full.
    """

    def __init__(self, folder: Path, change: Callable[[str], None], chance: random.Random) -> None:
        self.folder, self.change, self.chance = folder, change, chance
        self.asked = self.refused = 0
        self.wrong: list[str] = []
        # Of documents: which question, and its answer before.
        self.answers: dict[str, tuple[int, str]] = {}

    def start(self) -> None:
        read_only = bool(os.statvfs(self.folder).f_flag & os.ST_RDONLY)
        log = (
            subprocess.DEVNULL
            if read_only
            else os.open(self.folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        )
        self.server = Server(self.folder / "store", "--memory", "1K", log=log)
        if log >= 0:
            os.close(log)
        self.server.wait()
        self.client = self.server.client()

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with (self.folder / "filler").open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"x" * size)

    def must(self, what: str, act: Callable[[], object]) -> object:
        """Do something that needs no room, and must succeed."""
        self.asked += 1
        try:
            return act()
        except openai.APIError as error:
            self.wrong.append(f"{what}: {error}")
            return None

    def may(self, what: str, act: Callable[[], object]) -> None:
        """Do something that needs room: it must succeed, or be a 507 with a sentence."""
        self.asked += 1
        try:
            act()
        except openai.APIStatusError as error:
            self.refused += 1
            if error.status_code != 507 or not str(error.body["message"]).endswith("."):
                self.wrong.append(f"{what}: {error}")
        except openai.APIError as error:
            self.wrong.append(f"{what}: {error}")

    def read(self, variant: str) -> None:
        """Ask about and read everything; `variant` is one that nothing is compressed for yet."""
        self.must("list", self.client.files.list)
        for name, (number, before) in self.answers.items():
            answer = self.must("question", lambda name=name, number=number: self.ask(name, number))
            if answer not in (None, before):
                self.wrong.append(f"{answer!r} instead of {before!r}")
            self.must(
                "stream",
                lambda name=name: list(
                    self.client.chat.completions.create(**asked(name, 1), stream=True)
                ),
            )
            for path in (
                "",
                "/content",
                "/cache",
                f"/kept?model={MODEL}",
                f"/progress?model={MODEL}",
            ):
                self.must(
                    path,
                    lambda name=name, path=path: self.client.get(
                        f"/files/{name}{path}", cast_to=str
                    ),
                )
        self.must("metrics", lambda: self.client.get("/../metrics", cast_to=str))
        name = self.chance.choice(list(self.answers))
        self.may("variant", lambda: self.client.chat.completions.create(**asked(name, 1, variant)))
        self.may("upload", lambda: upload(self.client, self.chance.randrange(1000)))

    def ask(self, name: str, number: int) -> str:
        return self.client.chat.completions.create(**asked(name, number)).choices[0].message.content

    def run(self) -> None:
        """Test a disk that is full while the server runs, then when it starts, then after deletions
        until there is room, then read-only.
        """
        self.start()
        for number in range(4):
            name = upload(self.client, number)
            if (
                self.client.files.wait_for_processing(name, poll_interval=0.05).status
                == "processed"
            ):
                self.answers[name] = number, self.ask(name, number)
        for number in range(self.chance.randrange(3)):
            # The disk fills meanwhile.
            self.may("upload", lambda number=number: upload(self.client, 100 + number))
        self.fill()
        self.read("tiny:snapkv-0.7")
        self.server.stop(self.chance.choice([signal.SIGKILL, signal.SIGTERM]))
        self.fill()
        self.start()
        self.fill()
        self.read("tiny:snapkv-0.8")
        for name in self.chance.sample(list(self.answers), 2):
            self.must("delete", lambda name=name: self.client.files.delete(name))
            del self.answers[name]
        if not os.statvfs(self.folder).f_bavail:
            self.wrong.append("deletions made no room")
        self.must("upload after deletions", lambda: upload(self.client, 5))
        self.server.stop(self.chance.choice([signal.SIGKILL, signal.SIGTERM]))
        self.change("ro")
        self.start()
        self.read("tiny:snapkv-0.9")
        self.may("delete", lambda: self.client.files.delete(next(iter(self.answers))))
        self.server.stop()
        self.change("rw")
        self.start()
        listed = {each.id for each in self.client.files.list()}
        if not set(self.answers) <= listed:
            self.wrong.append("a document is lost")
        self.server.stop()


def disks(place: Path, count: int, seed: int) -> int:
    """Run a server on `count` disks that become full; return how many things were wrong."""
    # Its module needs more than vLLM's environment has.
    from tests.hostile.kill import disk, may_mount

    if not may_mount(place):
        print("full disks are left out: mounting is not allowed here", flush=True)
        return 0
    wrong = 0
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        with disk(place / f"disk{number}", f"size={chance.randint(2600, 5000)}k") as (
            folder,
            change,
        ):
            made = FullDisk(folder, change, chance)
            try:
                made.run()
            except Exception as error:
                made.wrong.append(f"{type(error).__name__}: {error}")
            finally:
                if made.server.process.poll() is None:
                    made.server.stop(signal.SIGKILL)
        wrong += len(made.wrong)
        print(
            f"disk {number + 1:3} of {count}: {made.asked} requests, {made.refused} times 507, "
            f"{len(made.wrong)} wrong",
            *made.wrong,
            sep="\n  ",
            flush=True,
        )
    return wrong


def mixed(folder: Path, questions: int, documents: int, model: str, seed: int) -> int:
    """Ask questions of all kinds, each with its own start time, while streams run; return how many
    things were wrong.
    """
    # As the library, the server writes on where an answer repeats itself.
    flags = ["--memory", "4M", "--waiting", "500", "--stop-repeats", "0"]
    server = Server(folder, *flags, model=model)
    chance = random.Random(seed)
    variant = f"{model}:best-0.2"
    try:
        server.wait()
        names = upload_all(server.client(), documents)
        plans = [plan(number, documents, chance) for number in range(questions)]
        started = time.monotonic()
        answers = asyncio.run(streamed_all(server, variant, names, plans))
        seconds = time.monotonic() - started
        waited, steps = server.figure("longest_wait_steps"), server.figure("steps_total")
        busy = server.figure("questions_answering")
    finally:
        server.stop()
    wrong = int(waited > MOST_STEPS) + int(busy > 0)
    torch.set_num_threads(1)
    loaded, tokenizer = load_model(model)
    made = [compress(loaded, tokenizer, document(number), ratio=0.2) for number in range(documents)]
    for each, texts in zip(plans, answers, strict=True):
        options = {"temperature": each["temperature"], "seed": each["seed"], "samples": each["n"]}
        own = made[each["document"]].ask(each["question"], each["max_tokens"], **options)
        own = own if each["n"] > 1 else [own]
        if each["leaves"]:
            wrong += not all(whole.startswith(text) for whole, text in zip(own, texts, strict=True))
        else:
            wrong += own != texts
    left = sum(each["leaves"] > 0 for each in plans)
    print(
        f"{questions} mixed questions, {left} clients left, {documents} documents: {wrong} "
        f"wrong, {steps:.0f} steps, "
        f"at most {waited:.0f} steps before a first token, {seconds:.0f} s",
        flush=True,
    )
    return wrong


def plan(number: int, documents: int, chance: random.Random) -> dict:
    """Return a random question: when it comes, how long it and its answer are, and after how many
    pieces its client leaves (0 for never).
    """
    long = chance.random() < 0.1
    text = question(number)
    if long:
        text = " ".join(question(chance.randrange(100)) for _ in range(chance.randrange(10, 40)))
    sampled = chance.random() < 0.4
    return {
        "document": chance.randrange(documents),
        "question": text,
        "comes": chance.random() * 20,
        "max_tokens": chance.choice((1, 4, 8, 8, 16, 40)),
        "temperature": 1.0 if sampled else 0.0,
        "seed": chance.randrange(1000),
        "n": chance.choice((1, 1, 2, 5)) if sampled else 1,
        "leaves": chance.randrange(1, 8) if chance.random() < 0.15 else 0,
    }


async def streamed_all(
    server: Server, variant: str, names: list[str], plans: list[dict]
) -> list[list[str]]:
    """Return what every client read: for each sample, an answer or a part of it."""
    client = server.client(openai.AsyncOpenAI)

    async def one(each: dict) -> list[str]:
        await asyncio.sleep(each["comes"])
        parts = [
            {"type": "file", "file": {"file_id": names[each["document"]]}},
            {"type": "text", "text": each["question"]},
        ]
        how = {name: each[name] for name in ("max_tokens", "temperature", "seed", "n")}
        texts, read = [""] * each["n"], 0
        stream = await client.chat.completions.create(
            model=variant, messages=[{"role": "user", "content": parts}], stream=True, **how
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                read += bool(choice.delta.content)
            if each["leaves"] and read >= each["leaves"]:
                await stream.close()
                break
        return texts

    return await asyncio.gather(*map(one, plans))


def ends(folder: Path, count: int, seed: int) -> int:
    """Stop the server in the middle of its work; return how many things were wrong."""
    chance, wrong, slowest, known = random.Random(seed), 0, 0.0, {}
    for number in range(count):
        server = Server(folder)
        server.wait()
        client = server.client()
        wrong += sum(
            client.files.wait_for_processing(name, poll_interval=0.1).status != "processed"
            for name in known
        )
        name = upload(client, number)
        assert client.files.wait_for_processing(name, poll_interval=0.1).status == "processed"
        known = {name: None}
        sent, how = time.monotonic(), chance.choice((signal.SIGINT, signal.SIGTERM))

        async def busy(server: Server = server, name: str = name, how: int = how) -> list[str]:
            address = f"http://127.0.0.1:{server.port}/v1/chat/completions"
            async with httpx.AsyncClient(timeout=300) as http:

                async def one(number: int) -> str:
                    await asyncio.sleep(number * 0.02)
                    body = {
                        **asked(name, number),
                        "max_tokens": 700,
                        "temperature": 2.0,
                        "stream": number % 3 > 0,
                    }
                    try:
                        answer = await http.post(address, json=body)
                    except httpx.ConnectError:
                        return "refused"
                    return ending_of(answer, body["stream"])

                tasks = [asyncio.ensure_future(one(number)) for number in range(24)]
                await asyncio.sleep(0.3 + chance.random())
                for more in range(3):
                    await asyncio.to_thread(upload, server.client(), 1000 + 10 * number + more)
                nonlocal sent
                sent = time.monotonic()
                server.process.send_signal(how)
                return await asyncio.gather(*tasks)

        found = asyncio.run(busy())
        code = server.process.wait(SLOWEST_END)
        slowest = max(slowest, time.monotonic() - sent)
        bad = [each for each in found if each.startswith("wrong")]
        wrong += (
            len(bad)
            + (code != (0 if how == signal.SIGINT else 143))
            + ("Traceback" in server.said())
        )
        print(
            f"end {number + 1:3} of {count} by {signal.Signals(how).name}: code {code} after "
            f"{time.monotonic() - sent:.1f} s, {found.count('error')} error events, "
            f"{found.count('503')} times 503, "
            f"{found.count('whole')} whole, {wrong} wrong {bad[:1] or ''}",
            flush=True,
        )
    print(f"{count} ends: the slowest took {slowest:.1f} s, {wrong} wrong", flush=True)
    return wrong


def ending_of(answer: httpx.Response, stream: bool) -> str:
    """Say how a request ended: whole, with an error event, with 503 as JSON, or wrong."""
    if answer.status_code == 503:
        return (
            "503"
            if "The server is shutting down" in answer.json()["error"]["message"]
            else f"wrong: {answer.text[:80]}"
        )
    if answer.status_code != 200:
        return f"wrong: {answer.status_code} {answer.text[:80]}"
    if not stream:
        return "whole" if answer.json()["choices"] else "wrong: no choices"
    last = answer.text.strip().rsplit("data: ", 1)[-1]
    if last == "[DONE]":
        return "whole"
    error = json.loads(last).get("error", {})
    return (
        "error"
        if error.get("type") == "server_error" and "message" in error
        else f"wrong: {last[:80]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    numbers = {
        "questions": 0,
        "clients": 64,
        "documents": 50,
        "mixed": 0,
        "kills": 0,
        "ends": 0,
        "disks": 0,
        "seed": 0,
    }
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--model", default="tiny", help="of the questions; the kills have the tiny one"
    )
    parser.add_argument("--memory", default="4M", help="of the documents held")
    parser.add_argument(
        "--engine", default="embedded", help="who answers questions and is killed: vllm, too"
    )
    given, wrong = parser.parse_args(), 0
    engine = ENGINES[given.engine]
    with tempfile.TemporaryDirectory(prefix="restorekv-serve-") as name:
        if given.questions:
            wrong += load(
                Path(name) / "load",
                given.questions,
                given.clients,
                given.documents,
                given.model,
                given.memory,
                engine,
            )
        if given.mixed:
            wrong += mixed(
                Path(name) / "mixed", given.mixed, min(given.documents, 8), given.model, given.seed
            )
        if given.ends:
            wrong += ends(Path(name) / "ends", given.ends, given.seed)
        if given.kills:
            wrong += kills(Path(name) / "kills", given.kills, given.seed, engine)
        if given.disks:
            wrong += disks(Path(name), given.disks, given.seed)
    sys.exit(f"{wrong} wrong" if wrong else 0)


if __name__ == "__main__":
    main()
