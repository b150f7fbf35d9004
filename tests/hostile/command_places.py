"""Kinds of bad commands: paths that are not regular files, and processes with broken streams,
limits and signals.
"""

import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.helpers.cli_world import QUESTION
from tests.hostile.command_kinds import DIGITS, Kind, empty, of, placed

SPARSE = 10 << 30  # bytes, more than a kind may use
# files that are none


def missing(path: Path) -> None: ...


def folder(path: Path) -> None:
    path.mkdir()


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(5000))


def zeros(path: Path) -> None:
    path.write_bytes(bytes(5000))


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE)


def unreadable(path: Path) -> None:
    path.symlink_to("/proc/self/mem")  # even for root


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("nowhere"))


def loop(path: Path) -> None:
    path.symlink_to(path)


def deep_json(path: Path) -> None:
    path.write_text('{"context": ' + "[" * 100_000)


def surrogates(path: Path) -> None:
    path.write_text('{"context": "a \\ud800 b", "questions": ["who \\udfff?"]}\n')


def long_number(path: Path) -> None:
    path.write_text(f'{{"context": "a b", "questions": ["who?"], "meta": {DIGITS}}}\n')


FORMS = (missing, folder, empty, garbage, zeros, fifo, sparse, unreadable, endless, dangling, loop)
JSON = (deep_json, surrogates, long_number)
# Command, words dropped, words instead, forms.
PLACES: dict[str, tuple[str, int, tuple[str, ...], tuple]] = {
    "text": ("compress", 9, ("{}/x", "-o", "{}/doc.rkv"), FORMS),
    "cache to ask": ("ask", 6, ("{}/x", QUESTION), FORMS),
    "second cache to ask": ("ask", 5, ("{}/x.rkv", QUESTION), FORMS),
    "cache to inspect": ("inspect", 3, ("{}/x",), FORMS),
    "cache to export": ("export", 5, ("{}/x", "-o", "{}/y"), FORMS),
    "cache to verify": ("verify", 1, ("{}/x",), FORMS),
    "data to train on": ("train", 0, ("--data", "{}/x"), FORMS + JSON),
    "data for a gate": ("train-gate", 0, ("--data", "{}/x"), FORMS + JSON),
    "texts to exclude": (
        "data build",
        0,
        ("--exclude", "{}/x", "--longalpaca", "{}/y"),
        (missing,),
    ),
    "mixture to show": ("data show", 1, ("{}/x",), FORMS),
    "results to report": ("report", 1, ("{}/x",), FORMS),
    "gate to convert": ("convert-gate", 5, ("{}/x", "-o", "{}/gate"), FORMS),
    "adapter to push": ("push", 3, ("{}/x", "owner/name", "--dry-run"), FORMS),
    "results to push": ("push", 0, ("--results", "{}/x"), FORMS + JSON),
    "model": ("compress", 0, ("--model", "{}/x"), FORMS),
    "adapter": ("compress", 0, ("--adapter", "{}/x"), FORMS),
    "gate": ("compress", 0, ("--evictor", "fastkvzip:gate={}/x"), FORMS),
    "head budgets": ("compress", 0, ("--evictor", "am-fast:heads={}/x"), FORMS + JSON),
    "adapter to evaluate": ("eval", 0, ("--evictor", "kvzip@{}/x"), FORMS),
}
OUTPUTS: dict[str, tuple[str, str]] = {
    "cache": ("compress", "-o"),
    "figures of compress": ("compress", "--json"),
    "answers": ("ask", "--json"),
    "prefix": ("export", "--output"),
    "picture": ("inspect", "--plot"),
    "figures of inspect": ("inspect", "--json"),
    "run": ("train", "--out"),
    "gate": ("train-gate", "--out"),
    "converted gate": ("convert-gate", "--output"),
    "rows": ("eval", "--json"),
    "evaluation": ("eval", "--out"),
    "mixture": ("data build", "--out"),
    "demo": ("demo", "--json"),
}
TARGETS = {
    "below a file": "{}/file/x.png",
    "a device": "/dev/full",
    "in /proc": "/proc/x.png",
    "too long": "{}/" + "x" * 300,
}


