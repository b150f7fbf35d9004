"""Commands that must fail, and the messages that they must print."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.helpers.cli_world import QUESTION, World, cli

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
EMBEDDINGS, CARD = "restore_embeddings.safetensors", "restorekv.json"


Build = Callable[[World, Path], list[object]]


def files_below(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the size and time of change of every file below a folder, by path."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def compress(
    file: str | None = None, model: str | None = None, out: str = "doc.rkv", *more: object
) -> Build:
    """Build a `compress` command that is good except for what the case changes.

    Names are those of files in the case's own folder.
    """

    def build(world: World, tmp: Path) -> list[object]:
        where = model if model is None or model == "no/such-model" else tmp / model
        source = world.text if file is None else file if file == "-" else tmp / file
        return ["compress", source, "--model", where or world.model, "-o", tmp / out, *more]

    return build


def flags(*more: object) -> Build:
    return compress(None, None, "doc.rkv", *more)


def text(content: bytes, *more: object) -> Build:
    def build(world: World, tmp: Path) -> list[object]:
        (tmp / "text").write_bytes(content)
        return compress("text", None, "doc.rkv", *more)(world, tmp)

    return build


def model(change: Callable[[Path], object], *more: object) -> Build:
    """Build a command with a copy of the model in which something is wrong."""

    def build(world: World, tmp: Path) -> list[object]:
        shutil.copytree(world.model, tmp / "model")
        change(tmp / "model")
        return compress(None, "model", "doc.rkv", *more)(world, tmp)

    return build


def adapter(change: Callable[[Path], object], source: str = "adapter") -> Build:
    """Build a command with a copy of an adapter in which something is wrong."""

    def build(world: World, tmp: Path) -> list[object]:
        shutil.copytree(world.root / source, tmp / "adapter")
        change(tmp / "adapter")
        return flags("--ratio", 0.3, "--adapter", tmp / "adapter")(world, tmp)

    return build


def cache(change: Callable[[bytes], bytes], command: str = "ask") -> Build:
    """Build a command with a copy of the cache file in which something is wrong."""

    def build(world: World, tmp: Path) -> list[object]:
        (tmp / "cache").write_bytes(change((world.root / "cache").read_bytes()))
        return (
            ["ask", tmp / "cache", QUESTION, "--model", world.model]
            if command == "ask"
            else [command, tmp / "cache"]
        )

    return build


def ask(*more: object, model: str = "model", questions: tuple[str, ...] = (QUESTION,)) -> Build:
    return lambda world, tmp: ["ask", world.cache, *questions, "--model", world.root / model, *more]


def inspect(*more: str) -> Build:
    """Build an `inspect` command; {} in its words is replaced by the case's folder."""
    return lambda world, tmp: [
        "inspect",
        world.cache,
        *(word.replace("{}", str(tmp)) for word in more),
    ]


def train(*more: object, data: bytes | None = None) -> Build:
    def build(world: World, tmp: Path) -> list[object]:
        if data is not None:
            (tmp / "data").write_bytes(data)
        source = world.data if data is None else tmp / "data"
        return [
            "train",
            "--data",
            source,
            "--model",
            world.model,
            "--out",
            tmp / "run",
            "--steps",
            1,
            "--warmup",
            0,
            *more,
        ]

    return build


def old_run(*more: object) -> Build:
    """Build a `train` command for a folder with a finished run of one step and two
    restore tokens.
    """

    def build(world: World, tmp: Path) -> list[object]:
        small = ("--restore-tokens", 2, "--rank", 2, "--max-new-tokens", 2, "--ratio-min", 0.1)
        assert cli(*train(*small)(world, tmp)).code == 0
        return train(*small, *more)(world, tmp)

    return build


def evaluate(*more: object) -> Build:
    return lambda world, tmp: [
        "eval",
        "--model",
        world.model,
        "--benchmark",
        "tiny",
        "--count",
        1,
        "--out",
        tmp / "run",
        *more,
    ]


def flipped(data: bytes, place: float) -> bytes:
    """Return data with one bit flipped, in the byte at a share `place` of the length."""
    index = int(place * len(data))
    return data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]


