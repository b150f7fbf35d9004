"""The campaign of mixed load: `python -m tests.hostile.load --minutes 240`, with `--engine vllm` if
vLLM is installed.

One server process runs for the whole time. Documents come and go, more than their pool has room
for. Clients ask about one document or two, for whole answers and streams, short and long ones; some
leave in the middle. Every answer, as far as it was read, must be the library's own. The server's
processes must not grow: the memory that they hold in the last quarter of the time may be at most
GROWTH times that of the second quarter. A line a minute reports the progress.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import openai
import torch

from restorekv import CompressedContext, compose, compress, load_model
from tests.hostile.serve import Server, document, question

MODEL = "tiny:best-0.2"
RATIO = 0.2
LONGEST = 60  # tokens of an answer
# Twice as many as the pool below has room for.
NUMBERS = range(60)
LIVE = 40
GROWTH = 1.03
GONE = "has gone while the question waited"
SPARE = 24 << 20  # bytes that the allocators may keep
POOL = {
    # As the library, which writes on where an answer repeats itself.
    "embedded": ["--memory", "1M", "--stop-repeats", "0"],
    # The least space for KV pairs that one longest request needs: so requests are preempted.
    "vllm": [
        *("--engine", "vllm", "--documents-memory", "1M"),
        "--vllm-options",
        '{"max_model_len": 512, "enforce_eager": true, "block_size": 32,'
        ' "num_gpu_blocks_override": 18}',
    ],
}


class Library:
    """The library's own answers, each of which is computed only once."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model, self.tokenizer = load_model("tiny")
        self.contexts: dict[tuple[int, ...], CompressedContext] = {}
        self.answers: dict[tuple[tuple[int, ...], int, int], str] = {}

    def ask(self, numbers: tuple[int, ...], asked: int, tokens: int) -> str:
        key = numbers, asked, tokens
        if key not in self.answers:
            self.answers[key] = self.read(numbers).ask(question(asked), tokens)
        return self.answers[key]

    def read(self, numbers: tuple[int, ...]) -> CompressedContext:
        if len(numbers) > 1:
            # Pairs are many and rare, so they are not kept.
            return compose([self.read((number,)) for number in numbers])
        if numbers not in self.contexts:
            text = document(numbers[0])
            self.contexts[numbers] = compress(self.model, self.tokenizer, text, ratio=RATIO)
        return self.contexts[numbers]


