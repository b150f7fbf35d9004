"""A restore adapter on disk, in the format in which adapters are published.

adapter_config.json, adapter_model.safetensors   a PEFT LoRA adapter
restore_embeddings.safetensors                   "restore_embeddings" (n, d), and "ratio_vectors"
                                                 (n, d) of an adapter that knows the ratio
restorekv.json                                   the record of its training, with checksums
README.md                                        the model card

Adapters that other programs wrote lack the record. The model card is read only by `publish`, which
looks for a license in it.
"""

import errno
import hashlib
import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from restorekv import files, seal
from restorekv.errors import AdapterError, reraise_as, summarize_error
from restorekv.files import matches_type
from restorekv.model.shape import get_dtype_name
from restorekv.restore.lora import parse_lora_config

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
EMBEDDINGS = "restore_embeddings.safetensors"
CARD = "restorekv.json"
README = "README.md"
FILES = (CARD, CONFIG, WEIGHTS, EMBEDDINGS, README)
CHECKSUMMED = (CONFIG, WEIGHTS, EMBEDDINGS)  # their checksums are in the card
PENDING = ".replacing"  # new files before they are moved into the adapter's folder
READS = 10  # attempts to read an adapter that others are replacing
PREFIX = "base_model.model."  # what PEFT puts before the names of the model's own modules
VERSION = 3


@dataclass(frozen=True)
class AdapterCard:
    """The record of what an adapter was made for; a field is None if it was not recorded.

    Attributes:
        settings: The settings of the training.
        data: One row per source with source, examples, contexts, license and more.
        results: One row per measurement with benchmark, ratio, base, restored, full and more.
        source: The published adapter that this one is a copy of.
        local: Whether `model` was a folder or file where the adapter was created.
        weights: See base_weights.py.
        separator: The text between document and question in training.
        helps_up_to: The highest ratio at which a cache restored by it was no further from the full
            one than an unrestored cache was, on texts kept out of training.
        also_for: Specs of evictors that it was not trained for, whose caches it restores about as
            well as their own adapter, or better, on texts kept out of training.
        helps_from: By evictor of `also_for`, the lowest ratio at which a restored cache was no
            further from the full one than an unrestored cache was.
        knows_ratio: Whether the restore pass depends on the ratio, through ratio vectors.
    """

    model: str
    fingerprint: str
    rope: dict[str, object]
    restore_tokens: int
    dtype: str = "float32"
    evictor: str | None = None
    prefix_policy: str | None = None
    ratio_range: tuple[float, float] | None = None
    allocation: str = "global"
    restore_from: str = "full"
    embeddings: str = "learned"
    settings: dict[str, Any] | None = None
    data: list[dict[str, Any]] | None = None
    results: list[dict[str, Any]] | None = None
    license: str | None = None
    source: str | None = None
    local: bool | None = None
    weights: dict[str, Any] | None = None
    separator: str | None = None
    helps_up_to: float | None = None
    also_for: list[str] | None = None
    helps_from: dict[str, float] | None = None
    knows_ratio: bool = False

    def __post_init__(self) -> None:
        wrong = [
            field.name
            for field in fields(self)
            if not matches_type(getattr(self, field.name), field.type)
        ]
        # An adapter without a range passes.
        low, high = self.ratio_range or (1, 1)
        if not 0 < low <= high <= 1:
            wrong.append("ratio_range")
        if self.helps_up_to is not None and not 0 < self.helps_up_to <= 1:
            wrong.append("helps_up_to")
        if not all(0 < ratio <= 1 for ratio in (self.helps_from or {}).values()):
            wrong.append("helps_from")
        if wrong:
            raise TypeError(f"the field {wrong[0]} of the record has a wrong type or value")

    def find_helpful_ratios(self, evictor: str) -> tuple[float, float]:
        """Return the lowest and the highest ratio at which "auto" restores an evictor's caches.

        The highest is the measured one, or else the highest ratio of the training.
        """
        lowest = (self.helps_from or {}).get(evictor, 0.0)
        highest = self.helps_up_to
        if highest is None:
            highest = self.ratio_range[1] if self.ratio_range else 1.0
        return lowest, highest

    def is_helpful_at(self, evictor: str, ratio: Fraction) -> bool:
        """Return whether "auto" restores an evictor's caches at a ratio."""
        lowest, highest = self.find_helpful_ratios(evictor)
        # As decimals, not as the nearest doubles: 0.1 is the ratio 1/10.
        return Fraction(str(lowest)) <= ratio <= Fraction(str(highest))


