"""The campaign against all kinds of files: `python -m tests.hostile.others --count 3000 --seed 0
[--case N]`.

The kinds are conversations, caches, portable caches, GGUF files, folders of models, adapters,
gates, checkpoints, the training store, features, built data, evaluation grids and stores of
servers. Every case is a folder in which one file was damaged, or to which something was added. A
forked process reads it, and would answer "yes" to every question. These are failures, which are
printed with their numbers: a signal, a hang, an exception other than a sentence for the user, wrong
contents that were accepted, a file elsewhere that was changed or removed, or an attacker's code
that ran (it leaves a file).
"""

import gc
import io
import json
import os
import pickle
import random
import shutil
import sqlite3
import stat
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
from tests.hostile.campaign import finish, read_options
from tests.hostile.damage import DTYPES, ODD, RAN
from tests.hostile.judge import Judge, bound_memory
from tests.hostile.kinds import KINDS, Kind, some_file

GROUPS = {"raw": 3, "contradicting": 5, "plausible": 1, "neutral": 1}  # and their shares
SPARE = 1 << 30  # bytes of address space beyond what is in use
BAD_JSON = (
    "",
    "[]",
    "null",
    "7",
    '"x"',
    "{",
    "[" * 100_000,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "NaN",
    '{"a": 1e999}',
)
FREE = {  # what only informs people, or chooses layers, which are those that have tensors
    "settings",
    "data",
    "results",
    "figures",
    "weights",
    "versions",
    "threads",
    "from",
    "dropped",
    "refused",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "base_model_name_or_path",
    "revision",
    "task_type",
    "inference_mode",
    "license",
    "source",
    "separator",
    "local",
}
CASE, VICTIM = "case", "victim"  # the folder of a case, and a file next to it
HUGE = (3e38, -3e38, 1e30, 65_537.0)
LONG = (5_000, 300_000, 3 << 20)
Way = Callable[[random.Random, Path], str | None]  # the group may turn out to be another


def flip(rng: random.Random, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 16)) if raw else 0):
        raw[rng.choice((rng.randrange(len(raw)), rng.randrange(min(len(raw), 400))))] ^= (
            1 << rng.randrange(8)
        )
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
    length = rng.choice(
        (0, 1, 2, 2**31, 2**63 - 1, 2**64 - 1, len(raw), max(len(raw) - 8, 0), 10**8)
    )
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


def victim_of(path: Path) -> Path:
    """Return a path next to the case's folder that no reader may change; `run` checks that."""
    return place_of(path) / VICTIM


def place_of(path: Path) -> Path:
    """Return the folder of the campaign for a path in the case's folder."""
    return path.parents[len(path.parts) - 1 - path.parts.index(CASE)]


def linked(rng: random.Random, path: Path) -> None:
    """Replace the file by a link to one elsewhere, either a copy of it or other text."""
    victim = victim_of(path)
    if rng.random() < 0.5:
        shutil.copy(path, victim)
    else:
        victim.write_text("precious")
    path.unlink()
    path.symlink_to(victim)


def linked_folder(rng: random.Random, path: Path) -> None:
    """Replace the file's folder by a link to one elsewhere, or the file if its folder is
    the case's.
    """
    if path.parent.name == CASE:
        return linked(rng, path)
    victim = victim_of(path)
    path.parent.rename(victim)
    path.parent.symlink_to(victim)


def foreign_lock(rng: random.Random, path: Path) -> None:
    """Put links to a file elsewhere next to the file, with names that the package itself uses."""
    victim = victim_of(path)
    victim.write_text("precious")
    for name in (
        ".lock",
        f".{path.name}.lock",
        f".{path.name}.{HOST}-999999999-0.tmp",
        ".build.json.lock",
    ):
        if not os.path.lexists(path.parent / name):
            (path.parent / name).symlink_to(victim)


# Names at which libraries look for a file, whether there is one or not.
EXPECTED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/a.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
    "processor_config.json",
    "preprocessor_config.json",
    "custom_generate/generate.py",
    "README.md",
    "loss.csv",
    ".replacing",
    "index.sqlite-wal",
    "index.sqlite-journal",
    "damaged",
    ".index.sqlite.lock",
)


