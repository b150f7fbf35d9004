"""The campaign of sudden deaths: `python -m tests.hostile.kill --moments 50 --seed 0 [--work train
...] [--disks 5]`.

Each kind of work runs once undisturbed. Then it is started in a forked process that is killed by
SIGKILL, either at a random call that opens a file to write, renames or removes one, or at a random
time. Its outputs must be either the old or the new ones. Started again, it must end with the
results of the undisturbed run and leave nothing else. The same must hold after a full disk and a
read-only one (both need the right to mount), and if two processes share one output.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.hostile.works import NOTHING, WORKS, Result, Work, inputs, prepare, random_adapter, small

CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR
SECONDS = 900  # for a run; a busy machine may take long
Hook = Callable[[str, tuple], None]


def counting(folder: Path, act: Callable[[int], None]) -> Hook:
    """Return a hook that calls `act` with the number of each call that is about to change something
    below the folder.
    """
    number = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal number
        changing = event in CHANGES and (event != "open" or (arguments[2] or 0) & WRITING)
        if changing and str(arguments[0]).startswith(f"{folder}"):
            number += 1
            act(number)

    return hook


def begin(work: Work, folder: Path, hook: Hook | None = None) -> int:
    """Start the work in a process forked from this one, which has all modules loaded; return its
    id.
    """
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115, not pytest's
        if hook:
            sys.addaudithook(hook)
        code = work.run(folder) or 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def ended(process: int) -> int:
    """Wait for a process and return its exit code, negative for a signal, 99 for a hang."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return 99


def said(folder: Path) -> str:
    return Path(f"{folder}.log").read_text(errors="replace").strip()


def finish(work: Work, folder: Path) -> Result | str:
    """Run the work to its end; return its results, or what went wrong."""
    code = ended(begin(work, folder))
    return work.result(folder) if code == 0 else f"exit code {code}: {said(folder)[-300:]}"


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*") if path.name != ".lock"]


class Campaign:
    """One kind of work and everything that is done to it."""

    def __init__(self, name: str, place: Path, seed: int) -> None:
        self.name, self.work, self.place, self.seed = name, WORKS[name], place, seed
        self.before = self.work.result(self.fresh("old"))
        folder = self.fresh("whole")
        self.work.run(folder)  # in this process, so that its children have all modules and caches
        folder = self.fresh("timed")
        calls = self.place / f"{name}.calls"
        begun = time.monotonic()
        code = ended(
            begin(self.work, folder, counting(folder, lambda number: calls.write_text(str(number))))
        )
        if code:
            raise RuntimeError(f"{name}, undisturbed: exit code {code}: {said(folder)[-500:]}")
        self.seconds, self.calls = time.monotonic() - begun, int(calls.read_text())
        self.after = self.work.result(folder)
        self.known = [
            {NOTHING, before, after} for before, after in zip(self.before, self.after, strict=True)
        ]
        for part, values in enumerate(self.contents()):
            self.known[part] |= values

    def contents(self) -> list[set[str]]:
        """Return what the parts of the output may be in addition to old and new.

        There is such content only for the work `save`, which writes two contents alternately.
        """
        if self.name != "save":
            return [set() for _ in self.after]
        folder, found = self.fresh("first"), [set() for _ in self.after]
        small(folder, 0.1).save(folder / "out.rkv")
        random_adapter(1).save_pretrained(folder / "saved")
        for part, value in enumerate(self.work.result(folder)):
            found[part].add(value)
        return found

    def fresh(self, label: object) -> Path:
        folder = self.place / f"{self.name}-{label}"
        prepare(folder, self.work)
        return folder

    def problem(self, folder: Path) -> str:
        """Return what is wrong with the outputs after a fault, or after the work was started again;
        "" if nothing is.
        """
        try:
            between = self.work.result(folder)
        except Exception as error:
            return f"unreadable after the fault: {type(error).__name__}: {error}"
        for value, known in zip(between, self.known, strict=True):
            if value not in known:
                return f"neither old nor new content: {between}"
        found = finish(self.work, folder)
        if found != self.after:
            return f"started again it gave {found}, undisturbed {self.after}"
        left = leftovers(folder)
        return f"left {left[0]} behind" if left else ""

    def moment(self, number: int) -> str:
        """Kill the work: at a random call for odd numbers, at a random time for even ones."""
        rng, folder = random.Random(f"{self.seed}/{self.name}/{number}"), self.fresh(number)
        if number % 2:
            chosen = rng.randint(1, self.calls)
            process = begin(
                self.work,
                folder,
                counting(
                    folder,
                    lambda at: os.kill(os.getpid(), signal.SIGKILL) if at == chosen else None,
                ),
            )
        else:
            process = begin(self.work, folder)
            time.sleep(rng.uniform(0, self.seconds))
            os.kill(process, signal.SIGKILL)
        ended(process)
        found = self.problem(folder)
        shutil.rmtree(folder)
        return found

    def two(self, number: int) -> str:
        """Start two processes with one output: at least one must succeed, and the other must say in
        a sentence why it did not.
        """
        folder = self.fresh(f"two{number}")
        processes = [begin(self.work, folder) for _ in range(2)]
        codes = [ended(process) for process in processes]
        if 0 not in codes or "Traceback" in said(folder):
            return f"exit codes {codes}: {said(folder)[-300:]}"
        return self.problem(folder)

    def full(self, number: int) -> str:
        """Run the work on a disk that is full after some bytes, and has room again later."""
        size = sum(
            path.stat().st_size
            for path in (self.place / f"{self.name}-timed").rglob("*")
            if path.is_file()
        )
        share = random.Random(f"{self.seed}/{self.name}/full{number}").uniform(0.02, 1)
        with disk(
            self.place / f"{self.name}-full{number}", f"size={int(size * share) // 1024 + 4}k"
        ) as (
            folder,
            change,
        ):
            try:
                prepare(folder, self.work)
            except OSError:
                return ""  # not even the old outputs have room
            return self.fault(folder, lambda: change("size=64m"))

    def read_only(self, number: int) -> str:
        with disk(self.place / f"{self.name}-read{number}", "size=64m") as (folder, change):
            prepare(folder, self.work)
            change("ro")
            return self.fault(folder, lambda: change("rw"))

    def fault(self, folder: Path, mend: Callable[[], None]) -> str:
        """Run the work on a disk with a fault: it must end with a sentence, and succeed once the
        fault is mended.
        """
        code, words = ended(begin(self.work, folder)), said(folder)
        if code and (code < 0 or "Traceback" in words or "error: " not in words):
            return f"exit code {code}, said: {words[-300:]}"
        mend()
        return self.problem(folder)


