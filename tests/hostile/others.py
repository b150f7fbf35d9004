"""The campaign against all files besides caches: `python -m tests.hostile.others --count 3000 --seed 0 [--case N]`.

Conversations, portable caches, GGUF files, adapters, gates, checkpoints, the training store, features, built data and
evaluation grids. Every case is a folder of which one file was harmed; a forked process reads it. A signal, a hang, an
exception that is no sentence, wrong contents that were accepted, or a file elsewhere that was changed through a link,
is a failure and is printed with its number.
"""

import argparse
import gc
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import safetensors.torch
import torch

from restorekv import RestoreKVError
from restorekv.files import HOST
from tests.hostile.damage import DTYPES, ODD
from tests.hostile.judge import Judge, bound_memory
from tests.hostile.kinds import KINDS, Kind, some_file

GROUPS = {"raw": 3, "contradicting": 5, "plausible": 1, "neutral": 1}  # and their shares
SPARE = 1 << 30  # bytes of address space beyond what is in use
BAD_JSON = ("", "[]", "null", "7", '"x"', "{", "[" * 100_000, '{"a":' * 5000 + "1" + "}" * 5000, "NaN", '{"a": 1e999}')
FREE = {  # what only informs people, or chooses layers, which are those that have tensors
    "settings", "data", "results", "figures", "weights", "versions", "threads", "from", "dropped", "refused",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "base_model_name_or_path", "revision",
    "task_type", "inference_mode", "license", "source", "between", "local",
}  # fmt: skip
CASE, VICTIM = "case", "victim"  # the folder of a case, and a file next to it
HUGE = (3e38, -3e38, 1e30, 65_537.0)
LONG = (5_000, 300_000, 3 << 20)
Way = Callable[[random.Random, Path], str | None]  # the group may turn out to be another


def flip(rng: random.Random, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 16)) if raw else 0):
        raw[rng.choice((rng.randrange(len(raw)), rng.randrange(min(len(raw), 400))))] ^= 1 << rng.randrange(8)
    path.write_bytes(raw)


def cut(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.choice((0, 1, 7, 8, 9, rng.randrange(max(path.stat().st_size, 1)))))


def lengthen(rng: random.Random, path: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.choice((1, 8, 4096))))


def erase(rng: random.Random, path: Path) -> None:
    raw = path.read_bytes()
    start = rng.randrange(max(len(raw), 1))
    end = min(len(raw), start + rng.choice((8, 512)))
    path.write_bytes(raw[:start] + bytes(end - start) + raw[end:])


def header_length(rng: random.Random, path: Path) -> None:
    raw = path.read_bytes()
    length = rng.choice((0, 1, 2, 2**31, 2**63 - 1, 2**64 - 1, len(raw), max(len(raw) - 8, 0), 10**8))
    path.write_bytes(struct.pack("<Q", length) + raw[8:])


def sparse(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.choice((10 << 30, 3 << 30)))


def no_regular_file(rng: random.Random, path: Path) -> None:
    path.unlink()
    kind = rng.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to("/dev/zero")
    elif kind == 3:
        path.symlink_to(path)
    else:
        path.symlink_to("/proc/kmsg")


def linked(rng: random.Random, path: Path) -> None:
    """The file is a link to one elsewhere, which nobody may change through it; `run` compares that afterwards."""
    victim = path.parents[len(path.parts) - 1 - path.parts.index(CASE)] / VICTIM
    shutil.copy(path, victim)
    path.unlink()
    path.symlink_to(victim)


def foreign_lock(rng: random.Random, path: Path) -> None:
    """Beside the file are links with names that the package uses itself, to a file elsewhere."""
    victim = path.parents[len(path.parts) - 1 - path.parts.index(CASE)] / VICTIM
    victim.write_text("precious")
    for name in (".lock", f".{path.name}.lock", f".{path.name}.{HOST}-999999999-0.tmp", ".build.json.lock"):
        if not os.path.lexists(path.parent / name):
            (path.parent / name).symlink_to(victim)


def pickled(rng: random.Random, path: Path) -> None:
    path.write_bytes(b"cos\nsystem\n(S'touch /tmp/restorekv-was-here'\ntR.")