def special_beside(rng: random.Random, path: Path) -> None:
    """Put a FIFO, a device, a cycle of links, a huge file or a link to a file elsewhere where a
    reader may expect a file.
    """
    place = path.parent / rng.choice(EXPECTED)
    place.parent.mkdir(exist_ok=True)
    if place.exists() and not place.is_dir():
        return no_regular_file(rng, place)
    if place.is_dir():
        return None
    place.touch()
    (no_regular_file, no_regular_file, linked, sparse)[rng.randrange(4)](rng, place)
    return None


def payload(path: Path) -> str:
    """Return Python code that leaves a file where `run` finds it."""
    return f"open({str(place_of(path) / RAN)!r}, 'w')"


class Payload:
    """An object that runs code when it is unpickled."""

    def __init__(self, code: str) -> None:
        self.code = code

    def __reduce__(self) -> tuple:
        return exec, (self.code,)


def pickle_of(rng: random.Random, path: Path) -> bytes:
    """Return a pickle that runs code, plain or as `torch.save` writes it."""
    harmful = Payload(payload(path))
    if rng.random() < 0.5:
        return pickle.dumps(harmful)
    stream = io.BytesIO()
    torch.save({"a": torch.ones(1), "b": harmful}, stream)
    return stream.getvalue()


PICKLES = (
    "pytorch_model.bin",
    "adapter_model.bin",
    "model.pt",
    "weights.ckpt",
    "model.bin",
    "training_args.bin",
)


def pickles_only(rng: random.Random, path: Path) -> str | None:
    """Replace the weights by pickles that run code, with or without an index that names them."""
    name = rng.choice(PICKLES)
    found = list(path.parent.glob("*.safetensors"))
    index = path.parent / "model.safetensors.index.json"
    for each in found:
        each.unlink()
    (path.parent / name).write_bytes(pickle_of(rng, path))
    if rng.random() < 0.4:
        names = {"a": name}
        if index.exists():
            names = dict.fromkeys(json.loads(index.read_text())["weight_map"], name)
        index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    elif rng.random() < 0.5:
        index.unlink(missing_ok=True)
    # Without a checkpoint, a run has not begun.
    return "plausible" if (path.parent / "loss.csv").exists() else None


def pickled(rng: random.Random, path: Path) -> None:
    path.write_bytes(pickle_of(rng, path))


def code_beside(rng: random.Random, path: Path) -> None:
    """Put code into the folder, and name it in configs in every way that transformers knows."""
    code = f"{payload(path)}\n\n\nclass Evil:\n    pass\n"
    for name in (
        "evil.py",
        "tokenizer.py",
        "modeling_evil.py",
        "__init__.py",
        "custom_generate/generate.py",
    ):
        (path.parent / name).parent.mkdir(exist_ok=True)
        (path.parent / name).write_text(code)
    classes = ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer", "AutoProcessor")
    own = {
        name: rng.choice(("evil.Evil", "someone/evil--evil.Evil", ["evil.Evil", None]))
        for name in classes
    }
    more = (
        {"auto_map": own},
        {"auto_map": own, "model_type": "evil"},
        {"auto_map": own, "tokenizer_class": "Evil"},
        {"auto_map": own, "architectures": ["Evil"]},
        {"tokenizer_class": "evil.Evil"},
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": "someone/kernel:evil"},
        {"custom_pipelines": {"a": {"impl": "evil.Evil", "pt": ["AutoModel"]}}},
        {"megatron_core": "evil"},
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}},
        {"custom_generate": "."},
        {"quantization_config": {"quant_method": "evil"}},
    )
    for name in (
        "config.json",
        "tokenizer_config.json",
        "generation_config.json",
        "adapter_config.json",
    ):
        config = path.parent / name
        if name != "adapter_config.json" or config.exists():
            found = json.loads(config.read_text()) if config.exists() else {}
            config.write_text(json.dumps({**found, **rng.choice(more)}))