def files() -> Iterator[Kind]:
    for place, (command, drop, instead, forms) in PLACES.items():
        for form in forms:
            where = "x.rkv" if "{}/x.rkv" in instead else "x"
            # A library that waits for a FIFO hears no alarm.
            apart = alone if form is fifo else None
            yield Kind(
                f"{place}: {form.__name__}",
                placed(form, where, of(command, *instead, drop=drop)),
                around=apart,
            )
    for name, (command, flag) in OUTPUTS.items():
        for label, target in TARGETS.items():
            yield Kind(f"{name} written {label}", placed(empty, "file", of(command, flag, target)))


# what surrounds a process


def alone(tmp: Path) -> None:
    """Change nothing; the kind only gets its own process."""


def without(number: int) -> Callable[[Path], None]:
    return lambda tmp: os.close(number)


def onto(number: int, path: str) -> Callable[[Path], None]:
    return lambda tmp: os.dup2(os.open(path, os.O_RDWR), number)


def broken_pipe(tmp: Path) -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)


def limited(what: int, most: Callable[[], int]) -> Callable[[Path], None]:
    return lambda tmp: resource.setrlimit(what, (most(), most()))


def in_use() -> int:
    """Return the bytes of address space that this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def memory(spare: int) -> Callable[[Path], None]:
    """Limit the process's memory to `spare` bytes more than it uses."""
    return limited(resource.RLIMIT_AS, lambda: in_use() + spare)


def no_folder(tmp: Path) -> None:
    (tmp / "gone").mkdir()
    os.chdir(tmp / "gone")
    (tmp / "gone").rmdir()


def homeless(tmp: Path) -> None:
    for name in ("HOME", "HF_HOME", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)


def plain_terminal(encoding: str) -> Callable[[Path], None]:
    def around(tmp: Path) -> None:
        os.environ["PYTHONIOENCODING"] = encoding

    return around


def processes() -> Iterator[Kind]:
    printing = ("compress", "ask", "inspect", "verify")
    for name in printing:
        yield Kind(f"{name} without stdout", of(name), around=without(1))
        yield Kind(f"{name} onto a full device", of(name), around=onto(1, "/dev/full"))
        yield Kind(f"{name} whose reader is gone", of(name), around=broken_pipe)
        yield Kind(f"{name} without stderr", of(name), around=without(2), works=True)
        yield Kind(f"{name} without stdin", of(name), around=without(0), works=True)
        yield Kind(f"{name} without a home", of(name), around=homeless, works=True)
        yield Kind(
            f"{name} to an ASCII terminal", of(name), around=plain_terminal("ascii"), works=True
        )
        yield Kind(
            f"{name} to a Latin-1 terminal", of(name), around=plain_terminal("latin-1"), works=True
        )
        yield Kind(f"{name} from a deleted folder", of(name), around=no_folder, works=True)
        yield Kind(f"{name} with 1 MB of memory", of(name), around=memory(1 << 20), may_work=True)
        yield Kind(
            f"{name} of a file in a deleted folder", of(name, "--model", "here"), around=no_folder
        )
    yield Kind(
        "text from a closed stdin",
        of("compress", "-", "-o", "{}/doc.rkv", drop=9),
        around=without(0),
    )
    yield Kind("output into a deleted folder", of("compress", "-o", "doc.rkv"), around=no_folder)
    yield Kind("figures into a deleted folder", of("inspect", "--json", "f.json"), around=no_folder)
    yield Kind("training without memory", of("train"), around=memory(0), may_work=True)
    for name, more in {"compress": (), "inspect": ("--json", "{}/f.json"), "train": ()}.items():
        yield Kind(
            f"{name} with files of 100 bytes",
            of(name, *more),
            around=limited(resource.RLIMIT_FSIZE, lambda: 100),
        )
        yield Kind(
            f"{name} with no more open files",
            of(name, *more),
            around=limited(resource.RLIMIT_NOFILE, lambda: 6),
        )
    for name in ("compress", "train", "eval"):
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            yield Kind(f"{name} ended by {number.name}", of(name), signal=number)