def places(value: object) -> list[tuple]:
    """Every container and key in a JSON value, with the keys that lead there."""
    found, level = [], [(value, ())]
    while level:
        each, chain = level.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each)) if isinstance(each, list) else ()
        for key in keys:
            found.append((each, key, (*chain, key)))
            level.append((each[key], (*chain, key)))
    return found


def harmed_json(rng: random.Random, text: str) -> tuple[str, str]:
    """A field gets a value of another kind, goes, or another number; or the whole is no such JSON. Also the group.

    What only informs people may be anything, older files lack fields, and another number may be a true one.
    """
    value = json.loads(text)
    if rng.random() < 0.2 or not (found := places(value)):
        whole = [text[:-2], text + "x", text[:-2] + ', "model": 5}', text.replace('": "', '": "\\ud800', 1)]
        whole += [text.replace('": ', '": ' + "9" * 6000, 1), text.replace(": ", ": -", 1)]
        whole += ["[" + "[]," * 1_300_000 + "0]", '{"a": [' + "0," * 1_300_000 + "0]}", '"' + '\\"' * 1_000_000]
        return rng.choice([*BAD_JSON, *whole]), "contradicting"
    within, key, chain = rng.choice(found)
    group = "plausible" if FREE & set(chain) else "contradicting"
    kind = rng.randrange(7)
    if kind == 5 and isinstance(within[key], str):
        within[key] = rng.choice(("x", "x ", "\n")) * rng.choice(LONG)
        group = "plausible"
    elif kind == 6 and isinstance(within[key], list) and within[key]:
        within[key] = within[key][:1] * rng.choice((100, 200_000, 1_100_000))
        group = "plausible"
    elif kind == 0 and isinstance(within, dict):
        del within[key]
        group = "plausible" if len(chain) == 1 else group
    elif kind == 1 and type(within[key]) in (int, float):
        within[key] += rng.choice((-1, 1, 1000, -(10**9), 2**40))
        group = "plausible"
    else:
        odd = rng.choice([odd for odd in ODD if type(odd) is not type(within[key])])
        group = "plausible" if {type(odd), type(within[key])} <= {int, float} else group
        within[key] = odd
    return json.dumps(value), group


def contradicting_json(rng: random.Random, path: Path) -> str:
    text, group = harmed_json(rng, path.read_text())
    path.write_text(text, errors="surrogatepass")
    return group


def contradicting_lines(rng: random.Random, path: Path) -> str:
    group = "contradicting"
    lines = path.read_text().splitlines()
    index = rng.randrange(len(lines))
    if path.suffix == ".csv":
        lines[index] = rng.choice(("", "a,b,c,d", "nan,nan,nan,nan", "9" * 6000, "\x00"))
    else:
        lines[index], group = harmed_json(rng, lines[index])
    path.write_text("".join(f"{line}\n" for line in lines), errors="surrogatepass")
    return group


def opened(path: Path) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return header.get("__metadata__", {}), safetensors.torch.load(raw)


def save(path: Path, metadata: dict, tensors: dict) -> None:
    path.write_bytes(safetensors.torch.save({name: x.contiguous() for name, x in tensors.items()}, metadata))