def other_names(rng: random.Random, path: Path) -> None:
    """Name files elsewhere in indexes and configs of a model's folder."""
    victim = victim_of(path)
    victim.mkdir()
    for name in ("model-00001-of-00002.safetensors", "tokenizer.5.0.json", "x.bin"):
        kind = rng.randrange(3)
        if kind == 0:
            os.mkfifo(victim / name)
        elif kind == 1:
            (victim / name).write_bytes(pickle_of(rng, path))
        else:
            shutil.copy(path, victim / name)
    place = rng.choice((f"../{VICTIM}", str(victim), f"sub/../../{VICTIM}", "/dev"))
    index = path.parent / "model.safetensors.index.json"
    if index.exists() and rng.random() < 0.5:
        entries = json.loads(index.read_text())
        name = rng.choice(("model-00001-of-00002.safetensors", "x.bin", "zero"))
        for weight in list(entries["weight_map"]):
            if rng.random() < 0.5:
                entries["weight_map"][weight] = rng.choice(
                    (f"{place}/{name}", None, 7, "", ".", "a\0b")
                )
        index.write_text(json.dumps(entries))
        return
    config = path.parent / "tokenizer_config.json"
    entries = json.loads(config.read_text()) if config.exists() else {}
    file = f"{place}/tokenizer.5.0.json"
    key = rng.choice(
        (
            "fast_tokenizer_files",
            "vocab_file",
            "tokenizer_file",
            "merges_file",
            "chat_template_file",
        )
    )
    entries[key] = [file] if key == "fast_tokenizer_files" else file
    config.write_text(json.dumps(entries))


def places(value: object) -> list[tuple]:
    """Return every container and key in a JSON value, with the chain of keys that leads there."""
    found, level = [], [(value, ())]
    while level:
        each, chain = level.pop()
        keys = (
            list(each)
            if isinstance(each, dict)
            else range(len(each))
            if isinstance(each, list)
            else ()
        )
        for key in keys:
            found.append((each, key, (*chain, key)))
            level.append((each[key], (*chain, key)))
    return found


def harmed_json(rng: random.Random, text: str) -> tuple[str, str]:
    """Return damaged JSON and its group.

    A field gets a value of another kind, is removed or gets another number, or the whole is not
    valid. The group says what readers may do: fields that only inform people may be anything, older
    files lack some fields, and another number may be a valid one.
    """
    value = json.loads(text)
    if rng.random() < 0.2 or not (found := places(value)):
        whole = [
            text[:-2],
            text + "x",
            text[:-2] + ', "model": 5}',
            text.replace('": "', '": "\\ud800', 1),
        ]
        whole += [text.replace('": ', '": ' + "9" * 6000, 1), text.replace(": ", ": -", 1)]
        whole += [
            "[" + "[]," * 1_300_000 + "0]",
            '{"a": [' + "0," * 1_300_000 + "0]}",
            '"' + '\\"' * 1_000_000,
        ]
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
    if path.suffix == ".jsonl" and lines[-1][-1:] != "}":  # a half line
        lines.pop()
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
    path.write_bytes(
        safetensors.torch.save({name: x.contiguous() for name, x in tensors.items()}, metadata)
    )


