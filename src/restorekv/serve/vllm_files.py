"""Files of compressed documents, in the folder from which vLLM's connector reads them.

They are copies, which are gone after a restart; only the store keeps caches. A file is written for
the first question about its document. If there are too many, the least recently used are removed,
but never one that a question needs.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path

from restorekv.context import CompressedContext
from restorekv.serve.vllm_documents import DocumentFile, DocumentForm

# Names of our own files, by which those of an earlier server are recognized and removed.
OWN = re.compile(r"[0-9a-f]{32}\.(rkv|safetensors)")

# The keys of the caches that a file was made of, several for a composition.
Keys = tuple[str, ...]


class VllmFiles:
    """Files of up to `limit` bytes, by the keys of the caches that they were made of."""

    def __init__(self, folder: Path, limit: int, form: DocumentForm) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.form = form
        self.folder = folder
        self.limit = limit
        self.files: OrderedDict[Keys, DocumentFile] = OrderedDict()
        self.users: Counter[Keys] = Counter()  # questions that need the file now
        self.forgotten: set[Keys] = set()  # files to remove after their last question
        self.lock = threading.Lock()
        self.writing = threading.Lock()
        for path in folder.iterdir():
            if OWN.fullmatch(path.name):
                path.unlink()

    def find_path(self, keys: Sequence[str]) -> Path:
        """Return where a file is, or would be."""
        name = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:32]
        return self.folder / f"{name}{self.form.suffix}"

    def take(self, keys: Keys, context: CompressedContext) -> list[int]:
        """Return the placeholders of a document, after writing its file if there is none.

        The file stays until `give_back` has been called as often as this.
        """
        with self.lock:
            self.users[keys] += 1
        try:
            path = self.find_path(keys)
            with self.writing:
                if keys not in self.files or not path.exists():
                    written = self.form.write_file(context, path)
                    with self.lock:
                        self.files[keys] = written
            with self.lock:
                self.files.move_to_end(keys)
                return self.files[keys].ids
        except BaseException:
            self.give_back(keys)
            raise

    def give_back(self, keys: Keys) -> None:
        """Note that a question has ended; remove unused files that are too many or forgotten."""
        with self.lock:
            self.users[keys] -= 1
            total = sum(file.size for file in self.files.values())
            for each in list(self.files):
                is_newest = each == next(reversed(self.files))
                is_too_much = total > self.limit and not is_newest
                if not self.users[each] and (each in self.forgotten or is_too_much):
                    total -= self.files[each].size
                    self._remove(each)
            self.users += Counter()  # drops counts of 0
            # Without users, only files that could not be written are left to forget.
            self.forgotten &= self.users.keys()

    def forget(self, key: str) -> None:
        """Remove all files made from a cache that the store has dropped."""
        with self.lock:
            # A file that is being written has a user and is not in `files` yet.
            for keys in {*self.files, *self.users}:
                if key not in keys:
                    continue
                if self.users[keys]:
                    self.forgotten.add(keys)
                elif keys in self.files:
                    self._remove(keys)

    def _remove(self, keys: Keys) -> None:
        self.find_path(keys).unlink(missing_ok=True)
        self.forgotten.discard(keys)
        del self.files[keys]