def contradicting_tensors(rng: random.Random, path: Path) -> str:
    group = "contradicting"
    metadata, tensors = opened(path)
    name = rng.choice(sorted(tensors))
    value, kind = tensors[name], rng.randrange(10)
    if kind == 0 and value.is_floating_point():
        value = value.clone()
        value.view(-1)[rng.randrange(value.numel())] = rng.choice((float("nan"), float("inf"), float("-inf")))
    elif kind == 1:
        value = value.to(rng.choice([dtype for dtype in DTYPES if dtype != value.dtype]))
        group = "plausible" if value.is_floating_point() else group  # gates of other precisions are read
    elif kind == 2:
        value = rng.choice((value[None], value[..., None], torch.cat([value.reshape(-1)] * 2)))
    elif kind == 3:
        value = value.reshape(-1)[: rng.choice((0, value.numel() // 2))].clone()
    elif kind == 4:
        name = rng.choice(
            ("extra", "layers.999999999.weight", "layers.-1.bias", "../x", "optimizer.77.step", name + ".x")
        )
        value = torch.ones(rng.choice((0, 1, 7)))
    elif kind == 5:
        del tensors[name]
    elif kind == 6 and not value.is_floating_point():
        value = value.clone()
        value.view(-1)[rng.randrange(value.numel())] = rng.choice((-1, 2**31 - 1, 10**6))
    elif kind == 9 and value.is_floating_point() and value.numel():
        value = value.clone()
        value.view(-1)[rng.randrange(value.numel())] = rng.choice(HUGE)
        group = "plausible"  # what belongs to a training may have them
    elif kind == 7 and metadata:
        key = rng.choice(sorted(metadata))
        if metadata[key][:1] == "{":
            metadata[key], group = harmed_json(rng, metadata[key])
        else:
            metadata[key] = rng.choice(("", "x", "99", "-1", "9" * 6000))
        metadata[key] = metadata[key].encode(errors="replace").decode()
    else:
        odd_header(rng, path)
        return group
    if kind != 5:
        tensors[name] = value
    save(path, metadata, tensors)
    return group


def odd_header(rng: random.Random, path: Path) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    name = rng.choice([name for name in sorted(header) if name != "__metadata__"])
    kind = rng.randrange(5)
    if kind == 0:
        header[name]["data_offsets"] = rng.choice(([0, 0], [0, 2**40], [-8, 8], [8, 0], "x", None))
    elif kind == 1:
        header[name]["shape"] = rng.choice(([-1], [2**62, 4], ["x"], None, [1.5]))
    elif kind == 2:
        header[name]["dtype"] = rng.choice(("F4", "U64", "C64", "F8_E5M2", "", None, 7))
    elif kind == 3:
        header[name] = rng.choice((None, [], 7, {}))
    else:
        header["__metadata__"] = rng.choice((None, [], "x", {"format": 7}))
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def contradicting_rows(rng: random.Random, path: Path) -> None:
    table = parquet.read_table(path)
    rows, name = table.to_pylist(), rng.choice(table.column_names)
    kind, row = rng.randrange(4), rng.randrange(len(table))
    if kind == 0:
        rows = [{key: value for key, value in each.items() if key != name} for each in rows]
    elif kind == 1:
        rows = rows[1:] if rng.random() < 0.5 else rows + rows[:1]
    elif kind == 2:
        rows = [{**each, name: rng.choice(("x", 7, None, -1.5, [], [[]], {"a": 1}))} for each in rows[:1]]
    else:
        rows[row][name] = rng.choice((None, *{str: ("",), int: (-1, 0, 2**31 - 1)}.get(type(rows[row][name]), ([-1],))))
    parquet.write_table(arrow.Table.from_pylist(rows), path)


def lying_header(rng: random.Random, path: Path) -> None:
    """A number of the header of a GGUF file: counts, lengths, dimensions, types, offsets."""
    raw = bytearray(path.read_bytes())
    size = rng.choice((4, 8))
    place = rng.choice((8, 16, rng.randrange(4, min(len(raw) - 8, 2_500)), rng.randrange(4, min(len(raw) - 8, 30_000))))
    number = rng.choice((0, 1, 9, 2**18, 2**30, 2**32 - 1, 2**40, 2**62, 2**64 - 1))
    raw[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    path.write_bytes(raw)


def plausible(rng: random.Random, path: Path) -> None:
    """Another number or text of the same kind."""
    if path.suffix == ".safetensors":
        metadata, tensors = opened(path)
        value = tensors[rng.choice(sorted(tensors))]
        value.view(-1)[rng.randrange(value.numel())] += 1
        save(path, metadata, tensors)
    elif path.suffix == ".json":
        value = json.loads(path.read_text())
        texts = [(within, key) for within, key, _ in places(value) if isinstance(within[key], str)]
        within, key = rng.choice(texts or [({"": ""}, "")])
        within[key] += rng.choice((" ", "x", "\n", "\x1b[2J", "Ω"))
        path.write_text(json.dumps(value))


def neutral(rng: random.Random, path: Path) -> None:
    """The same contents in another layout."""
    if path.suffix == ".safetensors":
        save(path, *opened(path))
    elif path.suffix == ".json":
        value = json.loads(path.read_text())
        names = list(value)
        rng.shuffle(names)
        path.write_text(json.dumps({name: value[name] for name in names}, indent=rng.choice((None, 0, 3))))


RAW: tuple[Way, ...] = (
    flip, cut, lengthen, erase, header_length, sparse, no_regular_file, pickled, linked, foreign_lock,
)  # fmt: skip
BY_ENDING: dict[str, Way] = {
    ".safetensors": contradicting_tensors, ".json": contradicting_json, ".jsonl": contradicting_lines,
    ".csv": contradicting_lines, ".parquet": contradicting_rows, ".gguf": lying_header,
}  # fmt: skip


def harm(rng: random.Random, kind: Kind, folder: Path) -> tuple[str, str, Path]:
    """Harms one file of the folder; returns the group, the way and the file."""
    path = some_file(rng, folder)
    group = rng.choices(list(GROUPS), list(GROUPS.values()))[0]
    ways = {"raw": rng.choice(RAW), "plausible": plausible, "neutral": neutral}
    way = BY_ENDING.get(path.suffix, flip) if group == "contradicting" else ways[group]
    group = way(rng, path) or group
    if group != "raw":
        kind.seal(folder)
    return group, way.__name__, path


def allowed(group: str, kind: Kind, path: Path) -> set[str]:
    """What may become of a case: what no checksum covers may say something else afterwards, but never nonsense."""
    loose = {"different"} if path.name in kind.loose or group == "plausible" else set()
    return {"equal"} if group == "neutral" else {"refused", "equal"} | loose


def judge(kind: Kind, folder: Path, good: str) -> str:
    try:
        return "equal" if kind.read(folder) == good else "different"
    except RestoreKVError as error:
        message = str(error)
        sentence = message.strip() and message.isprintable() and len(message) < 2000
        return "refused" if sentence else f"not a sentence: {message[:200]!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    finally:
        gc.collect()


def serve(connection, good: dict[str, str]) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    gc.freeze()  # so that collecting after every case is quick
    bound_memory(SPARE)
    while message := connection.recv():
        name, folder = message
        connection.send(judge(KINDS[name], folder, good[name]))


def run(count: int, seed: int, only: int | None = None) -> tuple[Counter, list[str]]:
    """Counts by kind, group and verdict, and the failures."""
    counts, failures = Counter(), []
    with tempfile.TemporaryDirectory(prefix="restorekv-hostile-") as name:
        place, case = Path(name), Path(name) / CASE
        for kind, each in KINDS.items():
            (place / kind).mkdir()
            each.make(place / kind)
        good = {kind: each.read(place / kind) for kind, each in KINDS.items()}
        reader = Judge("fork", serve, good)
        for number in range(count) if only is None else (only,):
            rng = random.Random(f"{seed}/{number}")
            kind = rng.choice(sorted(KINDS))
            shutil.copytree(place / kind, case)
            group, way, path = harm(rng, KINDS[kind], case)
            victim = place / VICTIM
            before = victim.read_bytes() if victim.exists() else b""
            try:
                verdict = reader(kind, case)
            except KeyboardInterrupt:  # what was counted so far is told
                print(f"interrupted before case {number}", flush=True)
                break
            if victim.exists() and victim.read_bytes() != before:
                verdict = "a file was changed through a link"
            victim.unlink(missing_ok=True)
            known = verdict in ("refused", "equal", "different")
            counts[kind, group, verdict if known else "FAILED"] += 1
            if verdict not in allowed(group, KINDS[kind], path):
                failures.append(f"case {number} ({kind}, {path.name}, {group}, {way}): {verdict}")
                print(failures[-1], flush=True)
            shutil.rmtree(case)
            if number % 500 == 499:
                print(f"{number + 1} of {count}, {len(failures)} failures", flush=True)
        reader.end()
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="one case by its number")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background would ignore
    counts, failures = run(options.count, options.seed, options.case)
    for (kind, group, verdict), number in sorted(counts.items()):
        print(f"{kind:11} {group:14} {verdict:10} {number}")
    sys.exit(f"{len(failures)} failures" if failures else 0)


if __name__ == "__main__":
    main()
