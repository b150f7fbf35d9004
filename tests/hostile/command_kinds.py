"""Kinds of bad commands: values of a wrong type, impossible values, and the cases of
tests/cli/test_bad_input.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.bad_input import CASES, USAGE
from tests.helpers.cli_world import QUESTION, World

Words = list[object]
SECONDS = 60  # for a kind
DIGITS = "7" * 6000
BROKEN = "who\udcff\udcfe?"  # bytes that are not UTF-8, as Python shows them


@dataclass(frozen=True)
class Kind:
    """A command, made from the world and the case's folder, and for commands in their own process
    the conditions that it runs under.
    """

    name: str
    words: Callable[[World, Path], Words]
    stdin: bytes = b""
    around: Callable[[Path], object] | None = None  # runs in the new process before the command
    signal: int | None = None  # sent while the command works
    works: bool = False  # not a mistake: it must succeed
    may_work: bool = False  # where the memory that is left may suffice


def base(world: World, tmp: Path) -> dict[str, Words]:
    """Return a good command of every kind.

    Some of them would take long, but they are only run with something wrong added.
    """
    model = ["--model", world.model]
    return {
        "compress": [
            "compress",
            world.text,
            *model,
            "-o",
            tmp / "doc.rkv",
            "--ratio",
            0.5,
            "--adapter",
            "none",
        ],
        "ask": ["ask", world.cache, QUESTION, *model, "--max-new-tokens", 2],
        "export": ["export", world.cache, "--output", tmp / "portable", *model],
        "inspect": ["inspect", world.cache, "--tokens", 20],
        "verify": ["verify", world.cache],
        "train": ["train", "--data", world.data, *model, "--out", tmp / "run", "--steps", 1],
        "train-gate": ["train-gate", "--data", world.data, *model, "--out", tmp / "gate"],
        "data build": ["data", "build", "--out", tmp / "data", *model],
        "data show": ["data", "show", tmp / "data"],
        "eval": ["eval", *model, "--benchmark", "tiny", "--count", 1, "--out", tmp / "run"],
        "report": ["report", tmp / "run"],
        "convert-gate": ["convert-gate", tmp / "no.pt", *model, "-o", tmp / "gate"],
        "push": ["push", world.adapter, "owner/name", "--dry-run"],
        "demo": ["demo", "--json", tmp / "no" / "f.json"],
        "chat": ["chat", world.cache, *model],
        "serve": ["serve", *model, "--store", tmp / "store", "--port", 0],
    }


def of(name: str, *more: object, drop: int = 0) -> Callable[[World, Path], Words]:
    """Return a builder of the good command `name` with more words; {} is the case's folder."""

    def words(world: World, tmp: Path) -> Words:
        good = base(world, tmp)[name]
        return [*good[: len(good) - drop], *(str(word).replace("{}", str(tmp)) for word in more)]

    return words


# values of a wrong type for every option of every command


def wrong_values() -> Iterator[Kind]:
    from restorekv.cli import COMMANDS, _load_command

    for name, (module, line, _) in COMMANDS.items():
        command = _load_command(module, line, name)
        parts = {
            f"{name} {each}": part
            for each, part in getattr(command, "commands", {name: command}).items()
        }
        for full, part in parts.items() if len(parts) > 1 else ((name, command),):
            for option in part.params:
                flag = next((word for word in option.opts if word.startswith("--")), None)
                kind = (
                    getattr(option, "type", None)
                    or getattr(option, "type_descriptor", option).annotation
                )
                for label, value in values_of(str(kind).lower()) if flag else ():
                    yield Kind(f"{full} {flag} {label}", of(full, flag, value))


def values_of(kind: str) -> list[tuple[str, str]]:
    if "int" in kind:
        return [
            ("in words", "many"),
            ("with 6,000 digits", DIGITS),
            ("as a fraction", "1.5"),
            ("empty", ""),
        ]
    if "float" in kind:
        return [("in words", "many"), ("NaN", "nan"), ("empty", "")]
    return []


def placed(form: Callable[[Path], None], name: str, words: Callable[[World, Path], Words]):
    def prepared(world: World, tmp: Path) -> Words:
        form(tmp / name)
        return words(world, tmp)

    return prepared


def empty(path: Path) -> None:
    path.write_bytes(b"")


# values that cannot be, and options that contradict each other

