"""Ways to damage a sealed cache file: raw bytes, contents that contradict each other, plausible
lies, and harmless changes.

Every way takes a `File` and a random generator and returns the bytes of a damaged file. Except for
raw damage, the file then gets a valid checksum again, as an attacker who knows the format would do.
"""

import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

BLANK = "0" * 64
ODD = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1/0",
    [],
    [[]],
    {},
    {"a": 1},
)
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.bool,
)


@dataclass
class File:
    """A cache file taken apart."""

    metadata: dict[str, str]
    manifest: dict
    tensors: dict[str, Tensor]
    raw: bytes = field(default=b"", repr=False)

    @classmethod
    def of(cls, raw: bytes) -> "File":
        length = int.from_bytes(raw[:8], "little")
        metadata = json.loads(raw[8 : 8 + length])["__metadata__"]
        return cls(metadata, json.loads(metadata["manifest"]), safetensors.torch.load(raw), raw)

    def sealed(self, text: str | None = None) -> bytes:
        """Return the file with its checksum; `text` replaces the manifest's JSON."""
        metadata = {
            **self.metadata,
            "manifest": json.dumps(self.manifest) if text is None else text,
            "checksum": BLANK,
        }
        return seal(safetensors.torch.save(self.tensors, metadata))

    def some(self, rng: random.Random, part: str = "") -> str:
        """Return the name of a random tensor among those with `part` in their name."""
        return rng.choice(sorted(name for name in self.tensors if part in name))


def seal(blank: bytes) -> bytes:
    """Replace the zeros of a file's blank checksum by its checksum."""
    return blank.replace(BLANK.encode(), hashlib.sha256(blank).hexdigest().encode(), 1)