def change_lora_dtype(card: AdapterCard, dtype: str) -> AdapterCard:
    """Return the card for LoRA weights of another dtype. Results then say with which one they were
    measured.
    """
    results = card.results
    if results and dtype != card.dtype:
        # What was measured before an earlier change keeps that dtype.
        results = [{**row, "lora_dtype": row.get("lora_dtype", card.dtype)} for row in results]
    return replace(card, dtype=dtype, results=results)


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as its files hold it: `lora` by the model's own module names, `embeddings` (n,
    d), and `ratio_vectors` (n, d) if it knows the ratio.
    """

    config: LoraConfig
    lora: dict[str, Tensor]
    embeddings: Tensor
    card: AdapterCard | None
    ratio_vectors: Tensor | None = None

    def get_card(self) -> AdapterCard:
        """Return the card, which every adapter that is written has."""
        assert self.card is not None, "only a copy of a published adapter has no card"
        return self.card

    def weights_hash(self) -> str:
        """Return 16 hex digits of names and values; values count as float32, which they are in
        use.
        """
        sha = hashlib.sha256()
        tensors = {"embeddings": self.embeddings, **self.lora}
        if self.ratio_vectors is not None:
            tensors["ratio_vectors"] = self.ratio_vectors
        for name, value in sorted(tensors.items()):
            sha.update(name.encode() + value.detach().to("cpu", torch.float32).numpy().tobytes())
        return sha.hexdigest()[:16]


def to_plain_json(value: Any) -> Any:
    """Return `value` as it comes back from JSON; raise AdapterError for what JSON cannot hold."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise AdapterError(
            f"An adapter's record holds plain JSON only ({error}); use numbers, texts and lists."
        ) from error


# Writing


def write_adapter(folder: Path, stored: StoredAdapter, readme: str | None = None) -> None:
    """Write an adapter, which replaces an older one as a whole; without a `readme`, keep its
    README.md. Refuse a folder with a different kind of adapter.
    """
    ours = (CARD, EMBEDDINGS)
    if (folder / CONFIG).exists() and not any(locate_file(folder, name).exists() for name in ours):
        raise AdapterError(
            f"{folder} holds an adapter that restores nothing, such as a LoRA of PEFT; choose "
            "another folder."
        )
    # All files are completed in a folder of this process. Once that folder is renamed to PENDING,
    # they are the adapter, even if the process dies. Then they are moved to the adapter's folder,
    # by this process or by the next one that writes there. Readers look into PENDING first.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = files.make_temporary_name(folder / "adapter")
        fresh.mkdir()
        try:
            _write_files(fresh, stored, readme)
            while not _try_commit(fresh, folder / PENDING):
                move_into_place(folder)
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
        move_into_place(folder)
    except (OSError, SafetensorError) as error:
        raise AdapterError(
            f"Cannot write the adapter to {folder}; choose a writable folder ({error})."
        ) from error


def _write_files(fresh: Path, stored: StoredAdapter, readme: str | None) -> None:
    """Write every file of an adapter."""
    stored.config.save_pretrained(str(fresh))
    # PEFT writes the file. It is sorted here, so that the same adapter has the same bytes.
    config = json.loads((fresh / CONFIG).read_text(encoding="utf-8"))
    if isinstance(config.get("target_modules"), list):
        config["target_modules"].sort()  # a set, in a different order in every process
    config_text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (fresh / CONFIG).write_text(config_text, encoding="utf-8")

    lora = {PREFIX + key: value.contiguous() for key, value in stored.lora.items()}
    # Written here, because safetensors itself makes files that their owner alone may read.
    (fresh / WEIGHTS).write_bytes(save(lora, metadata={"format": "pt"}))
    inputs = {"restore_embeddings": stored.embeddings.contiguous()}
    if stored.ratio_vectors is not None:
        inputs["ratio_vectors"] = stored.ratio_vectors.contiguous()
    (fresh / EMBEDDINGS).write_bytes(save(inputs))

    # The card names the bytes of the files next to it and is sealed itself.
    sums = {file: _digest((fresh / file).read_bytes()) for file in CHECKSUMMED}
    card = seal.seal_record({"version": VERSION, **asdict(stored.get_card()), "sha256": sums})
    (fresh / CARD).write_text(json.dumps(card, indent=2, sort_keys=True) + "\n")
    if readme is not None:
        (fresh / README).write_text(readme, encoding="utf-8")


def _try_commit(fresh: Path, pending: Path) -> bool:
    """Rename the folder of new files to `pending`; return False if a different process is moving
    its own files there.
    """
    try:
        fresh.rename(pending)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def move_into_place(folder: Path) -> None:
    """Move the files of PENDING to the adapter's folder.

    Several processes may do so at a time, or continue what a dead one began.
    """
    files.check_not_link(folder / PENDING)  # a link would take the files of a different folder
    for file in FILES:
        with suppress(FileNotFoundError):
            os.replace(folder / PENDING / file, folder / file)
    with suppress(OSError):
        (folder / PENDING).rmdir()


def locate_file(folder: Path, file: str) -> Path:
    """Return where a file of the adapter is: in its folder, or where a killed process left it."""
    pending = folder / PENDING / file
    return pending if pending.exists() else folder / file


# Reading


def read_adapter(folder: Path) -> StoredAdapter:
    """Read an adapter; raise AdapterError unless it is complete and undamaged."""
    for _ in range(READS):
        before = _identify_files(folder)
        try:
            stored = _read_files(folder)
        except AdapterError:
            # Files that a different process has moved in the meantime are not damage.
            if _identify_files(folder) == before:
                raise
            continue
        if _identify_files(folder) == before:
            return stored
    return _read_files(folder)


