"""What tells an intact file from an altered one, and with a key our own from a stranger's.

The metadata of a sealed safetensors file has a `checksum`, the SHA-256 of the whole file with that field zeroed, so one
altered byte anywhere, header included, is noticed. A file that is sealed with a key also has a `signature`, the
HMAC-SHA256 of that checksum.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from restorekv.errors import RestoreKVError, writing
from restorekv.files import read_bytes, regular, replacing

BLANK, BLANK_SIGNATURE = "0" * 64, "f" * 64
SIGNATURE = "signature"
SHORTEST_KEY = 16  # bytes


def sealed(tensors: dict[str, Tensor], metadata: Mapping[str, str], key: bytes | None = None) -> bytes:
    """Returns the bytes of a sealed safetensors file whose metadata has a `format`.

    Without a key, RESTOREKV_KEY is the key, if it is set; so in `check_seal`.
    """
    key = chosen_key(key)
    blanks = {"checksum": BLANK, **({SIGNATURE: BLANK_SIGNATURE} if key else {})}
    payload = safetensors.torch.save(tensors, {**metadata, **blanks})
    end = 8 + int.from_bytes(payload[:8], "little")
    header, rest = ordered(payload[8:end]), memoryview(payload)[end:]
    sha256 = hashlib.sha256(header)
    sha256.update(rest)
    digest = sha256.hexdigest()
    if key:
        header = header.replace(BLANK_SIGNATURE.encode(), signature(key, metadata["format"], digest).encode(), 1)
    return b"".join((header.replace(BLANK.encode(), digest.encode(), 1), rest))


def ordered(header: bytes) -> bytes:
    """Returns a safetensors header with its length, and with the metadata, which the library shuffles, in order."""
    entries = json.loads(header)
    entries["__metadata__"] = dict(sorted(entries["__metadata__"].items()))
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str], key: bytes | None = None) -> None:
    """Writes a sealed file that outlives a power cut; on any failure, Ctrl-C included, the old one stays."""
    payload = sealed(tensors, metadata, key)
    with writing(path), replacing(path) as temporary, temporary.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def check_seal(raw: bytes, metadata: Mapping[str, str], what: str, key: bytes | None = None) -> None:
    """Refuses an altered file and, with a key, a file that was not signed with it; `what` begins the sentence."""
    checksum, signed = metadata.get("checksum", ""), metadata.get(SIGNATURE, "")
    end = 8 + int.from_bytes(raw[:8], "little")
    start = raw[:end].replace(checksum.encode(), BLANK.encode(), 1)
    if signed:
        start = start.replace(signed.encode(), BLANK_SIGNATURE.encode(), 1)
    digest = hashlib.sha256(start)
    digest.update(memoryview(raw)[end:])
    if digest.hexdigest() != checksum:
        raise RestoreKVError(f"{what} is damaged, its checksum does not match; fetch or make it again.")
    if key := chosen_key(key):
        compare(signature(key, metadata["format"], checksum), signed, what)


def compare(expected: str, signed: object, what: str) -> None:
    """Refuses another signature than the expected one, in constant time."""
    if not hmac.compare_digest(expected.encode(), str(signed or "").encode()):
        how = "was signed with another key" if signed else "is not signed"
        raise RestoreKVError(f"{what} {how}; ask who made it, or make it again.")


def signed_with_key(kind: str, digest: str) -> dict[str, str]:
    """Returns the entry that signs a record with the key in RESTOREKV_KEY; nothing without one."""
    key = read_key()
    return {SIGNATURE: signature(key, kind, digest)} if key else {}


def check_signed(kind: str, digest: str, signed: object, path: Path) -> None:
    """Refuses what the key in RESTOREKV_KEY, if there is one, did not sign; what ships with the package is trusted."""
    key = read_key()
    if key and not path.resolve().is_relative_to(Path(__file__).parent):
        compare(signature(key, kind, digest), signed, str(path))


def digest(tensors: Mapping[str, Tensor], record: str) -> str:
    """Returns the SHA-256 of a file's record and of every tensor's name, dtype, shape and bytes."""
    sha256 = hashlib.sha256(record.encode())
    for name, tensor in sorted(tensors.items()):
        sha256.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        sha256.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a regular file; others, which may never end, are refused."""
    with regular(path, str(path)) as (file, _):
        return hashlib.file_digest(file, "sha256").hexdigest()


def signature(key: bytes, kind: str, digest: str) -> str:
    """Returns the HMAC-SHA256, in hexadecimal, of a file's format and checksum."""
    return hmac.new(key, f"{kind} {digest}".encode(), "sha256").hexdigest()


def read_key(path: Path | None = None) -> bytes | None:
    """Returns the key in a file, or else in RESTOREKV_KEY, or None."""
    if path is None and "RESTOREKV_KEY" not in os.environ:
        return None
    key = read_bytes(path, str(path)) if path else os.environ["RESTOREKV_KEY"].encode()
    return check_key(key.strip(), f"The key in {path or 'RESTOREKV_KEY'}")


def check_key(key: object, what: str) -> bytes:
    """Returns a key; refuses what is no bytes and what is too short."""
    if not isinstance(key, bytes):
        raise RestoreKVError(f"{what} is of bytes, not {type(key).__name__}; encode it, or read it from a file.")
    if len(key) < SHORTEST_KEY:
        raise RestoreKVError(f"{what} has fewer than {SHORTEST_KEY} bytes; make one with openssl rand.")
    return key


def chosen_key(key: bytes | None) -> bytes | None:
    """Returns the key that was given or, for None, the one in RESTOREKV_KEY, if there is one."""
    return read_key() if key is None else check_key(key, "The key")