def flip(rng: random.Random, file: File) -> bytes:
    raw = bytearray(file.raw)
    for _ in range(rng.choice((1, 1, 2, 16))):
        raw[rng.choice((rng.randrange(len(raw)), rng.randrange(2000)))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def cut(rng: random.Random, file: File) -> bytes:
    return file.raw[: rng.choice((0, 1, 7, 8, 9, rng.randrange(len(file.raw))))]


def lengthen(rng: random.Random, file: File) -> bytes:
    return file.raw + rng.randbytes(rng.choice((1, 8, 4096)))


def erase(rng: random.Random, file: File) -> bytes:
    start = rng.randrange(len(file.raw))
    end = min(len(file.raw), start + rng.choice((8, 512, 4096)))
    return file.raw[:start] + bytes(end - start) + file.raw[end:]


def move(rng: random.Random, file: File) -> bytes:
    a, b = sorted(rng.sample(range(len(file.raw)), 2))
    return file.raw[b:] + file.raw[a:b] + file.raw[:a]


def header_length(rng: random.Random, file: File) -> bytes:
    length = rng.choice(
        (0, 1, 2, 2**31, 2**63 - 1, 2**64 - 1, len(file.raw), len(file.raw) - 8, 10**8)
    )
    return struct.pack("<Q", length) + file.raw[8:]


def fewer_rows(rng: random.Random, file: File) -> bytes:
    name = file.some(rng, rng.choice(("keys", "values", "positions")))
    rows = file.tensors[name]
    if not rows.numel():
        return odd_field(rng, file)
    file.tensors[name] = rows[: rng.choice((0, len(rows) // 2, len(rows) - 1))].clone()
    return file.sealed()


def odd_offsets(rng: random.Random, file: File) -> bytes:
    offsets = file.tensors["offsets"].clone()
    place = tuple(rng.randrange(size) for size in offsets.shape)
    offsets[place] = rng.choice(
        (-1, 2**31 - 1, -(2**31), int(offsets.max()) + 1, int(offsets[place]) + 1)
    )
    file.tensors["offsets"] = offsets
    return file.sealed()


def not_finite(rng: random.Random, file: File) -> bytes:
    name = file.some(rng, rng.choice(("keys", "values")))
    values = file.tensors[name].clone().float()
    if not values.numel():
        return odd_field(rng, file)
    values.view(-1)[rng.randrange(values.numel())] = rng.choice(
        (float("nan"), float("inf"), float("-inf"))
    )
    file.tensors[name] = (
        values.to(file.tensors[name].dtype) if file.tensors[name].is_floating_point() else values
    )
    return file.sealed()


def other_dtype(rng: random.Random, file: File) -> bytes:
    name = file.some(rng)
    kinds = [dtype for dtype in DTYPES if dtype != file.tensors[name].dtype]
    file.tensors[name] = file.tensors[name].to(rng.choice(kinds))
    return file.sealed()


def other_shape(rng: random.Random, file: File) -> bytes:
    name = file.some(rng)
    tensor = file.tensors[name]
    shapes = [
        tensor[None],
        tensor.reshape(-1),
        tensor[..., None],
        tensor.reshape(tensor.shape[::-1]),
    ]
    chosen = rng.choice([each for each in shapes if each.shape != tensor.shape] or [tensor[None]])
    file.tensors[name] = chosen.contiguous().clone()
    return file.sealed()


def odd_ids(rng: random.Random, file: File) -> bytes:
    name = rng.choice(("context_ids", "suffix_ids"))
    ids = file.tensors[name].clone()
    ids.view(-1)[rng.randrange(ids.numel())] = rng.choice((-1, 2**31 - 1, 10**6))
    file.tensors[name] = ids
    return file.sealed()


def odd_positions(rng: random.Random, file: File) -> bytes:
    name = file.some(rng, "positions")
    positions = file.tensors[name].clone()
    if len(positions) < 2:
        return odd_field(rng, file)
    place = rng.randrange(1, len(positions))
    positions[place] = rng.choice((-1, 2**31 - 1, int(file.tensors["context_ids"].numel())))
    file.tensors[name] = positions
    return file.sealed()


def missing_tensor(rng: random.Random, file: File) -> bytes:
    del file.tensors[file.some(rng)]
    return file.sealed()


def strange_tensor(rng: random.Random, file: File) -> bytes:
    name = rng.choice(
        (
            "extra",
            "layers.0.keys.scales",
            "layers.999.keys",
            "layers.-1.keys",
            "layers.0.bias",
            "../x",
        )
    )
    file.tensors[name] = torch.ones(rng.choice((0, 1, 7)))
    return file.sealed()


def odd_field(rng: random.Random, file: File) -> bytes:
    """Give a field of the manifest a value of another kind."""
    name = rng.choice(
        [name for name in sorted(file.manifest) if name not in ("seconds", "versions")]
    )
    value = rng.choice([each for each in ODD if type(each) is not type(file.manifest[name])])
    file.manifest[name] = value
    return file.sealed()


def odd_inner_field(rng: random.Random, file: File) -> bytes:
    inner = rng.choice(
        [name for name in sorted(file.manifest) if isinstance(file.manifest[name], dict)]
    )
    keys = sorted(file.manifest[inner]) or ["a"]
    key = rng.choice(keys)
    if rng.random() < 0.3:
        file.manifest[inner].pop(key, None)
        file.manifest[inner]["surplus"] = 1
    else:
        file.manifest[inner][key] = rng.choice(
            [x for x in ODD if type(x) is not type(file.manifest[inner].get(key))]
        )
    return file.sealed()


def missing_field(rng: random.Random, file: File) -> bytes:
    name = rng.choice(
        [
            name
            for name in sorted(file.manifest)
            if name not in ("kv_dtype", "streaming_chunk", "separator")
        ]
    )
    del file.manifest[name]
    return file.sealed()


def wrong_number(rng: random.Random, file: File) -> bytes:
    """Change a number of the manifest, so that the tensors contradict it."""
    name = rng.choice(
        (
            "prefix",
            "tokens",
            "restore_tokens",
            "pairs_of_prefix",
            "pairs_held",
            "bytes_full",
            "bytes_held",
        )
    )
    file.manifest[name] += rng.choice((-1, 1, 2, 1000))
    return file.sealed()


def wrong_shape(rng: random.Random, file: File) -> bytes:
    name = rng.choice(("layers", "heads", "head_dim"))
    file.manifest["shape"][name] += rng.choice((-1, 1, 7))
    return file.sealed()


def odd_json(rng: random.Random, file: File) -> bytes:
    """Write a manifest that is not a JSON object, or one that no program should parse to
    its end.
    """
    whole = json.dumps(file.manifest)
    return file.sealed(
        rng.choice(
            (
                "",
                "[]",
                "null",
                "7",
                '"x"',
                "{",
                whole[:-1],
                whole + "x",
                "[" * 100_000,
                '{"a":' * 5000 + "1" + "}" * 5000,
                whole.replace('"tokens": ', '"tokens": ' + "9" * 6000),
                whole.replace('"rope": {', '"rope": {"x": NaN, '),
                whole[:-1] + ', "tokens": 5}',
                whole.replace('"model": "', '"model": "\\ud800'),
            )
        )
    )


def odd_metadata(rng: random.Random, file: File) -> bytes:
    name = rng.choice(("format", "version"))
    file.metadata[name] = rng.choice(("", "x", "0", "99", "3.0", "restorekv-cache2"))
    return file.sealed()


def odd_header(rng: random.Random, file: File) -> bytes:
    """Change entries of the safetensors header itself, and seal the file again."""
    length = int.from_bytes(file.raw[:8], "little")
    header, body = json.loads(file.raw[8 : 8 + length]), file.raw[8 + length :]
    header["__metadata__"]["checksum"] = BLANK
    name = rng.choice([name for name in sorted(header) if name != "__metadata__"])
    kind = rng.randrange(6)
    if kind == 0:
        header[name]["data_offsets"] = [0, rng.choice((0, 8, 2**40))]
    elif kind == 1:
        header[name]["shape"] = rng.choice(([-1], [2**62, 4], ["x"], None, [1.5]))
    elif kind == 2:
        header[name]["dtype"] = rng.choice(("F4", "U64", "C64", "", None, 7))
    elif kind == 3:
        header[name] = rng.choice((None, [], 7, {}))
    elif kind == 4:
        header["__metadata__"] = rng.choice((None, [], "x", {"format": 7}))
    else:
        header["__metadata__"]["manifest"] = rng.choice((None, 7, [], {}))
    text = json.dumps(header).encode()
    return seal(struct.pack("<Q", len(text)) + text + body)


def other_text(rng: random.Random, file: File) -> bytes:
    """Write a plausible lie that the tensors do not contradict."""
    name = rng.choice(("model", "evictor", "separator", "suffix_text"))
    file.manifest[name] = str(file.manifest[name]) + rng.choice((" ", "x", "\n"))
    return file.sealed()


def other_value(rng: random.Random, file: File) -> bytes:
    name = file.some(rng, rng.choice(("keys", "values")))
    values = file.tensors[name].clone()
    if not values.numel() or not values.is_floating_point():
        return other_text(rng, file)
    place = rng.randrange(values.numel())
    values.view(-1)[place] = values.view(-1)[place] * 2 + 1
    file.tensors[name] = values
    return file.sealed()


def other_id(rng: random.Random, file: File) -> bytes:
    ids = file.tensors["context_ids"].clone()
    place = rng.randrange(ids.numel())
    ids.view(-1)[place] = (int(ids.view(-1)[place]) + 1) % 100
    file.tensors["context_ids"] = ids
    return file.sealed()


HUGE = (3e38, -3e38, 1e30, 65_537.0, -1e6)
RAN = "ran"  # the file that a stranger's code leaves
EVIL = "evil-model"  # a folder next to the files, whose config.json names code; see `evil_model`


def huge_value(rng: random.Random, file: File) -> bytes:
    """Put a finite number that no model computes among keys, values, scales, biases or the restore
    cache.
    """
    names = [
        name
        for name, tensor in file.tensors.items()
        if tensor.dtype == torch.float32 and tensor.numel()
    ]
    name = rng.choice(sorted(names))
    values = file.tensors[name].clone()
    if rng.random() < 0.3:
        values.fill_(rng.choice(HUGE))
    else:
        values.view(-1)[rng.randrange(values.numel())] = rng.choice(HUGE)
    file.tensors[name] = values
    return file.sealed()


def odd_adapter(rng: random.Random, file: File) -> bytes:
    """Remove a field that readers need from the adapter's record, or give it another kind
    of value.
    """
    adapter = file.manifest["adapter"] or {"hash": "0" * 16, "restore_tokens": 2}
    name = rng.choice(("hash", "restore_tokens"))
    if rng.random() < 0.4:
        del adapter[name]
    else:
        adapter[name] = rng.choice([odd for odd in ODD if type(odd) is not type(adapter[name])])
    file.manifest["adapter"] = adapter
    return file.sealed()


def long_text(rng: random.Random, file: File) -> bytes:
    """Put more text around a question, or into a name, than any template or model has."""
    name = rng.choice(
        (
            "separator",
            "suffix_text",
            "model",
            "evictor",
            "allocation",
            "fingerprint",
            "template",
            "tokens_hash",
            "ratio",
        )
    )
    piece = rng.choice(("x", "x ", "\n", "Ω", "<|im_end|>"))
    file.manifest[name] = piece * rng.choice((4_200, 10_000, 300_000))
    return file.sealed()


def long_ids(rng: random.Random, file: File) -> bytes:
    ids = file.tensors["suffix_ids"]
    file.tensors["suffix_ids"] = torch.full(
        (1, rng.choice((1_100, 100_000, 500_000))), 5, dtype=ids.dtype
    )
    return file.sealed()


def large_count(rng: random.Random, file: File) -> bytes:
    """Write a huge number of positions, for which a reader would allocate memory."""
    name = rng.choice(("offset", "earlier", "streaming_chunk", "prefix", "tokens", "cut"))
    if name in ("streaming_chunk", "cut"):  # which only inform people
        name = "offset"
    file.manifest[name] = rng.choice((2**31 - 2_000, 2**31 - 1, 2**30, 2**25))
    return file.sealed()


def many_elements(rng: random.Random, file: File) -> bytes:
    """Write JSON that takes far more memory than it has bytes."""
    piece, count = (
        rng.choice(("[]", "{}", "0", '""', "[[]]")),
        rng.choice((100_001, 400_000, 1_300_000)),
    )
    name = rng.choice(("parts", "surplus", "rope"))
    file.manifest.pop(name, None)
    return file.sealed(
        json.dumps(file.manifest)[:-1] + f', "{name}": [' + ",".join([piece] * count) + "]}"
    )


def other_model(rng: random.Random, file: File) -> bytes:
    """Name a model that no reader may open just because a file names it."""
    file.manifest["model"] = rng.choice(
        (EVIL, f"./{EVIL}", f"../{EVIL}", "someone/model", "m.gguf", "/dev/zero", "-")
    )
    return file.sealed()


def other_gate(rng: random.Random, file: File) -> bytes:
    """Name an evictor with a gate file of the attacker's choice."""
    gate = rng.choice(("gate=", "gagate=,te=", " gate=", "chunk=64,gate="))
    file.manifest["evictor"] = (
        rng.choice(("fastkvzip:", "kvzap:")) + gate + rng.choice(("/dev/zero", "fifo", EVIL))
    )
    return file.sealed()


def evil_model(folder: Path, model: Path) -> None:
    """Copy a model's folder to one that asks transformers to run code; the code leaves the file
    `ran`.
    """
    evil = folder / EVIL
    shutil.copytree(model, evil)
    (evil / "evil.py").write_text(f"open({str(folder / RAN)!r}, 'w')\n\n\nclass Evil:\n    pass\n")
    names = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    tokenizer = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    for file, entries in (
        ("config.json", {"model_type": "evil", "auto_map": names | tokenizer}),
        ("tokenizer_config.json", {"tokenizer_class": "EvilTokenizer", "auto_map": tokenizer}),
    ):
        content = json.loads((evil / file).read_text())
        (evil / file).write_text(json.dumps({**content, **entries}))


def spaced(rng: random.Random, file: File) -> bytes:
    """Write the same header in another layout."""
    length = int.from_bytes(file.raw[:8], "little")
    header, body = json.loads(file.raw[8 : 8 + length]), file.raw[8 + length :]
    header["__metadata__"]["checksum"] = BLANK
    names = list(header)
    rng.shuffle(names)
    text = json.dumps(
        {name: header[name] for name in names}, indent=rng.choice((None, 0, 1))
    ).encode()
    text += b" " * (-len(text) % 8)
    return seal(struct.pack("<Q", len(text)) + text + body)


def same(rng: random.Random, file: File) -> bytes:
    return file.sealed()


Way = Callable[[random.Random, File], bytes]
RAW: tuple[Way, ...] = (flip, cut, lengthen, erase, move, header_length)
CONTRADICTING: tuple[Way, ...] = (
    fewer_rows,
    odd_offsets,
    not_finite,
    other_dtype,
    other_shape,
    odd_ids,
    odd_positions,
    missing_tensor,
    strange_tensor,
    odd_field,
    odd_inner_field,
    missing_field,
    wrong_number,
    wrong_shape,
    odd_json,
    odd_metadata,
    odd_header,
    huge_value,
    odd_adapter,
    long_text,
    long_ids,
    large_count,
    many_elements,
)
PLAUSIBLE: tuple[Way, ...] = (other_text, other_value, other_id, other_model, other_gate)
NEUTRAL: tuple[Way, ...] = (spaced, same)