def _identify_files(folder: Path) -> list[tuple[str, int, int]]:
    """Return path, inode and time of every file, which change when the adapter is replaced."""
    found = []
    for parent in (folder / PENDING, folder):
        for file in FILES:
            with suppress(OSError):
                path = parent / file
                state = path.stat()
                found.append((str(path), state.st_ino, state.st_mtime_ns))
    return found


def _read_files(folder: Path) -> StoredAdapter:
    """Read every file of an adapter once, and compare them with each other."""
    for file in CHECKSUMMED:
        if not locate_file(folder, file).exists():
            run = folder / "adapter"
            if (run / CONFIG).exists():
                raise AdapterError(f"{folder} is the folder of a training run; pass {run}.")
            raise AdapterError(
                f"{folder} has no {file}; pass the folder of a complete restore adapter."
            )
    # Every file is read once: what was checked is what is used.
    with reraise_as(AdapterError):
        raw = {}
        for file in CHECKSUMMED:
            path = locate_file(folder, file)
            read = files.read_bytes if file == CONFIG else seal.read_tensor_bytes
            raw[file] = read(path, str(path))
        card = _read_card(folder, raw)
        weights = _parse_weights(raw[WEIGHTS], folder / WEIGHTS)
        lora = {key.removeprefix(PREFIX): value for key, value in weights.items()}
        config = _parse_config(folder, raw[CONFIG], lora)
        inputs = _parse_weights(raw[EMBEDDINGS], folder / EMBEDDINGS)
    embeddings = inputs.get("restore_embeddings")
    vectors = inputs.get("ratio_vectors")
    if embeddings is None or embeddings.ndim != 2 or 0 in embeddings.shape:
        raise AdapterError(
            f"{folder / EMBEDDINGS} has no tensor restore_embeddings (n, d); use a different "
            "adapter."
        )
    if vectors is not None and (vectors.shape, vectors.dtype) != (embeddings.shape, torch.float32):
        raise AdapterError(
            f"{folder / EMBEDDINGS} has ratio_vectors that are not float32 or not of the shape of "
            "its restore_embeddings; fetch or train the adapter again."
        )
    if card is not None:
        _check_card(folder, card, lora, embeddings, vectors)
    return StoredAdapter(config, lora, embeddings, card, vectors)


def _check_card(
    folder: Path,
    card: AdapterCard,
    lora: dict[str, Tensor],
    embeddings: Tensor,
    ratio_vectors: Tensor | None,
) -> None:
    """Refuse a record that contradicts the tensors."""
    dtypes = {get_dtype_name(value.dtype) for value in lora.values()}
    if (
        card.restore_tokens != len(embeddings)
        or embeddings.dtype != torch.float32
        or card.knows_ratio != (ratio_vectors is not None)
        or not dtypes <= {card.dtype}
    ):
        raise AdapterError(
            f"{folder / CARD} contradicts the tensors; fetch or train the adapter again."
        )


def _parse_config(folder: Path, raw: bytes, lora: dict[str, Tensor]) -> LoraConfig:
    """Return the LoRA config; refuse other kinds of adapter and one that the tensors contradict."""
    entries = files.parse_record(raw, str(folder / CONFIG))
    kind = None
    if isinstance(entries, dict):
        kind = entries.get("peft_type")
    if kind != "LORA":
        raise AdapterError(
            f"{folder} holds a {str(kind)[:40]!r} adapter; a restore adapter is a LORA one."
        )
    try:
        return parse_lora_config(entries, lora)
    except (ValueError, TypeError) as error:
        reason = summarize_error(error)
        raise AdapterError(
            f"{folder / CONFIG} is damaged or not a restore adapter's ({reason}); fetch or train "
            "the adapter again."
        ) from error


def _read_card(folder: Path, raw: dict[str, bytes]) -> AdapterCard | None:
    """Return the card, after comparing the checksums; None if there is no restorekv.json."""
    path = locate_file(folder, CARD)
    if not os.path.lexists(path):
        return None
    entries = files.read_record(path, str(path))
    try:
        version = entries["version"]
        if version != VERSION:
            raise AdapterError(
                f"{path} has format version {version!r}; this restorekv reads version {VERSION}."
            )
        if not seal.is_sealed_record(entries):
            raise ValueError("the checksum does not match")
        known = {
            field.name: entries[field.name]
            for field in fields(AdapterCard)
            if field.name in entries
        }
        # JSON has lists only, and the field is a tuple.
        if known.get("ratio_range"):
            known["ratio_range"] = tuple(known["ratio_range"])
        card = AdapterCard(**known)
        sums = entries["sha256"]
        changed = [file for file, content in raw.items() if _digest(content) != sums[file]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError(f"{path} is damaged; fetch or train the adapter again.") from error
    if changed:
        raise AdapterError(
            f"{folder / changed[0]} is not the file that was saved; fetch or train the adapter "
            "again."
        )
    return card


def _parse_weights(raw: bytes, path: Path) -> dict[str, Tensor]:
    """Return the tensors of safetensors, never those of a pickle, whatever the file is called."""
    _, tensors = seal.parse_tensors(raw, str(path))
    seal.check_weights(tensors, str(path), "use a different adapter")
    return tensors


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
