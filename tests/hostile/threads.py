"""The campaign of threads: `python -m tests.hostile.threads --minutes 10 --threads 8 --seed 0`.

Threads that share one model compress with every evictor and three adapters, ask, generate, load,
and save to one path, in random order. Every cache and every answer must be the same as when only
one thread does it, and the path must always hold a complete file. Differences are printed.
"""

import argparse
import hashlib
import random
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from restorekv import CompressedContext, compress, load_model
from restorekv.evictors import EVICTORS

TEXTS = tuple(
    f"The {color} house belongs to {owner}. The code of the {color} house is {code}. " * 9
    for color, owner, code in (("red", "Ada", 482), ("blue", "Bob", 193), ("green", "Eve", 775))
)
QUESTIONS = ("Who owns the red house?", "What is the code of the blue house?")
ADAPTERS = ("tiny:kvzip", "tiny:snapkv", "tiny:h2o")
TOKENS = 6


class Work:
    """Jobs by name; each returns a text that must be the same every time."""

    def __init__(self, folder: Path) -> None:
        self.model, self.tokenizer = load_model("tiny")
        self.folder, self.shared = folder, folder / "shared.rkv"
        self.jobs: dict[str, Callable[[], str]] = {}
        for number, text in enumerate(TEXTS):
            for evictor in EVICTORS:
                if evictor != "kvpress":
                    self.add(
                        f"compress {evictor} {number}",
                        lambda t=text, e=evictor: self.compress(t, e, None),
                    )
            for adapter in ADAPTERS:
                name = f"compress {adapter} {number}"
                self.add(name, lambda t=text, a=adapter: self.compress(t, a.partition(":")[2], a))
        self.ready = [self.made(text, "kvzip", "auto") for text in TEXTS]
        for number, ready in enumerate(self.ready):
            ready.save(folder / f"{number}.rkv")
            self.add(f"ask {number}", lambda r=ready: " | ".join(r.ask(list(QUESTIONS), TOKENS)))
            self.add(
                f"generate {number}",
                lambda r=ready: r.generate(QUESTIONS[0], max_new_tokens=TOKENS),
            )
            self.add(f"load {number}", lambda n=number: self.load(self.folder / f"{n}.rkv"))
            self.add(f"save {number}", lambda r=ready: self.save(r))
            self.add(f"fail {number}", lambda t=TEXTS[number]: self.fail(t))

    def add(self, name: str, job: Callable[[], str]) -> None:
        self.jobs[name] = job

    def made(self, text: str, evictor: str, adapter: str | None) -> CompressedContext:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compress(
                self.model, self.tokenizer, text, evictor=evictor, ratio=0.3, adapter=adapter
            )

    def compress(self, text: str, evictor: str, adapter: str | None) -> str:
        compressed = self.made(text, evictor, adapter)
        return f"{digest(compressed)} {compressed.ask(QUESTIONS[0], TOKENS)}"

    def fail(self, text: str) -> str:
        """Stop a compression in the middle, as Ctrl-C or lack of memory would; this must not affect
        the other threads.
        """
        seen = []

        def stop(phase: str, _: float) -> None:
            if phase not in seen:
                seen.append(phase)
            if len(seen) == 2:
                raise MemoryError(phase)

        try:
            compress(self.model, self.tokenizer, text, evictor="kvzip", ratio=0.3, progress=stop)
        except MemoryError as error:
            return f"stopped at {error}"
        return f"never stopped: {seen}"

    def load(self, path: Path) -> str:
        loaded = CompressedContext.load(path, self.model, self.tokenizer)
        return f"{digest(loaded)} {loaded.ask(QUESTIONS[1], TOKENS)}"

    def save(self, ready: CompressedContext) -> str:
        """Save to the path that all threads share; afterwards it must hold a complete file of one
        of them.
        """
        ready.save(self.shared)
        found = digest(CompressedContext.load(self.shared, self.model, self.tokenizer))
        return "whole" if found in {digest(each) for each in self.ready} else "another file"


def digest(compressed: CompressedContext) -> str:
    """Return a digest of every bit that decides an answer."""
    found = hashlib.sha256()
    for tensor in (
        compressed.context.ids,
        *(x for layer in compressed.cache.layers for x in layer.list_tensors()),
    ):
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy(force=True).tobytes())
    return found.hexdigest()[:16]


def run(seconds: float, count: int, seed: int, folder: Path) -> tuple[Counter, list[str]]:
    """Run the threads; return how many jobs of each kind were right, and what went wrong."""
    # Of this thread, as in those below: sums in another number of parts have other bits.
    torch.set_num_threads(1)
    work = Work(folder)
    expected = {name: job() for name, job in work.jobs.items()}
    counts, wrong, end, guard = Counter(), [], time.monotonic() + seconds, threading.Lock()

    def body(number: int) -> None:
        rng = random.Random(f"{seed}/{number}")
        torch.set_num_threads(1)
        while time.monotonic() < end:
            name = rng.choice(list(work.jobs))
            try:
                found = work.jobs[name]()
                problem = (
                    ""
                    if found == expected[name]
                    else f"{name}: {found!r}, alone {expected[name]!r}"
                )
            except BaseException:
                problem = f"{name}: {traceback.format_exc(limit=-3)}"
            with guard:
                counts[name.split()[0], "wrong" if problem else "right"] += 1
                if problem:
                    wrong.append(problem)
                    print(problem, flush=True)

    threads = [
        threading.Thread(target=body, args=(number,), daemon=True) for number in range(count)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 300)
        if thread.is_alive():
            wrong.append("a thread did not end: deadlock?")
    return counts, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restorekv-threads-") as name:
        counts, wrong = run(options.minutes * 60, options.threads, options.seed, Path(name))
    for (kind, verdict), number in sorted(counts.items()):
        print(f"{kind:10} {verdict:6} {number}")
    sys.exit(f"{len(wrong)} jobs went wrong" if wrong else 0)


if __name__ == "__main__":
    main()