def header(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"restore_embeddings": [1.0]}))


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def in_folder(make: Callable[[Path], object], build: Build) -> Build:
    """Build a command after making something in the case's folder."""

    def prepared(world: World, tmp: Path) -> list[object]:
        make(tmp)
        return build(world, tmp)

    return prepared


RATIO = "above 0 and at most 1"


CASES: dict[str, tuple[Build, str]] = {
    # the text
    "empty file": (text(b""), "empty"),
    "whitespace file": (text(b" \n\t\n"), "empty"),
    "empty stdin": (compress("-"), "empty"),
    "not UTF-8": (text(b"the code is \xff\xfe seven"), "not UTF-8"),
    "binary file": (text(b"\x7fELF\0\0\0\1"), "binary"),
    "missing file": (compress("nowhere"), "does not exist; check its name"),
    "a folder without documents": (compress("."), "has no document"),
    "Ray for one file": (flags("--ray", "local"), "needs a folder of documents"),
    "context shorter than n": (
        lambda world, tmp: text(
            b"a", "--ratio", 1, "--adapter", world.adapter, "--on-small-budget", "error"
        )(world, tmp),
        "fewer than the 8 restore tokens",
    ),
    # the budget
    "ratio 0": (flags("--ratio", 0), RATIO),
    "negative ratio": (flags("--ratio", "-0.1"), RATIO),
    "ratio 1.5": (flags("--ratio", 1.5), RATIO),
    "ratio NaN": (flags("--ratio", "nan"), RATIO),
    "infinite ratio": (flags("--ratio", "inf"), RATIO),
    "ratio in words": (flags("--ratio", "abc"), RATIO),
    "empty ratio": (flags("--ratio", ""), RATIO),
    "ratio over zero": (flags("--ratio", "1/0"), RATIO),
    "ratio and tokens per head": (flags("--ratio", 0.1, "--tokens-per-head", 5), "not both"),
    "tokens per head 0": (flags("--tokens-per-head", 0), "at least 1"),
    "tokens per head negative": (flags("--tokens-per-head", -3), "at least 1"),
    "tokens per head too many": (flags("--tokens-per-head", 10**6), "lower it"),
    "budget below the restore tokens": (
        lambda world, tmp: flags(
            "--ratio", 0.01, "--adapter", world.adapter, "--on-small-budget", "error"
        )(world, tmp),
        r"smallest workable ratio is 0\.\d+",
    ),
    "unknown evictor": (flags("--evictor", "h3o"), "no evictor 'h3o'.*kvzip"),
    "unknown setting of an evictor": (flags("--evictor", "kvzip:colour=3"), "no setting"),
    "unknown prefix policy": (flags("--prefix-policy", "maybe"), "free, counted"),
    "unknown on-small-budget": (flags("--on-small-budget", "shrug"), "whole, error, fewer, clip"),
    "restore tokens without a restore pass": (
        flags("--evictor", "am-fast", "--restore-tokens", 2),
        "am-fast has no restore pass; leave out --restore-tokens",
    ),
    # the model
    "missing model": (compress(None, "no/such-model"), "Cannot load the model"),
    "missing model folder": (compress(None, "nowhere"), "Cannot load the model"),
    "empty model folder": (
        in_folder(lambda tmp: (tmp / "m").mkdir(), compress(None, "m")),
        "Cannot load the model",
    ),
    "model without weights": (
        model(lambda m: (m / "model.safetensors").unlink()),
        "Cannot load the model",
    ),
    "model without tokenizer": (
        model(lambda m: (m / "tokenizer.json").unlink()),
        "Cannot load the model",
    ),
    "damaged weights": (model(lambda m: halved(m / "model.safetensors")), "Cannot load the model"),
    "damaged model config": (model(lambda m: halved(m / "config.json")), "Cannot load the model"),
    "unknown device": (flags("--device", "abacus"), "no device 'abacus'"),
    "absent device": (flags("--device", "cuda:99"), "no device 'cuda:99'"),
    "unknown dtype": (flags("--dtype", "float7"), "dtype must be one of"),
    # the adapter
    "missing adapter folder": (flags("--adapter", "/no/such/adapter"), "no adapter folder"),
    "adapter without config": (adapter(lambda a: (a / CONFIG).unlink()), f"has no {CONFIG}"),
    "adapter without weights": (adapter(lambda a: (a / WEIGHTS).unlink()), f"has no {WEIGHTS}"),
    "adapter without embeddings": (
        adapter(lambda a: (a / EMBEDDINGS).unlink()),
        f"has no {EMBEDDINGS}",
    ),
    "adapter config no JSON": (
        adapter(lambda a: ((a / CARD).unlink(), (a / CONFIG).write_text("rank: 8"))),
        "config.json is damaged",
    ),
    "adapter card no JSON": (
        adapter(lambda a: (a / CARD).write_text("{")),
        "restorekv.json is damaged",
    ),
    "adapter of another kind": (
        adapter(lambda a: ((a / CARD).unlink(), (a / CONFIG).write_text('{"peft_type": "IA3"}'))),
        "LORA|damaged",
    ),
    "altered adapter": (
        adapter(lambda a: (a / WEIGHTS).write_bytes(flipped((a / WEIGHTS).read_bytes(), 0.9))),
        "not the file that was",
    ),
    "truncated adapter": (
        adapter(lambda a: ((a / CARD).unlink(), halved(a / WEIGHTS))),
        "cut short",
    ),
    "pickle as adapter weights": (
        adapter(lambda a: ((a / CARD).unlink(), pickled(a / WEIGHTS))),
        "not a safetensors",
    ),
    "pickle as embeddings": (
        adapter(lambda a: ((a / CARD).unlink(), pickled(a / EMBEDDINGS))),
        "not a safetensors",
    ),
    "embeddings of another name": (
        adapter(lambda a: ((a / CARD).unlink(), shutil.copy(a / WEIGHTS, a / EMBEDDINGS))),
        "no tensor",
    ),
    "adapter of another width": (
        adapter(lambda a: None, "adapter_of_wide"),
        "width 64, this one has 32",
    ),
    "adapter of another model": (
        adapter(lambda a: None, "adapter_of_other"),
        "a different model",
    ),
    # the output
    "output folder missing": (compress(None, None, "nowhere/doc.rkv"), "does not exist"),
    "output is a folder": (compress(None, None, "."), "is a folder"),
    "output is a device": (flags("-o", "/dev/null"), "not a regular file"),
    "a grown cache on stdout": (
        lambda world, tmp: ["append", world.cache, world.text, "-o", "-", "--model", world.model],
        "not written to stdout; give the name of a file",
    ),
    "output name too long": (compress(None, None, "x" * 300), "too long"),
    "figures into a missing folder": (flags("--json", "/no/such/folder/f.json"), "does not exist"),
    "figures into a folder": (flags("--json", "/"), "is a folder"),
    # the cache file
    "cache of 0 bytes": (cache(lambda data: b""), "cut short|not a restorekv cache"),
    "cache of 5 bytes": (cache(lambda data: data[:5]), "cut short"),
    "cache cut in the header": (cache(lambda data: data[: header(data) // 2]), "cut short"),
    "cache cut after the header": (cache(lambda data: data[: header(data)]), "cut short"),
    "cache cut in the tensors": (
        cache(lambda data: data[: (header(data) + len(data)) // 2]),
        "cut short",
    ),
    "cache without its last byte": (cache(lambda data: data[:-1]), "cut short"),
    "cache with a byte too many": (cache(lambda data: data + b"\0"), "too long"),
    "flipped byte in the length": (
        cache(lambda data: flipped(data, 0)),
        "cut short|damaged|truncated|not a",
    ),
    "flipped byte in the header": (
        cache(lambda data: flipped(data, 300 / len(data))),
        "damaged|cut short",
    ),
    "flipped byte in the tensors": (cache(lambda data: flipped(data, 0.7)), "damaged"),
    "text as a cache": (
        cache(lambda data: b"the code of the red house is seven" * 9),
        "not a safetensors file, but a text.* name a cache file, or make one of a text with",
    ),
    "pickle as a cache": (
        cache(lambda data: pickle.dumps({"keys": [1.0] * 50})),
        "not a safetensors file",
    ),
    "safetensors of somebody else": (
        lambda world, tmp: ["ask", Path(world.adapter) / WEIGHTS, QUESTION, "--model", world.model],
        "not a restorekv cache",
    ),
    "missing cache": (
        lambda world, tmp: ["ask", tmp / "nowhere", QUESTION, "--model", world.model],
        "does not exist",
    ),
    "folder as a cache": (
        lambda world, tmp: ["ask", tmp, QUESTION, "--model", world.model],
        "is a folder, not a regular file",
    ),
    "second cache of another ending": (
        lambda world, tmp: ["ask", world.cache, world.cache, QUESTION, "--model", world.model],
        "is a file here; cache files come first and end in .rkv",
    ),
    "folder as a second cache": (
        lambda world, tmp: ["ask", world.cache, tmp, QUESTION, "--model", world.model],
        "is a folder here; cache files come first and end in .rkv",
    ),
    "cache after a question": (
        lambda world, tmp: ["ask", world.cache, QUESTION, world.cache, "--model", world.model],
        "is a file here; cache files come first",
    ),
    # asking and looking
    "cache of another model": (ask(model="other"), "a different model"),
    "cache of another RoPE": (ask(model="turned"), "RoPE"),
    "cache of another shape": (ask(model="wide"), "a different model"),
    "cache of another dtype": (ask("--dtype", "bfloat16"), "float32"),
    "empty question": (ask(questions=("",)), "question is empty"),
    "one of two questions empty": (ask(questions=(QUESTION, " ")), "question is empty"),
    "answers into a missing folder": (ask("--json", "/no/such/folder/f.json"), "does not exist"),
    "look at a truncated cache": (cache(lambda data: data[:-9], "inspect"), "cut short"),
    "look at a missing cache": (lambda world, tmp: ["inspect", tmp / "nowhere"], "does not exist"),
    "picture of no known kind": (inspect("--plot", "{}/plot.xyz"), r"must end in \.png"),
    "picture into a missing folder": (inspect("--plot", "{}/no/plot.png"), "does not exist"),
    "tokenizer of no model": (inspect("--model", "{}"), "Cannot load the model"),
    "stdin twice": (ask(questions=("-", "-")), "is read once; give - for its questions once"),
    "an adapter that restores nothing": (
        lambda world, tmp: [
            *("append", world.cache, world.text, "-o", tmp / "b.rkv", "--model", world.model),
            *("--restore", "none", "--adapter", world.adapter),
        ],
        "--restore none restores nothing; leave out --restore or --adapter",
    ),
    # training
    "missing data": (train("--data", "/no/such/data.jsonl"), "no training file"),
    "data no JSON": (train(data=b'{"context": \n'), "line 1"),
    "data not UTF-8": (train(data=b"\xff\xfe\xff"), "not UTF-8"),
    "data without questions": (train(data=b'{"context": "a b"}\n'), "questions"),
    "data with a question for a list": (
        train(data=b'{"context": "a b", "questions": "who?"}\n'),
        "questions",
    ),
    "data with an answer too few": (
        train(data=b'{"context": "a b", "questions": ["a?", "b?"], "answers": ["a"]}\n'),
        "answers",
    ),
    "data with an empty context": (train(data=b'{"context": "", "questions": ["a?"]}\n'), "line 1"),
    "empty data": (train(data=b"\n\n"), "no examples"),
    "options of the tiny world for other data": (
        train("--longest", 500),
        "--longest is for --data tiny; leave it out",
    ),
    "ratio_min above ratio_max": (
        train("--ratio-min", 0.5, "--ratio-max", 0.2),
        "ratio_min <= ratio_max",
    ),
    "training ratio 0": (train("--ratio-min", 0), "0.000001 <= ratio_min"),
    "training ratio 1.5": (train("--ratio-max", 1.5), "ratio_max <= 1"),
    "training ratio NaN": (train("--ratio-min", "nan"), "0.000001 <= ratio_min"),
    "no steps": (train("--steps", 0), "steps must be at least 1"),
    "no restore tokens": (train("--restore-tokens", 0), "restore_tokens must be at least 1"),
    "no rank": (train("--rank", 0), "rank must be at least 1"),
    "learning rate NaN": (train("--lr", "nan"), "lr must be at least 0"),
    "unknown LoRA target": (train("--targets", "z_proj"), "LoRA does not fit"),
    "training an unknown evictor": (train("--evictor", "h3o"), "no evictor"),
    "training with an unknown policy": (train("--prefix-policy", "maybe"), "free, counted"),
    "run into a file": (in_folder(lambda tmp: (tmp / "run").write_text("x"), train()), "is a file"),
    "run over an old run": (old_run(), "already holds a run"),
    "resume with other settings": (old_run("--resume", "--lr", 0.5), "lr is 0.5, was 0.0002"),
    # evaluating
    "evaluation at ratio 7": (evaluate("--ratio", 7), RATIO),
    "evaluation of an unknown evictor": (evaluate("--evictor", "h3o"), "no evictor 'h3o'"),
    "evaluation with a missing adapter": (
        evaluate("--evictor", "kvzip@/no/such/adapter"),
        "no adapter folder",
    ),
    "evaluation on training documents": (
        evaluate("--benchmark", "tiny:split=restore 0"),
        "for training",
    ),
    "evaluation of the restore pass without adapters": (
        evaluate("--evictor", "kvzip@none", "--restore-from", "evicted"),
        "--restore-from is for adapters, and no --evictor has one",
    ),
    "evaluation into a file": (
        in_folder(lambda tmp: (tmp / "run").write_text("x"), evaluate()),
        "is a file; name a folder with --out",
    ),
    "evaluation into a missing folder": (
        evaluate("--json", "/no/such/folder/f.json"),
        "does not exist",
    ),
    "demo into a missing folder": (
        lambda world, tmp: ["demo", "--json", tmp / "no" / "f.json"],
        "does not exist",
    ),
}


NO_NAME = "the name is empty; name a file or folder, or . for this one"


USAGE: dict[str, tuple[Build, str]] = {
    # As of a variable that the shell does not know.
    "a text without a name": (
        lambda world, tmp: ["compress", "", "--model", world.model, "-o", tmp / "out"],
        NO_NAME,
    ),
    "an output without a name": (compress(None, None, "doc.rkv", "-o", ""), NO_NAME),
    "a run without a name": (train("--out", ""), NO_NAME),
    "results without a name": (evaluate("--out", ""), NO_NAME),
    "a store without a name": (lambda world, tmp: ["serve", "--store", ""], NO_NAME),
    "a cache on stdout": (flags("-o", "-"), "not written to stdout; name a file or folder"),
    "unknown command": (lambda world, tmp: ["squeeze"], "No such command 'squeeze'"),
    "a near miss of a command": (
        lambda world, tmp: ["compres"],
        r"\(did you mean 'compress'.*\?\)",
    ),
    "a near miss of a command of a group": (
        lambda world, tmp: ["data", "biuld"],
        r"\(did you mean 'build'\?\)",
    ),
    "unknown flag": (flags("--rato", 0.1), r"--rato \(did you mean --ratio\?\)"),
    "the start of a flag": (ask("--temp", 1), r"--temp \(did you mean --temperature\?\)"),
    "a flag unlike any": (ask("--ratio", 0.1), "No such option: --ratio;"),
    "max-new-tokens 0": (ask("--max-new-tokens", 0), "greater than or equal to 1"),
    "no output named": (lambda world, tmp: ["compress", world.text], "output"),
    "no question": (ask(questions=()), "question"),
    "words for a number": (flags("--tokens-per-head", "many"), "valid integer"),
    "no run folder": (lambda world, tmp: ["train"], "--out"),
    "no tiny contexts": (train("--count", 0), "count"),
}