def contradicting_tensors(rng: random.Random, path: Path) -> str:
    group = "contradicting"
    metadata, tensors = opened(path)
    name = rng.choice(sorted(tensors))
    value, kind = tensors[name], rng.randrange(10)
    if kind == 0 and value.is_floating_point():
        value = value.clone()
        value.view(-1)[rng.randrange(value.numel())] = rng.choice(
            (float("nan"), float("inf"), float("-inf"))
        )
    elif kind == 1:
        value = value.to(rng.choice([dtype for dtype in DTYPES if dtype != value.dtype]))
        # Gates of other precisions are read.
        group = "plausible" if value.is_floating_point() else group
    elif kind == 2:
        value = rng.choice((value[None], value[..., None], torch.cat([value.reshape(-1)] * 2)))
    elif kind == 3:
        value = value.reshape(-1)[: rng.choice((0, value.numel() // 2))].clone()
    elif kind == 4:
        name = rng.choice(
            (
                "extra",
                "layers.999999999.weight",
                "layers.-1.bias",
                "../x",
                "optimizer.77.step",
                name + ".x",
            )
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
        rows = [
            {**each, name: rng.choice(("x", 7, None, -1.5, [], [[]], {"a": 1}))}
            for each in rows[:1]
        ]
    else:
        rows[row][name] = rng.choice(
            (None, *{str: ("",), int: (-1, 0, 2**31 - 1)}.get(type(rows[row][name]), ([-1],)))
        )
    parquet.write_table(arrow.Table.from_pylist(rows), path)


def counts_of(raw: bytes) -> dict[str, list[tuple[int, int]]]:
    """Return the places and sizes in bytes of the numbers in a good GGUF file's header, by what
    they are.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    at = 4

    def number(what: str, size: int) -> int:
        nonlocal at
        found.setdefault(what, []).append((at, size))
        at += size
        return int.from_bytes(raw[at - size : at], "little")

    def skip(count: int) -> None:
        nonlocal at
        at += count

    def value(kind: int) -> None:
        if kind == 8:
            skip(number("the length of a text", 8))
        elif kind == 9:
            inner = number("the type in an array", 4)
            for _ in range(number("the length of an array", 8)):
                value(inner)
        else:
            number("a number", sizes[kind])

    number("the version", 4)
    tensors = number("the number of tensors", 8)
    for _ in range(number("the number of fields", 8)):
        skip(number("the length of a key", 8))
        value(number("the type of a field", 4))
    for _ in range(tensors):
        skip(number("the length of a name", 8))
        for _ in range(number("the number of dimensions", 4)):
            number("a dimension", 8)
        number("the type of a tensor", 4)
        number("an offset", 8)
    return found


def lying_header(rng: random.Random, path: Path) -> None:
    """Change a number in the header of a GGUF file, sometimes two: counts, lengths, dimensions,
    types, offsets.
    """
    raw = bytearray(path.read_bytes())
    known = counts_of(raw)
    for _ in range(rng.choice((1, 1, 2))):
        place, size = rng.choice(known[rng.choice(sorted(known))])
        if rng.random() < 0.5:
            number = max(
                int.from_bytes(raw[place : place + size], "little") + rng.choice((-1, 1, 2, 100)), 0
            )
        else:
            number = rng.choice(
                (0, 1, 3, 8, 9, 4_097, 2**18, 2**20 + 1, 2**30, 2**32 - 1, 2**40, 2**62, 2**64 - 1)
            )
        raw[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    path.write_bytes(raw)


def long_texts(rng: random.Random, path: Path) -> None:
    """Add many or long texts, or long arrays, to a GGUF file; all of them are really there."""
    raw = path.read_bytes()
    count = int.from_bytes(raw[16:24], "little")
    key = rng.choice(
        (b"tokenizer.ggml.extra", b"general.tags", b"tokenizer.chat_template.x", b"extra")
    )
    field = struct.pack("<Q", len(key)) + key
    kind = rng.randrange(4)
    if kind == 0:
        text = b"x" * rng.choice((2_000, 1 << 16, 1 << 20))
        field += struct.pack("<IIQ", 9, 8, 4) + (struct.pack("<Q", len(text)) + text) * 4
    elif kind == 1:
        number = rng.choice((4_097, 1 << 17, (1 << 20) + 1))
        field += struct.pack("<IIQ", 9, 8, number) + (struct.pack("<Q", 1) + b"x") * number
    elif kind == 2:
        number = rng.choice((4_097, 1 << 18, (1 << 20) + 1))
        field += struct.pack("<IIQ", 9, rng.choice((0, 4, 7)), number) + bytes(4 * number)
    else:
        text = b"{%- for i in x -%}" * rng.choice((10, 10_000))
        field += struct.pack("<IQ", 8, len(text)) + text
    path.write_bytes(raw[:16] + struct.pack("<Q", count + 1) + field + raw[24:])


def long_token(rng: random.Random, path: Path) -> None:
    """Make a token of a GGUF file's vocabulary far longer than any real one; the file stays
    consistent.
    """
    raw = path.read_bytes()
    marker = b"tokenizer.ggml.tokens"
    at = raw.index(marker) + len(marker) + 4 + 4 + 8
    length = int.from_bytes(raw[at : at + 8], "little")
    text = b"x" * rng.choice((300, 5_000, 1 << 18, 1 << 20))
    path.write_bytes(raw[:at] + struct.pack("<Q", len(text)) + text + raw[at + 8 + length :])


def lying_gguf(rng: random.Random, path: Path) -> None:
    rng.choice((lying_header, lying_header, lying_header, lying_place, long_texts, long_token))(
        rng, path
    )


def lying_rows(rng: random.Random, path: Path) -> None:
    """Make rows of a server's index name files elsewhere or hold odd values, or add triggers, views
    or other tables.
    """
    victim = victim_of(path)
    victim.write_text("precious")
    shutil.copy(victim, victim.with_suffix(".rkv"))
    out = rng.choice((f"../../{VICTIM}", str(victim), f"../../{CASE}/../{VICTIM}", "..", ""))
    odd = rng.choice(
        (
            None,
            -1,
            2**62,
            1e300,
            "x",
            "x" * 100_000,
            b"\0\xff",
            "\x1b[2J",
            "file-" + "0" * 24,
            "0" * 32,
        )
    )
    now = rng.choice((None, 1, 2**62))
    upload = (out, "ab" * 32, "a.txt", "user_data", 1, 1, now, "processed", "")
    with sqlite3.connect(path) as disk:
        kind = rng.randrange(7)
        if kind == 0:
            disk.execute(f"insert into files values ({', '.join('?' * 9)})", upload)
        elif kind == 1:
            disk.execute(
                "insert into caches values (?, ?, ?, ?)",
                (out, "ab" * 32, rng.choice((1, 2**62)), 0.0),
            )
        elif kind == 2:
            disk.execute("insert into pending values (?, ?)", (rng.choice(("ab" * 32, out)), out))
        elif kind == 3:
            event = rng.choice(
                ("update on reserve", "insert on reserve", "delete on files", "delete on caches")
            )
            values = ", ".join("null" if each is None else f"'{each}'" for each in upload)
            disk.execute(
                f"create trigger t after {event} begin insert into files values ({values}); end"
            )
        elif kind == 4:
            table = rng.choice(("files", "caches", "pending", "reserve"))
            forever = (
                "with recursive a(x) as (select 1 union all select x + 1 from a) select x from a"
            )
            if rng.random() < 0.5:
                disk.execute(f"drop table {table}")
                disk.execute(f"create view {table} as {forever}")
            else:
                disk.execute(f"alter table {table} add column more text default 'x'")
        elif kind == 5:
            table, columns = rng.choice(sorted(COLUMNS.items()))
            # A row stays as it is where its column takes no such value, or another row has it.
            disk.execute(f"update or ignore {table} set {rng.choice(columns)} = ?", (odd,))
        else:
            disk.execute(f"pragma user_version = {rng.choice((0, 1, 3, 2**31 - 1, -1))}")
    disk.close()


def lying_store(rng: random.Random, path: Path) -> None:
    index = place_of(path) / CASE / "index.sqlite"
    if rng.random() < 0.8:
        lying_rows(rng, index)
    else:
        flip(rng, path)


COLUMNS = {
    "files": (
        "id",
        "sha256",
        "name",
        "purpose",
        "bytes",
        "created",
        "expires",
        "status",
        "problem",
    ),
    "caches": ("key", "sha256", "bytes", "used"),
}


def lying_folder(rng: random.Random, path: Path) -> None:
    """Damage a model's folder, but not its config's sizes, because readers trust those."""
    way = rng.choice((code_beside, pickles_only, other_names, special_beside))
    way(rng, path)


def lying_place(rng: random.Random, path: Path) -> None:
    """Write a random number at a random place of the header of a GGUF file."""
    raw = bytearray(path.read_bytes())
    size = rng.choice((4, 8))
    place = rng.choice(
        (
            8,
            16,
            rng.randrange(4, min(len(raw) - 8, 2_500)),
            rng.randrange(4, min(len(raw) - 8, 30_000)),
        )
    )
    number = rng.choice((0, 1, 9, 2**18, 2**30, 2**32 - 1, 2**40, 2**62, 2**64 - 1))
    raw[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, "little")
    path.write_bytes(raw)


def plausible(rng: random.Random, path: Path) -> None:
    """Replace a number or text by another one of the same kind."""
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
    """Write the same contents in another layout."""
    if path.suffix == ".safetensors":
        save(path, *opened(path))
    elif path.suffix == ".json":
        value = json.loads(path.read_text())
        names = list(value)
        rng.shuffle(names)
        path.write_text(
            json.dumps({name: value[name] for name in names}, indent=rng.choice((None, 0, 3)))
        )


RAW: tuple[Way, ...] = (
    flip,
    cut,
    lengthen,
    erase,
    header_length,
    sparse,
    no_regular_file,
    pickled,
    linked,
    foreign_lock,
    linked_folder,
    special_beside,
    pickles_only,
    code_beside,
)
BY_ENDING: dict[str, Way] = {
    ".safetensors": contradicting_tensors,
    ".json": contradicting_json,
    ".jsonl": contradicting_lines,
    ".csv": contradicting_lines,
    ".parquet": contradicting_rows,
    ".gguf": lying_gguf,
    ".rkv": contradicting_tensors,
    ".sqlite": lying_rows,
}
BY_KIND: dict[str, Way] = {"folder": lying_folder, "served": lying_store}


def harm(rng: random.Random, kind: Kind, folder: Path) -> tuple[str, str, Path]:
    """Damage one file of the folder; return the group, the way and the file."""
    path = some_file(rng, folder)
    group = rng.choices(list(GROUPS), list(GROUPS.values()))[0]
    ways = {"raw": rng.choice(RAW), "plausible": plausible, "neutral": neutral}
    name = next(name for name in KINDS if KINDS[name] is kind)
    way = (
        BY_KIND.get(name, BY_ENDING.get(path.suffix, flip))
        if group == "contradicting"
        else ways[group]
    )
    group = way(rng, path) or group
    if group != "raw":
        kind.seal(folder)
    return group, way.__name__, path


def allowed(group: str, kind: Kind, path: Path) -> set[str]:
    """Return the verdicts that a case may have.

    Files that no checksum covers may say something else afterwards, but never nonsense.
    """
    loose = {"different"} if {path.name, "*"} & set(kind.loose) or group == "plausible" else set()
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
    sys.stdin = io.StringIO("y\n" * 1_000_000)
    gc.freeze()  # so that collecting after every case is quick
    bound_memory(SPARE)
    while message := connection.recv():
        name, folder = message
        connection.send(judge(KINDS[name], folder, good[name]))


def tree(place: Path) -> dict[str, object]:
    """Return what is next to the case's folder: victims, and what an attacker's code may
    have left.
    """
    outside = beside(place)
    inside = [path for folder in outside if folder.is_dir() for path in folder.rglob("*")]
    return {
        str(path.relative_to(place)): path.read_bytes()
        if stat.S_ISREG(path.lstat().st_mode)
        else path.lstat().st_mode
        for path in [*outside, *inside]
    }


def read_copy(kind: Kind, folder: Path, case: Path) -> str:
    """Read a copy of a good folder, because some readers change what they read."""
    shutil.copytree(folder, case)
    try:
        return kind.read(case)
    finally:
        shutil.rmtree(case)


def beside(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.name not in {CASE, *KINDS}]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def run(count: int, seed: int, only: int | None = None) -> tuple[Counter, list[str]]:
    """Run the cases; return counts by kind, group and verdict, and the failures."""
    counts, failures = Counter(), []
    with tempfile.TemporaryDirectory(prefix="restorekv-hostile-") as name:
        place, case = Path(name), Path(name) / CASE
        for kind, each in KINDS.items():
            (place / kind).mkdir()
            each.make(place / kind)
        good = {kind: read_copy(each, place / kind, case) for kind, each in KINDS.items()}
        reader = Judge("fork", serve, good)
        for number in range(count) if only is None else (only,):
            rng = random.Random(f"{seed}/{number}")
            kind = rng.choice(sorted(KINDS))
            shutil.copytree(place / kind, case)
            group, way, harmed = harm(rng, KINDS[kind], case)
            before = tree(place)
            try:
                verdict = reader(kind, case)
            except KeyboardInterrupt:  # what was counted so far is told
                print(f"interrupted before case {number}", flush=True)
                break
            if tree(place) != before:
                verdict = "a file elsewhere was changed or made"
            for path in beside(place):
                remove(path)
            known = verdict in ("refused", "equal", "different")
            counts[kind, group, verdict if known else "FAILED"] += 1
            if verdict not in allowed(group, KINDS[kind], harmed):
                failures.append(f"case {number} ({kind}, {harmed.name}, {group}, {way}): {verdict}")
                print(failures[-1], flush=True)
            shutil.rmtree(case)
            if number % 500 == 499:
                print(f"{number + 1} of {count}, {len(failures)} failures", flush=True)
        reader.end()
    return counts, failures


def main() -> None:
    options = read_options(__doc__, 3000)
    finish(*run(options.count, options.seed, options.case))


if __name__ == "__main__":
    main()
