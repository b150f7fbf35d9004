"""The campaign against the command line: `python -m tests.hostile.commands --seed 0 --kind files`.

Every kind is one command with one thing wrong. It must end with one sentence on stderr and a code
other than 0, and it must leave the files of its folder unchanged. Kinds of the group `processes`
run in their own processes with broken streams, limits and signals; a few of these are not errors,
and must succeed.
"""

import argparse
import os
import random
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.helpers.bad_input import files_below
from tests.helpers.cli_world import Result, World, build_world, cli
from tests.helpers.models import build_tokenizer
from tests.hostile.command_kinds import SECONDS, Kind, Words, known, values, wrong_values
from tests.hostile.command_places import broken_pipe, files, in_use, processes

SPARE = 2 << 30  # bytes of address space that a kind may take beyond what is in use
GROUPS = {
    "values": values,
    "types": wrong_values,
    "files": files,
    "known": known,
    "processes": processes,
}


def in_process(kind: Kind, words: Words) -> Result:
    """Run a command in this process; an alarm ends one that hangs."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} seconds")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use() + SPARE, hard))
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        return cli(*words, stdin=kind.stdin)
    except BaseException as error:
        return Result(-1, "", f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def in_child(kind: Kind, words: Words, tmp: Path) -> Result:
    """Run a command in a forked process; a new one would spend more time on importing PyTorch."""
    reader, writer = os.pipe()  # which no limit on files concerns
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)
            code = run_here(kind, [str(word) for word in words], tmp)
        finally:
            os._exit(code)
    os.close(writer)
    end = time.monotonic() + SECONDS
    while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.02)
    if not done[0]:
        os.kill(child, signal.SIGKILL)
        done = os.waitpid(child, 0)
    with open(reader, "rb") as err:
        return Result(os.waitstatus_to_exitcode(done[1]), "", err.read().decode(errors="replace"))


def run_here(kind: Kind, words: list[str], tmp: Path) -> int:
    """Set the process up as if Python had just started it, and run the command as its
    script does.
    """
    import restorekv.compression.full_cache as compressor
    import restorekv.train.loop as loop
    from restorekv.cli import main

    if kind.signal:  # in the middle of the work, however slow the machine

        def slow(*_: object, **__: object) -> None:
            os.kill(os.getpid(), kind.signal)
            time.sleep(SECONDS)

        compressor.prefill = loop._add_gradients = slow
    if kind.around:
        kind.around(tmp)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
            encoding = os.environ.get("PYTHONIOENCODING", "utf-8")
            errors = "backslashreplace" if number == 2 else "strict"
            stream = open(  # noqa: SIM115
                number, "w" if number else "r", encoding=encoding, errors=errors, closefd=False
            )
        except OSError:
            stream = None
        setattr(sys, name, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which `nohup make test` ignores
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray, in an earlier test, may have taken it
    try:
        main(words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    return code


def fault(kind: Kind, result: Result, before: dict, after: dict) -> str | None:
    """Return what is wrong with how a command ended, or None."""
    lines = [line for line in result.err.splitlines() if not line.startswith("warning: ")]
    errors = [line for line in lines if line.startswith("error: ")]
    if "Traceback" in result.err or result.code < 0 or result.code == 99:
        return f"code {result.code}: {result.err[-600:]}"
    if kind.works:
        return None if result.code == 0 and not errors else f"did not work: {result.err[-300:]}"
    if result.code == 0:
        return None if kind.may_work and not errors else "was accepted"
    if kind.around is None and "not enough memory" in result.err:
        return "read more than it may"
    silent = kind.around is broken_pipe
    if not silent and (len(errors) != 1 or lines[-1] != errors[0] or not errors[0].endswith(".")):
        return f"not one sentence: {result.err[-600:]!r}"
    if errors and (re.search(r"[a-z][.!?] [A-Z]", errors[0]) or len(errors[0]) > 1000):
        return f"more than a sentence: {errors[0][:600]}"
    if changed := {
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    }:
        leftovers = {
            name for name in changed if name in before or ".tmp" in name or not allowed(kind, name)
        }
        return f"left {sorted(leftovers)}" if leftovers else None
    return None


def allowed(kind: Kind, name: str) -> bool:
    """Return whether a failed command may leave this file.

    A cache or record may stay if it was finished before printing its summary failed, and so may a
    run's log.
    """
    return (
        kind.around is not None
        or kind.signal is not None
        or "/run/" in name
        or "gate.features" in name
    )


def judge(world: World, kind: Kind, folder: Path) -> str | None:
    """Run a kind in a fresh folder, and return what is wrong with how it ended, or None."""
    folder.mkdir()
    try:
        words = kind.words(world, folder)
        before = {**regular(folder), **files_below(world.root)}
        separate = kind.around or kind.signal
        result = in_child(kind, words, folder) if separate else in_process(kind, words)
        return fault(kind, result, before, {**regular(folder), **files_below(world.root)})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_here(name: str) -> bool:
    from restorekv.cli import COMMANDS

    return "verify" in COMMANDS or "verify" not in name


def regular(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of the regular files below a folder, without following links."""
    paths = ((path, path.lstat()) for path in folder.rglob("*"))
    return {
        str(path): (its.st_size, its.st_mtime_ns)
        for path, its in paths
        if stat.S_ISREG(its.st_mode)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the order of the kinds")
    parser.add_argument(
        "--kind", action="append", choices=GROUPS, help="a group; repeatable; all unless given"
    )
    parser.add_argument("--only", default="", help="only kinds whose name has these words")
    given = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    start, failed, done = time.monotonic(), [], Counter()
    with tempfile.TemporaryDirectory() as name:
        world = build_world(Path(name) / "world", build_tokenizer())
        kinds = [(group, kind) for group in given.kind or GROUPS for kind in GROUPS[group]()]
        kinds = [
            (group, kind) for group, kind in kinds if given.only in kind.name and is_here(kind.name)
        ]
        random.Random(given.seed).shuffle(kinds)
        for number, (group, kind) in enumerate(kinds):
            begun = time.monotonic()
            problem = judge(world, kind, Path(name) / f"{number}")
            done[group] += 1
            if problem:
                failed.append((group, kind.name))
                print(
                    f"FAILED {group}: {kind.name} ({time.monotonic() - begun:.1f} s)\n    "
                    f"{problem}",
                    flush=True,
                )
    counts = ", ".join(f"{count} {group}" for group, count in sorted(done.items()))
    print(
        f"{sum(done.values())} kinds in {time.monotonic() - start:.0f} s ({counts}), "
        f"{len(failed)} failed"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
