"""Caches that several servers share: a folder at any address that fsspec knows, by document.

A file appears there whole or not at all. A deletion leaves a note, so that other servers drop their
copies. If the folder cannot be reached, its methods log that and return None, and for a while they
do not try again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from restorekv.errors import RestoreKVError, summarize_error
from restorekv.files import HOST, NUMBERS, replace_file

LOG = logging.getLogger("restorekv.serve")
# Protocols without folders; a file in them becomes visible once all of it has been written.
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
PAUSE = 30.0  # seconds until the next try after a failure
NOTES_LAST = 30 * 86400  # seconds for which a note of a deletion stays
HALF_WRITTEN = 86400  # seconds; an older temporary file was left by a server that died

Given = ParamSpec("Given")
Result = TypeVar("Result")


def pause_on_error(
    method: Callable[Concatenate[SharedFolder, Given], Result],
) -> Callable[Concatenate[SharedFolder, Given], Result | None]:
    """Decorate a method of SharedFolder: if it fails, return None and pause the folder.

    The error is logged. It may be of any kind, because each file system has its own. During the
    pause, all methods return None without trying.
    """

    @wraps(method)
    def run(self: SharedFolder, *args: Given.args, **options: Given.kwargs) -> Result | None:
        # A folder that is away would hold up every request until its time-out.
        if time.monotonic() < self.resumes:
            return None
        try:
            return method(self, *args, **options)
        except Exception as error:
            self.resumes = time.monotonic() + PAUSE
            LOG.warning(json.dumps({"shared": self.url, "problem": summarize_error(error)}))
            return None

    return run


class SharedFolder:
    """A folder of caches that several servers use.

    Args:
        url: Its address, as fsspec knows it.

    Raises:
        RestoreKVError: The folder cannot be used from the start.
    """

    files: Any  # fsspec's file system

    def __init__(self, url: str) -> None:
        self.url = re.sub("//[^/@]*@", "//", url)  # without a password
        self.resumes = 0.0  # on the clock of time.monotonic
        try:
            # An optional extra: only a server with a shared folder needs fsspec.
            fsspec = import_module("fsspec")
            # Without fsspec's own listings, which do not know what other servers write.
            self.files, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
            self.root = root.rstrip("/")
            protocols = self.files.protocol
            if isinstance(protocols, str):
                protocols = [protocols]
            self.is_object_store = not OBJECT_STORES.isdisjoint(protocols)
            for name in ("tmp", "deleted"):
                self._make_folder(f"{self.root}/{name}/x")
            # A folder that cannot be written to is found now, not after the first compression.
            trial = self._make_temporary_path("trial")
            self.files.pipe_file(trial, b"")
            self.files.rm_file(trial)
            self._remove_leftovers()
        except ImportError as error:
            raise RestoreKVError(
                f"The shared folder {self.url} needs a package ({summarize_error(error)}); "
                "install it."
            ) from None
        except Exception as error:  # each file system has its own
            reason = summarize_error(error) or type(error).__name__
            raise RestoreKVError(
                f"Cannot use the shared folder {self.url} ({reason}); check its address, your "
                "rights and the network."
            ) from None

    def cache_path(self, sha256: str, key: str) -> str:
        """Return where a cache is."""
        return f"{self.root}/{sha256}/{key}.rkv"

    @pause_on_error
    def put_cache(self, path: Path, sha256: str, key: str) -> bool:
        """Copy a cache to the folder; return whether it is there now."""
        target = self.cache_path(sha256, key)
        self._make_folder(target)
        # An object is visible once it is complete; a file has to be moved to its name.
        if self.is_object_store:
            self.files.put_file(str(path), target)
            return True
        temporary = self._make_temporary_path(key)
        try:
            self.files.put_file(str(path), temporary)
            self.files.mv(temporary, target)
        except BaseException:
            if self.files.exists(temporary):
                self.files.rm_file(temporary)
            raise
        return True

    @pause_on_error
    def get_cache(self, sha256: str, key: str, path: Path, max_bytes: int) -> bool:
        """Copy a cache from the folder, without checking what is in it.

        Args:
            sha256: Hash of the document.
            key: Key of the cache.
            path: Where it goes.
            max_bytes: How many bytes it may have.

        Returns:
            Whether there was one.
        """
        source = self.cache_path(sha256, key)
        try:
            info = self.files.info(source)
            # Others write to the folder too: neither a link nor a file of any size is followed.
            if info["type"] != "file" or info.get("islink") or info["size"] > max_bytes:
                return False
            with replace_file(path, follow=False) as temporary:
                self.files.get_file(source, str(temporary))
                # On some file systems a file that is deleted can still be read to its end.
                if not self.files.exists(source):
                    raise FileNotFoundError(source)
        except FileNotFoundError:
            # It is not there, or was deleted while it was copied.
            return False
        return True

    @pause_on_error
    def remove_cache(self, sha256: str, key: str) -> bool:
        """Delete one cache, if it is there; return whether that is done."""
        with suppress(FileNotFoundError):
            self.files.rm_file(self.cache_path(sha256, key))
        return True

    @pause_on_error
    def remove_document(self, sha256: str) -> bool:
        """Delete all caches of a document and leave a note; return whether that is done.

        Other servers may copy caches meanwhile. A server that pushes one looks for notes
        afterwards: if it finds none, its copy came before the note, and the deletion that follows
        the note removes it. A server that fetches one drops it if there is a later note. A cache
        can be fetched between the first note and its deletion, so there is a second note.
        """
        notes = []
        for _ in range(2):
            notes.append(f"{self.root}/deleted/{time.time_ns()}-{sha256}")
            self.files.pipe_file(notes[-1], b"")
            with suppress(FileNotFoundError):
                self.files.rm(f"{self.root}/{sha256}", recursive=True)
        self.files.rm_file(notes[0])
        return True

    @pause_on_error
    def list_removed(self) -> dict[str, int]:
        """Return the documents that were deleted lately, by their hash, each with the time of the
        deletion in nanoseconds.
        """
        # Sorted by time, so that the last deletion of a document counts.
        return {sha256: stamp for _, stamp, sha256 in sorted(self._list_stamped("deleted"))}

    @pause_on_error
    def set_aside(self, sha256: str, key: str) -> None:
        """Move a damaged cache away."""
        target = f"{self.root}/damaged/{key}.rkv"
        self._make_folder(target)
        with suppress(FileNotFoundError):  # another server has moved or deleted it
            self.files.mv(self.cache_path(sha256, key), target)

    def _make_temporary_path(self, name: str) -> str:
        """Return a path that no other server or thread uses, which begins with the time."""
        parts = (time.time_ns(), HOST, os.getpid(), next(NUMBERS), secrets.token_hex(8), name)
        return f"{self.root}/tmp/{'-'.join(map(str, parts))}"

    def _make_folder(self, path: str) -> None:
        """Make the folder of a file, if the file system has folders."""
        if not self.is_object_store:
            self.files.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _remove_leftovers(self) -> None:
        """Remove what dead servers left half-written, and old notes."""
        for folder, age in {"tmp": HALF_WRITTEN, "deleted": NOTES_LAST}.items():
            for path, stamp, _ in self._list_stamped(folder):
                if stamp < time.time_ns() - age * 10**9:
                    with suppress(FileNotFoundError):  # a server that starts now was faster
                        self.files.rm_file(path)

    def _list_stamped(self, folder: str) -> list[tuple[str, int, str]]:
        """Return the files named TIME-REST: for each its path, time in nanoseconds, and rest."""
        try:
            paths = self.files.ls(f"{self.root}/{folder}", detail=False)
        except FileNotFoundError:  # no file, hence no folder
            return []
        found = []
        for path in map(str, paths):
            stamp, _, rest = path.rpartition("/")[2].partition("-")
            if stamp.isdecimal():
                found.append((path, int(stamp), rest))
        return found
