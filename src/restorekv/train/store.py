"""What does not change between steps and runs, kept on disk: scores, the teacher at its answers, prefilled caches.

Every entry is one safetensors file, named by a hash of all that it depends on (model, RoPE, template, text, ...), so
runs with other settings, seeds or evictors share what they have in common, and nothing stale is ever read. Files are
written whole or not at all; deleting some or all of them loses time only.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from restorekv.errors import RestoreKVError
from restorekv.files import replacing

VERSION = 1
SPARE = 2**30  # bytes of the disk that are left free


@dataclass
class Store:
    """A folder of entries; `facts` is what every entry depends on."""

    folder: Path
    facts: dict[str, object] = field(default_factory=dict)

    def path(self, part: str, key: dict[str, object]) -> Path:
        """Where the entry `part` of `key` is or would be."""
        text = json.dumps({"version": VERSION, **self.facts, **key}, sort_keys=True)
        return self.folder / part / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.safetensors"

    def find(self, part: str, key: dict[str, object]) -> dict[str, Tensor] | None:
        """The tensors of an entry, on the CPU; None if there is none."""
        path = self.path(part, key)
        if not path.is_file():
            return None
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise RestoreKVError(f"The cached file {path} is damaged; delete it, it will be made again.") from error

    def get(self, part: str, key: dict[str, object], make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The entry, made and written first if it is not there."""
        found = self.find(part, key)
        if found is None:
            found = make()
            self.put(part, key, found)
        return found

    def put(self, part: str, key: dict[str, object], tensors: dict[str, Tensor]) -> None:
        """Writes an entry; refuses when the disk is nearly full."""
        path = self.path(part, key)
        held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            size, free = sum(value.nbytes for value in held.values()), shutil.disk_usage(path.parent).free
            if size + SPARE > free:
                raise RestoreKVError(
                    f"{self.folder} has {free:,} bytes free and the next cached file takes {size:,}; "
                    "choose another place."
                )
            with replacing(path) as temporary:
                save_file(held, temporary, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise RestoreKVError(f"Cannot write to {self.folder}; choose a writable folder ({error}).") from error

    def nbytes(self) -> dict[str, int]:
        """Bytes on disk by part."""
        return {
            part.name: sum(file.stat().st_size for file in part.glob("*.safetensors"))
            for part in sorted(self.folder.iterdir())
            if part.is_dir()
        }