VALUES = {
    "compress": (
        ("--tokens-per-head", DIGITS[:4000]),
        ("--tokens-per-head", 2**63),
        ("--ratio", DIGITS),
        ("--ratio", "1e-9999"),
        ("--ratio", "\u0661/\u0662x"),
        ("--ratio", BROKEN),
        ("--offset", 2**62),
        ("--offset", 2**31),
        ("--offset", -1),
        ("--restore-tokens", 0),
        ("--streaming-chunk", 0),
        ("--device", "meta"),
        ("--device", "cpu:\u0661"),
        ("--device", BROKEN),
        ("--device", ""),
        ("--device", "cuda:-1"),
        ("--dtype", "float64"),
        ("--dtype", BROKEN),
        ("--dtype", ""),
        ("--evictor", BROKEN),
        ("--evictor", "kvzip:chunk=0"),
        ("--evictor", f"kvzip:chunk={DIGITS}"),
        ("--evictor", "kvzip:chunk=many"),
        ("--evictor", "snapkv:window=-5"),
        ("--evictor", "snapkv:kernel=2"),
        ("--evictor", "random:seed=" + DIGITS),
        ("--allocation", "nowhere"),
        ("--allocation", BROKEN),
        ("--restore-from", "nowhere"),
        ("--kv-dtype", "int3"),
        ("--kv-dtype", BROKEN),
        ("--preset", "slow"),
        ("--preset", "fast", "--evictor", "kvzip"),
        ("--adapter", BROKEN),
        ("--adapter", "published"),
        ("--adapter", "tiny:nothing"),
        ("--model", BROKEN),
        ("--model", ""),
        ("--model", "a/b/c/d"),
        ("--on-long-text", "stretch"),
        ("--yarn", 1),
        ("--yarn", -2),
        ("--yarn", "inf"),
        ("--yarn", 1e300),
        ("--prefix-policy", ""),
        ("--adapter", "auto", "--evictor", "am-fast", "--offload"),
        ("--evictor", "am-fast", "--streaming-chunk", 50),
        ("--restore-from", "evicted"),
        ("--tokens-per-head", 3),
    ),
    "ask": (
        ("--max-new-tokens", 0),
        ("--max-new-tokens", -1),
        ("--device", "meta"),
        ("--dtype", "int8"),
        (BROKEN,),
        ("",),
        ("\u2028",),
        ("--model", BROKEN),
        ("--json", "{}/\udcff/x"),
    ),
    "export": (
        (),
        ("--model", BROKEN),
    ),
    "inspect": (
        ("--tokens", -1),
        ("--tokens", DIGITS),
        ("--model", BROKEN),
        ("--plot", "{}/x"),
        ("--plot", "{}/x.exe"),
    ),
    "verify": (("{}/no",),),
    "train": (
        ("--steps", 0),
        ("--steps", -1),
        ("--lr", "nan"),
        ("--lr", -1),
        ("--rank", 2**62),
        ("--restore-tokens", 2**62),
        ("--ratio-min", 2),
        ("--ratio-min", "inf"),
        ("--targets", ""),
        ("--targets", BROKEN),
        ("--optimizer", "magic"),
        ("--shortest", 5),
        ("--shortest", 900, "--longest", 100),
        ("--store-prefill",),
        ("--evictor", "am-fast"),
        ("--data", "tiny", "--count", 0),
        ("--seed", DIGITS),
        ("--max-new-tokens", 0),
        ("--device", "meta"),
    ),
    "train-gate": (
        ("--kind", "magic"),
        ("--kind", BROKEN),
        ("--count", 1),
        ("--held-out", 2),
        ("--features", "{}/file"),
        ("--steps", 0),
    ),
    "data build": (
        ("--mixture", "magic"),
        ("--longalpaca", "{}/no"),
        ("--questions", -1),
        ("--resume",),
        ("--exclude", "{}/no"),
    ),
    "eval": (
        ("--ratio", "nan"),
        ("--ratio", BROKEN),
        ("--benchmark", "nothing"),
        ("--benchmark", BROKEN),
        ("--protocol", "none"),
        ("--benchmark", "ruler:length=-5"),
        ("--benchmark", "ruler:length=" + DIGITS),
        ("--benchmark", "tiny:split="),
        ("--count", 0),
        ("--max-context", 1),
        ("--max-context", -1),
        ("--workers", 0),
        ("--seed", DIGITS),
        ("--evictor", "kvzip@" + BROKEN),
        ("--kv-dtype", "int3"),
        ("--device", "meta"),
        ("--offset", 2**62),
        ("--streaming-chunk", 0),
    ),
    "report": (("--out", "/proc/x"),),
    "push": (
        ("--dtype", "int8"),
        ("--license", BROKEN),
        ("more",),
    ),
    "convert-gate": (
        ("--dtype", "int8"),
        ("--model", ""),
    ),
    "demo": (
        ("--count", 0),
        ("--model", BROKEN),
    ),
}


def values() -> Iterator[Kind]:
    for command, options in VALUES.items():
        for more in options:
            label = " ".join(ascii(str(word))[1:-1][:30] for word in more)
            yield Kind(f"{command} {label}", placed(empty, "file", of(command, *more)))
    for label, words in {
        "no command of data": ["data"],
        "a dash": ["-"],
        "two dashes": ["--"],
        "an empty word": [""],
        "a broken word": [BROKEN],
        "a flag of no command": ["--ratio", 1],
        "a NUL": ["inspect", "a\0b"],
        "many words": ["x"] * 20_000,
        "a word of a megabyte": ["x" * 1_000_000],
    }.items():
        yield Kind(label, lambda world, tmp, words=words: words)


def known() -> Iterator[Kind]:
    """Yield the kinds whose messages `make test` checks one by one."""
    for name, (build, _) in (CASES | USAGE).items():
        yield Kind(name, build)
    for name, raw in {
        "stdin not UTF-8": b"\xff\xfe",
        "stdin binary": b"a\0b",
        "stdin of white space": b" \n",
        "stdin of a BOM": b"\xef\xbb\xbf",
    }.items():
        yield Kind(name, of("compress", "-", "-o", "{}/doc.rkv", drop=9), stdin=raw)