@contextmanager
def disk(folder: Path, options: str) -> Iterator[tuple[Path, Callable[[str], None]]]:
    """Mount a small disk for the block; yield its folder and a function that changes its
    options.
    """
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
    try:
        yield (
            folder,
            lambda new: subprocess.run(["mount", "-o", f"remount,{new}", str(folder)], check=True),
        )
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def may_mount(place: Path) -> bool:
    try:
        with disk(place / "trial", "size=4k"):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def run(names: Sequence[str], moments: int, seed: int, disks: int = 5) -> tuple[Counter, list[str]]:
    """Run the campaign; return counts by work and fault, and the failures."""
    counts, failures = Counter(), []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="restorekv-kill-") as name:
        place = Path(name)
        inputs(place)
        if not (mounting := may_mount(place)):
            print("full and read-only disks are left out: mounting is not allowed here", flush=True)
        for kind in names:
            campaign = Campaign(kind, place, seed)
            rounds = {"moment": moments, "two": min(disks, 2)}
            rounds |= {"full": disks, "read_only": min(disks, 1)} if mounting else {}
            for fault, times in rounds.items():
                for number in range(times):
                    found = getattr(campaign, fault)(number)
                    counts[kind, fault, "FAILED" if found else "right"] += 1
                    if found:
                        failures.append(f"{kind}, {fault} {number}: {found}")
                        print(failures[-1], flush=True)
            print(
                f"{kind:9} {campaign.calls} calls, {campaign.seconds:.1f} s, {moments} deaths",
                flush=True,
            )
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--disks", type=int, default=5, help="full disks for each kind of work")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", nargs="*", choices=list(WORKS), default=list(WORKS))
    options = parser.parse_args()
    counts, failures = run(options.work, options.moments, options.seed, options.disks)
    for (kind, fault, verdict), number in sorted(counts.items()):
        print(f"{kind:9} {fault:10} {verdict:6} {number}")
    sys.exit(f"{len(failures)} failures" if failures else 0)


if __name__ == "__main__":
    main()