@dataclass
class Load:
    """The running campaign, with its counts and what went wrong."""

    server: Server
    chance: random.Random
    end: float  # on the monotonic clock
    library: Library = field(default_factory=Library)
    live: dict[int, str] = field(default_factory=dict)  # names of files by number of document
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = self.server.client(openai.AsyncOpenAI)

    def note_wrong(self, what: str) -> None:
        """Remember and print what went wrong."""
        self.wrong.append(what)
        print(what, flush=True)

    async def run(self, clients: int) -> None:
        workers = [self.ask_until_end() for _ in range(clients)]
        await asyncio.gather(self.change_documents(), *workers)

    async def change_documents(self) -> None:
        """Upload and delete documents until the end."""
        while time.monotonic() < self.end:
            absent = [number for number in NUMBERS if number not in self.live]
            if len(self.live) >= LIVE:
                number = self.chance.choice(list(self.live))
                name = self.live.pop(number)
                await self.client.files.delete(name)
                self.counts["documents deleted"] += 1
                continue
            number = self.chance.choice(absent)
            file = (f"{number}.txt", document(number).encode())
            made = await self.client.files.create(file=file, purpose="user_data")
            while (await self.client.files.retrieve(made.id)).status == "uploaded":
                await asyncio.sleep(0.2)
            status = (await self.client.files.retrieve(made.id)).status
            if status != "processed":
                self.note_wrong(f"document {number} is {status}")
            self.live[number] = made.id
            self.counts["documents uploaded"] += 1
            if len(self.live) > LIVE // 4:
                await asyncio.sleep(self.chance.random() * 2)

    async def ask_until_end(self) -> None:
        """Ask one question after the other."""
        while time.monotonic() < self.end:
            if len(self.live) < 2:
                await asyncio.sleep(0.5)
                continue
            count = 2 if self.chance.random() < 0.1 else 1
            numbers = tuple(self.chance.sample(sorted(self.live), count))
            names = [self.live[number] for number in numbers]
            try:
                await self.ask(numbers, names)
            except openai.RateLimitError:
                self.counts["times 429"] += 1
                await asyncio.sleep(self.chance.random())
            except openai.APIError as error:
                # Right for a document that was deleted on the way: 404 before its question was
                # taken, and 503 between that and its turn.
                is_about_gone = isinstance(error, openai.NotFoundError) or GONE in str(error)
                if is_about_gone and self.was_deleted(numbers, names):
                    self.counts["questions about deleted documents"] += 1
                    continue
                kind = type(error).__name__
                self.note_wrong(f"document {numbers}: {kind}: {error} ({error.__cause__!r})")

    def was_deleted(self, numbers: tuple[int, ...], names: list[str]) -> bool:
        """Return whether one of the documents has been deleted since it was chosen."""
        return any(
            self.live.get(number) != name for number, name in zip(numbers, names, strict=True)
        )

    async def ask(self, numbers: tuple[int, ...], names: list[str]) -> None:
        """Ask a random question, and compare what was read of its answer with the library's."""
        asked = self.chance.randrange(40)
        tokens = self.chance.choice((4, 12, 12, 30, LONGEST))
        parts = [{"type": "file", "file": {"file_id": name}} for name in names]
        parts.append({"type": "text", "text": question(asked)})
        request = {
            "model": MODEL,
            "messages": [{"role": "user", "content": parts}],
            "temperature": 0,
            "max_tokens": tokens,
        }
        kind = self.chance.random()
        if kind < 0.15:
            # The client does not wait for its answer.
            pending = asyncio.ensure_future(self.client.chat.completions.create(**request))
            await asyncio.sleep(self.chance.random() * 0.5)
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
            self.counts["clients left"] += 1
            return
        leaves = self.chance.randrange(1, 6) if kind < 0.3 else 0
        if kind < 0.6:
            text = await self.read_stream(request, leaves)
        else:
            answer = await self.client.chat.completions.create(**request)
            text = answer.choices[0].message.content
        expected = await asyncio.to_thread(self.library.ask, numbers, asked, tokens)
        right = expected.startswith(text) if leaves else text == expected
        if not right:
            self.note_wrong(f"document {numbers}: {text!r} instead of {expected!r}")
        self.counts["questions about two documents" if len(names) > 1 else "questions"] += 1

    async def read_stream(self, request: dict, leaves: int) -> str:
        """Return the text of a stream; if `leaves` is not 0, close it after that many pieces."""
        stream = await self.client.chat.completions.create(**request, stream=True)
        text = ""
        pieces = 0
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                pieces += bool(choice.delta.content)
            if leaves and pieces >= leaves:
                await stream.close()
                self.counts["clients left"] += 1
                break
        return text


def measure_memory(pid: int) -> int:
    """Return the bytes that a process and its children hold, each page counted once."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    held = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        held += sum(measure_memory(int(child)) for child in path.read_text().split())
    return held


async def watch(load: Load, minutes: float, sizes: list[int]) -> None:
    """Measure memory once a minute, and print the progress."""
    minute = 0
    while time.monotonic() < load.end:
        await asyncio.sleep(min(60, max(0, load.end - time.monotonic())))
        minute += 1
        sizes.append(measure_memory(load.server.process.pid))
        done = ", ".join(f"{number} {what}" for what, number in sorted(load.counts.items()))
        print(
            f"minute {minute} of {minutes:g}: {done}; {len(load.wrong)} wrong, "
            f"{sizes[-1] / 2**20:.0f} MB",
            flush=True,
        )


async def run_all(load: Load, clients: int, minutes: float, sizes: list[int]) -> None:
    await asyncio.gather(load.run(clients), watch(load, minutes, sizes))


def find_growth(sizes: list[int]) -> float:
    """Return the memory held in the last quarter of the time over that of the second quarter."""
    quarter = len(sizes) // 4
    if not quarter:
        return 1.0
    before = statistics.median(sizes[quarter : 2 * quarter])
    after = statistics.median(sizes[-quarter:])
    print(f"second quarter {before / 2**20:.0f} MB, last quarter {after / 2**20:.0f} MB")
    return (after - SPARE) / before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=240)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=POOL, default="embedded")
    given = parser.parse_args()
    sizes: list[int] = []
    with tempfile.TemporaryDirectory(prefix="restorekv-load-") as folder:
        server = Server(Path(folder), *POOL[given.engine])
        try:
            server.wait()
            end = time.monotonic() + given.minutes * 60
            load = Load(server, random.Random(given.seed), end)
            asyncio.run(run_all(load, given.clients, given.minutes, sizes))
            figures = server.client().get("/../metrics", cast_to=str)
        finally:
            server.stop()
    for line in figures.splitlines():
        if line.startswith(("vllm:num_preemptions_total", "restorekv_compressed_total")):
            print(line)
    grown = find_growth(sizes) > GROWTH
    if load.wrong or grown:
        sys.exit(f"{len(load.wrong)} wrong{', and it grew' if grown else ''}")


if __name__ == "__main__":
    main()
