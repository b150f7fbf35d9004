"""The campaign of memory: `python -m tests.hostile.memory --count 300`, and `--turns 1000` for a
conversation.

One process compresses, saves, loads and asks again and again, alternating between all evictors. Or
it has a conversation that is folded every 20 turns and starts again every 200. The memory that it
holds is printed, and must stop growing after the first quarter.
"""

import argparse
import ctypes
import gc
import resource
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from restorekv import CompressedContext, compress, load_model
from restorekv.evictors import EVICTORS

TEXT = "The {0} house belongs to number {0}. The code of the {0} house is {1}. "
SPARE = 24 << 20  # bytes that the allocator may keep


def held() -> int:
    """Return the bytes of memory of this process, after freeing everything that can be freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(count: int, folder: Path) -> list[int]:
    """Do the work `count` times; return the bytes held after each tenth of it."""
    torch.set_num_threads(1)
    model, tokenizer = load_model("tiny")
    names, sizes = [name for name in EVICTORS if name != "kvpress"], []
    for number in range(count):
        text = "".join(TEXT.format(each, each * 7 + number % 20) for each in range(20))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            small = compress(model, tokenizer, text, evictor=names[number % len(names)], ratio=0.3)
        small.save(folder / "doc.rkv")
        CompressedContext.load(folder / "doc.rkv", model, tokenizer).ask(
            [f"Which code is {number}?", "Who?"], 8
        )
        if number % (count // 10) == count // 10 - 1:
            sizes.append(held())
            print(f"{number + 1:4} of {count}: {sizes[-1] / 2**20:.1f} MB", flush=True)
    return sizes


def talk(turns: int) -> list[int]:
    """Have a conversation of `turns` turns; return the bytes held after each tenth of it."""
    torch.set_num_threads(1)
    small = compress(
        *load_model("tiny"), "".join(TEXT.format(each, each * 7) for each in range(20)), ratio=0.3
    )
    chat, sizes = small.chat(), []
    for number in range(turns):
        if number % 200 == 0:
            chat = small.chat()
        for _ in chat.ask(
            f"Which code is {number % 20}?", 8, stream=True, temperature=0.5, seed=number
        ):
            pass
        if number % 20 == 19:
            chat.fold()
        if number % (turns // 10) == turns // 10 - 1:
            sizes.append(held())
            print(f"turn {number + 1:4} of {turns}: {sizes[-1] / 2**20:.1f} MB", flush=True)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--turns", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="restorekv-memory-") as name:
        sizes = talk(given.turns) if given.turns else run(given.count, Path(name))
    grown = sizes[-1] - sizes[2]
    sys.exit(f"memory grew by {grown / 2**20:.1f} MB" if grown > SPARE else 0)


if __name__ == "__main__":
    main()
